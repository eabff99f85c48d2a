"""The compression axis: what a compressor's value says, and what an exchange asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from offbeat.errors import StrategyError
from offbeat.protocols.compression import RowFormat, Shapes
from offbeat.protocols.partition import mixed
from offbeat.runtime.compression import Coder, Feedback, build
from offbeat.strategies._base import Axis, Strategy, Traits


@dataclass(frozen=True)
class Compressing(Strategy):
    """A strategy on the compression axis."""

    axis: ClassVar[Axis] = Axis.COMPRESSION
    first_alone: ClassVar[bool] = True
    selects: ClassVar[bool] = False
    """Whether it sends some of the numbers as they are, which a further compressor may then make smaller."""
    form: ClassVar[type[RowFormat] | None] = None
    """The kind of `format`, whose fields are among its own."""
    promises = Traits(synchronous=True, deterministic=True, elastic=True)
    feedback: bool = field(default=True, kw_only=True)
    """Whether what was left out is added to the next step's."""

    def refuses(self, other: Strategy) -> str | None:
        """Exchanges that send nothing that could be made smaller."""
        if other.axis is Axis.EXCHANGE and not getattr(other, "carries", False):
            return f"{other} cannot compress what it sends"
        return None

    def follows(self, earlier: Sequence[Strategy]) -> str | None:
        """Values that another one has selected may be made smaller once; everything else is all that is left."""
        last = earlier[-1]
        if not getattr(last, "selects", False):
            return f"{last} leaves codes, no numbers that could be made smaller; only topk, threshold and randomk do"
        if self.selects:
            return f"{self} selects numbers, and {last} has done that; write the one that selects fewer"
        if self.format() is None or not self.encodes_values:
            return f"{self} needs whole tensors, and {last} leaves some of their numbers"
        return None

    encodes_values: ClassVar[bool] = True
    """Whether it can make any row of numbers smaller, such as the values that another one has selected."""

    @property
    def owes(self) -> bool:
        """Whether what it leaves out is remembered."""
        return self.feedback

    def format(self) -> RowFormat | None:
        """What it leaves of a row, as plain data: for servers and predictions; None if only its coder knows."""
        if self.form is None:
            return None
        return self.form(**{name: getattr(self, name) for name in self.form.__struct_fields__})

    def coder(self, shapes: Shapes, seed: int, inner: Coder | None = None, rank: int = 0) -> Coder:
        """The worker's side for one row, the parameters of these shapes side by side.

        Where chance plays a part it comes from `seed`, the same on all workers, and where theirs must differ, from
        `rank`, too; `inner` makes what it selects smaller.
        """
        form = self.format()
        if form is None:
            raise StrategyError(
                f"{type(self).__name__} has no worker's side. Give it `format(self)` or `coder(self, shapes, seed, "
                f"inner, rank)`."
            )
        return build(
            form, shapes, seed=seed, own_seed=mixed(seed, rank), inner=inner, unbiased=self.selects and not self.owes
        )


def compressor(compressions: Sequence[Compressing], shapes: Shapes, seed: int, rank: int) -> Feedback:
    """What a sum of compressions does to a row, with the memory of what it leaves out; the first decides on that."""
    inner: Coder | None = None
    for compression in reversed(compressions):
        inner = compression.coder(shapes, seed, inner, rank)
    if inner is None:
        raise StrategyError("no compression was named, so there is nothing to compress by")
    return Feedback(inner, compressions[0].owes)
