"""Numbers of two bytes as brain floats."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.protocols import compression
from offbeat.strategies.worker.compression import Compressing


@dataclass(frozen=True)
class BFloat(Compressing):
    """Half the bytes: numbers are rounded to brain floats, which have the range of float32, and summed so on the way.

    Rounding to the nearest errs up and down alike, so nothing is remembered unless asked for.
    """

    feedback: bool = field(default=False, kw_only=True)
    """Whether what rounding took is added to the next step's."""

    form = compression.BFloatFormat
    examples = ("bfloat", "randomk(0.1) + bfloat")
