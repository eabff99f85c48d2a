"""Strategies: ways of distributing a task, as values written in Python or as text."""

from __future__ import annotations

from offbeat.strategies._base import Axis, Combined, Setting, Splitting, Strategy, Traits, combined
from offbeat.strategies.accumulate import Accumulate
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.coded import Coded
from offbeat.strategies.compressors import BFloat, Compressing, Half, LowRank, Quantize, RandomK, Sign, Threshold, TopK
from offbeat.strategies.ddp import DDP
from offbeat.strategies.downpour import Downpour
from offbeat.strategies.elastic import Elastic
from offbeat.strategies.gossip import Gossip, Random
from offbeat.strategies.hogwild import Hogwild
from offbeat.strategies.language.parser import expand, parse, parse_built_in
from offbeat.strategies.language.reference import describe, overview
from offbeat.strategies.language.registry import aliases, available
from offbeat.strategies.local import Local, Nesterov, OuterSGD
from offbeat.strategies.sandblaster import LineSearch, Sandblaster
from offbeat.strategies.server import ASP, BSP, SSP, Deadline, DropSlowest, Server
from offbeat.strategies.single import Single
from offbeat.strategies.splitting.pipeline import Pipeline
from offbeat.strategies.splitting.tensor import TensorParallel
from offbeat.strategies.worker.exchange import Exchange, Exchanging, Pace, Timing

__all__ = ["Axis", "Combined", "Setting", "Splitting", "Strategy", "Traits", "combined"]
__all__ += ["aliases", "available", "describe", "expand", "overview", "parse", "parse_built_in"]
__all__ += ["Compressing", "Exchange", "Exchanging", "Pace", "Timing"]
__all__ += [
    "DDP",
    "AllReduce",
    "Coded",
    "Downpour",
    "Elastic",
    "Gossip",
    "Hogwild",
    "LineSearch",
    "Sandblaster",
    "Server",
    "Single",
]
__all__ += ["ASP", "BSP", "SSP", "Accumulate", "Deadline", "DropSlowest", "Local", "Nesterov", "OuterSGD", "Random"]
__all__ += ["BFloat", "Half", "LowRank", "Quantize", "RandomK", "Sign", "Threshold", "TopK"]
__all__ += ["Pipeline", "TensorParallel"]
