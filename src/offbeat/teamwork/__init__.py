"""The parts of a team: what they share, how things are taken in, what loaders report, what happens between steps."""

from __future__ import annotations

from offbeat.teamwork._adoption import Adoption
from offbeat.teamwork._boundaries import Boundaries
from offbeat.teamwork._ending import leave
from offbeat.teamwork._feed import LoaderFeed
from offbeat.teamwork._workplace import Workplace, set_up

__all__ = ["Adoption", "Boundaries", "LoaderFeed", "Workplace", "leave", "set_up"]
