"""Ways of distributing a task, as values: written in Python, or as text."""

from __future__ import annotations

from offbeat.strategies._base import Axis, Combined, Setting, Strategy, Traits, combined
from offbeat.strategies._describe import describe, overview
from offbeat.strategies._grammar import expand, parse
from offbeat.strategies._registry import aliases, available
from offbeat.strategies._worker import Exchange, Exchanging, Pace, Timing
from offbeat.strategies.accumulate import Accumulate
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.coded import Coded
from offbeat.strategies.ddp import DDP
from offbeat.strategies.downpour import Downpour
from offbeat.strategies.elastic import Elastic
from offbeat.strategies.gossip import Gossip, Random
from offbeat.strategies.hogwild import Hogwild
from offbeat.strategies.local import Local, Nesterov, OuterSGD
from offbeat.strategies.server import ASP, BSP, SSP, Deadline, DropSlowest, Server
from offbeat.strategies.single import Single

__all__ = [
    "ASP",
    "BSP",
    "DDP",
    "SSP",
    "Accumulate",
    "AllReduce",
    "Axis",
    "Coded",
    "Combined",
    "Deadline",
    "Downpour",
    "DropSlowest",
    "Elastic",
    "Exchange",
    "Exchanging",
    "Gossip",
    "Hogwild",
    "Local",
    "Nesterov",
    "OuterSGD",
    "Pace",
    "Random",
    "Server",
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
