"""Matrices as products of thin ones."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from offbeat.protocols import compression
from offbeat.strategies._base import Strategy, require
from offbeat.strategies.worker.compression import Compressing


@dataclass(frozen=True)
class LowRank(Compressing):
    """Matrices become products of two thin ones, by power iteration that goes on from step to step.

    What is not a matrix, or would not get smaller, is sent as it is. Thin matrices are summed on the way, in two
    exchanges. Vogels, Karimireddy and Jaggi, "PowerSGD" (2019).
    """

    rank: int = 4
    """Columns of the thin matrices."""

    encodes_values = False
    aliases = MappingProxyType({"powersgd": "lowrank"})
    form = compression.LowRankFormat
    examples = ("lowrank", "lowrank(2)")

    def __post_init__(self) -> None:
        """Refuse a rank of nothing."""
        super().__post_init__()
        require(self.rank >= 1, self, "rank", self.rank, "a rank is 1 or more")

    def refuses(self, other: Strategy) -> str | None:
        """Exchanges that send letters to one receiver at a time."""
        if getattr(other, "sends_letters", False):
            return f"{self} needs all workers to sum the same thin matrices in two exchanges, and {other} sends letters"
        return super().refuses(other)
