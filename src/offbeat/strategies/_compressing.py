"""The compression axis: what a compressor's value says, and what an exchange asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offbeat.errors import StrategyError
from offbeat.runtime.compression import Coder
from offbeat.strategies._base import Axis, Strategy


@dataclass(frozen=True)
class Compressing(Strategy):
    """A strategy on the compression axis."""

    axis: ClassVar[Axis] = Axis.COMPRESSION
    selects: ClassVar[bool] = False
    """Whether it sends some of the numbers as they are, which a further compressor may then make smaller."""
    feedback: bool = True
    """Whether what was left out is added to the next step's; only there where something is left out on average."""

    def refuses(self, other: Strategy) -> str | None:
        """Exchanges that send nothing that could be made smaller."""
        if other.axis is Axis.EXCHANGE and not getattr(other, "carries", False):
            return f"{other} cannot compress what it sends"
        return None

    def coder(self, shapes: Sequence[tuple[int, ...]], seed: int, inner: Coder | None = None) -> Coder:
        """The worker's side for one row, the parameters of these shapes side by side.

        Where chance plays a part it comes from `seed`, the same on all workers; `inner` makes what it selects smaller.
        """
        del shapes, seed, inner
        raise StrategyError(f"{type(self).__name__} has no worker's side. Give it `coder(self, shapes, seed, inner)`.")
