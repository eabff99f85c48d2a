"""Ways of distributing a task, as values: written in Python, or as text."""

from __future__ import annotations

from offbeat.strategies._base import Axis, Combined, Setting, Strategy, Traits, combined
from offbeat.strategies._describe import describe, overview
from offbeat.strategies._grammar import expand, parse
from offbeat.strategies._registry import aliases, available
from offbeat.strategies._worker import Exchange, Exchanging, Pace, Timing
from offbeat.strategies.accumulate import Accumulate
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.ddp import DDP
from offbeat.strategies.hogwild import Hogwild
from offbeat.strategies.single import Single

__all__ = [
    "DDP",
    "Accumulate",
    "AllReduce",
    "Axis",
    "Combined",
    "Exchange",
    "Exchanging",
    "Hogwild",
    "Pace",
    "Setting",
    "Single",
    "Strategy",
    "Timing",
    "Traits",
    "aliases",
    "available",
    "combined",
    "describe",
    "expand",
    "overview",
    "parse",
]
