"""The largest numbers."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.protocols import compression
from offbeat.strategies._base import require
from offbeat.strategies.worker.compression import Compressing


@dataclass(frozen=True)
class TopK(Compressing):
    """The largest numbers by magnitude, with their indices; each worker chooses its own.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017); Stich, Cordonnier and Jaggi,
    "Sparsified SGD with Memory" (2018).
    """

    fraction: float = 0.01
    """Of the numbers, those that are sent."""

    selects = True
    form = compression.TopKFormat
    examples = ("topk", "topk(0.05) + quantize", "topk(0.001, feedback=False)")

    def __post_init__(self) -> None:
        """Refuse to send nothing."""
        super().__post_init__()
        require(0 < self.fraction <= 1, self, "fraction", self.fraction, "a fraction is above 0 and at most 1")
