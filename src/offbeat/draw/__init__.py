"""Any schedule, or a simulated run of servers or machines, as a picture and as a table (`offbeat draw`)."""

from offbeat.draw._picture import MOST_LANES, picture
from offbeat.draw._subject import Scenario, Subject, subject_of, timeline_of
from offbeat.draw._tables import plain, port_rows, round_rows

__all__ = [
    "MOST_LANES",
    "Scenario",
    "Subject",
    "picture",
    "plain",
    "port_rows",
    "round_rows",
    "subject_of",
    "timeline_of",
]
