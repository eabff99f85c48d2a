"""Gradients of several batches are summed before they are exchanged and applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.strategies._base import Axis, Strategy, Traits, require


@dataclass(frozen=True)
class Accumulate(Strategy):
    """Sum the gradients of several batches, then exchange and apply them once."""

    steps: int
    """Batches per exchange and update."""

    axis = Axis.WHEN
    traits = Traits(synchronous=True, exact=True, deterministic=True)
    aliases: ClassVar = {"gradient_accumulation": "accumulate"}
    examples = ("accumulate(4)", "ddp + accumulate(4)")

    def __post_init__(self) -> None:
        """Refuse to wait for no batch at all."""
        super().__post_init__()
        require(self.steps >= 1, self, "steps", self.steps, "at least 1 batch is needed for an update")
