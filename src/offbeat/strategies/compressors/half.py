"""Numbers of two bytes in half precision."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.protocols import compression
from offbeat.strategies.worker.compression import Compressing


@dataclass(frozen=True)
class Half(Compressing):
    """Half the bytes: numbers are rounded to half precision, and summed so on the way.

    Rounding to the nearest errs up and down alike, so nothing is remembered unless asked for. Half precision ends at
    65,504 and loses what is below 6e-8; `bfloat` has the range of float32 and 3 bits less of precision.
    """

    feedback: bool = field(default=False, kw_only=True)
    """Whether what rounding took is added to the next step's."""

    form = compression.HalfFormat
    examples = ("half", "topk + half")
