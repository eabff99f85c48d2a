"""Ways of distributing a task, as values: written in Python, or as text."""

from __future__ import annotations

from offbeat.strategies._base import Axis, Combined, Setting, Strategy, Traits, combined
from offbeat.strategies.accumulate import Accumulate
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.coded import Coded
from offbeat.strategies.compressors.bfloat import BFloat
from offbeat.strategies.compressors.half import Half
from offbeat.strategies.compressors.lowrank import LowRank
from offbeat.strategies.compressors.quantize import Quantize
from offbeat.strategies.compressors.randomk import RandomK
from offbeat.strategies.compressors.sign import Sign
from offbeat.strategies.compressors.threshold import Threshold
from offbeat.strategies.compressors.topk import TopK
from offbeat.strategies.ddp import DDP
from offbeat.strategies.downpour import Downpour
from offbeat.strategies.elastic import Elastic
from offbeat.strategies.gossip import Gossip, Random
from offbeat.strategies.hogwild import Hogwild
from offbeat.strategies.language.parser import expand, parse, parse_built_in
from offbeat.strategies.language.reference import describe, overview
from offbeat.strategies.language.registry import aliases, available
from offbeat.strategies.local import Local, Nesterov, OuterSGD
from offbeat.strategies.server import ASP, BSP, SSP, Deadline, DropSlowest, Server
from offbeat.strategies.single import Single
from offbeat.strategies.worker.compression import Compressing
from offbeat.strategies.worker.exchange import Exchange, Exchanging, Pace, Timing

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
