"""Compares strategies by their time to a target on this machine: `compare` runs them, `League` is table and verdict."""

from offbeat.league._compare import Spectator, compare
from offbeat.league._contestants import DEFAULT
from offbeat.league._league import League
from offbeat.league._records import Entry, Planned
from offbeat.league._rows import LeagueRow
from offbeat.statistics import Spread

__all__ = ["DEFAULT", "Entry", "League", "LeagueRow", "Planned", "Spectator", "Spread", "compare"]
