"""Any schedule, simulated run or term of a program as a picture, and runs as tables (`offbeat draw`, `reduce`)."""

from offbeat.draw._picture import MOST_LANES, picture
from offbeat.draw._subject import Scenario, Subject, subject_of, timeline_of
from offbeat.draw._tables import plain, port_rows, round_rows
from offbeat.draw._terms import term_picture

__all__ = [
    "MOST_LANES",
    "Scenario",
    "Subject",
    "picture",
    "plain",
    "port_rows",
    "round_rows",
    "subject_of",
    "term_picture",
    "timeline_of",
]
