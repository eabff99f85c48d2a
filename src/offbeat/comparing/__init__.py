"""Which strategy gets there first, here: `compare` plays a league of runs, `League` is its table and verdict."""

from offbeat.comparing._compare import Spectator, compare
from offbeat.comparing._contestants import DEFAULT
from offbeat.comparing._league import League
from offbeat.comparing._order import Planned
from offbeat.comparing._records import Entry
from offbeat.comparing._rows import Row
from offbeat.statistics import Spread

__all__ = ["DEFAULT", "Entry", "League", "Planned", "Row", "Spectator", "Spread", "compare"]
