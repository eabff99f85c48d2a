"""Ways of distributing a task, as values: written in Python, or as text."""

from __future__ import annotations

from offbeat.strategies._base import Axis, Combined, Setting, Strategy, Traits, combined
from offbeat.strategies._compressing import Compressing
from offbeat.strategies._describe import describe, overview
from offbeat.strategies._grammar import expand, parse, parse_built_in
from offbeat.strategies._registry import aliases, available
from offbeat.strategies._worker import Exchange, Exchanging, Pace, Timing
from offbeat.strategies.accumulate import Accumulate
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.bfloat import BFloat
from offbeat.strategies.coded import Coded
from offbeat.strategies.ddp import DDP
from offbeat.strategies.downpour import Downpour
from offbeat.strategies.elastic import Elastic
from offbeat.strategies.gossip import Gossip, Random
from offbeat.strategies.half import Half
from offbeat.strategies.hogwild import Hogwild
from offbeat.strategies.local import Local, Nesterov, OuterSGD
from offbeat.strategies.lowrank import LowRank
from offbeat.strategies.quantize import Quantize
from offbeat.strategies.randomk import RandomK
from offbeat.strategies.server import ASP, BSP, SSP, Deadline, DropSlowest, Server
from offbeat.strategies.sign import Sign
from offbeat.strategies.single import Single
from offbeat.strategies.threshold import Threshold
from offbeat.strategies.topk import TopK

__all__ = [
    "ASP",
    "BSP",
    "DDP",
    "SSP",
    "Accumulate",
    "AllReduce",
    "Axis",
    "BFloat",
    "Coded",
    "Combined",
    "Compressing",
    "Deadline",
    "Downpour",
    "DropSlowest",
    "Elastic",
    "Exchange",
    "Exchanging",
    "Gossip",
    "Half",
    "Hogwild",
    "Local",
    "LowRank",
    "Nesterov",
    "OuterSGD",
    "Pace",
    "Quantize",
    "Random",
    "RandomK",
    "Server",
    "Setting",
    "Sign",
    "Single",
    "Strategy",
    "Threshold",
    "Timing",
    "TopK",
    "Traits",
    "aliases",
    "available",
    "combined",
    "describe",
    "expand",
    "overview",
    "parse",
    "parse_built_in",
]
