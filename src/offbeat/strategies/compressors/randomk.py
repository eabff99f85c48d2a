"""Numbers at random places."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.protocols import compression
from offbeat.strategies._base import require
from offbeat.strategies.worker.compression import Compressing


@dataclass(frozen=True)
class RandomK(Compressing):
    """Numbers at random places, which all workers draw alike: no index travels, and values are summed on the way.

    With feedback the others are sent another time. Without, each stands for those around it, so that the mean over many
    steps is right, but a step is far off. (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018.)
    """

    fraction: float = 0.25
    """Of the numbers, those that are sent."""

    selects = True
    form = compression.RandomKFormat
    examples = ("randomk", "randomk(0.1) + half")

    def __post_init__(self) -> None:
        """Refuse to send nothing."""
        super().__post_init__()
        require(0 < self.fraction <= 1, self, "fraction", self.fraction, "a fraction is above 0 and at most 1")
