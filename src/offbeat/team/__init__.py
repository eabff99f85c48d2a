"""The parts of a team: what they share, how things are taken in, what loaders report, what happens between steps."""

from __future__ import annotations

from offbeat.team.between_steps import Boundaries
from offbeat.team.context import Workplace, set_up
from offbeat.team.ending import leave
from offbeat.team.loader_feed import LoaderFeed
from offbeat.team.prepare import Adoption

__all__ = ["Adoption", "Boundaries", "LoaderFeed", "Workplace", "leave", "set_up"]
