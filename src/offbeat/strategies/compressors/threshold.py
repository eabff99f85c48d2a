"""All numbers beyond a magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.protocols import compression
from offbeat.strategies._base import require
from offbeat.strategies.worker.compression import Compressing


@dataclass(frozen=True)
class Threshold(Compressing):
    """All numbers beyond a magnitude, however many there are, with their indices.

    It is compared with what a worker adds to the mean over all workers: its own gradient times its share of the
    examples. (Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", 2015; there each is sent
    as one bit, as in `threshold + sign`.)
    """

    above: float = 0.001
    """The magnitude, often called lambda."""

    selects = True
    form = compression.ThresholdFormat
    examples = ("threshold", "threshold(0.01) + sign")

    def __post_init__(self) -> None:
        """Refuse a magnitude that everything is beyond."""
        super().__post_init__()
        require(self.above > 0, self, "above", self.above, "a magnitude is above 0")
