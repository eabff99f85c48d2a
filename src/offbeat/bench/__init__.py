"""Benchmarks collectives on real processes: ours, Gloo's and MPI's in turn, verified, then timed."""

from offbeat.bench._calls import CALLS
from offbeat.bench._collectives import PEERS, Measured, collectives, described, environment, measured
from offbeat.bench._mpi import why_no_mpi
from offbeat.bench._show import picture, table
from offbeat.statistics import Spread, geometric_mean, holds, ratio

__all__ = [
    "CALLS",
    "PEERS",
    "Measured",
    "Spread",
    "collectives",
    "described",
    "environment",
    "geometric_mean",
    "holds",
    "measured",
    "picture",
    "ratio",
    "table",
    "why_no_mpi",
]
