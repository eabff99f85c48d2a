"""Compressors: top-k, random-k, threshold, quantization, sign, half precision and low rank.

Each is one value: its arguments, its format (`protocols.compression`, plain data that servers and predictions read too)
and whether it keeps error feedback. `runtime.compression` builds the coder of a format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal

from offbeat.errors import StrategyError
from offbeat.protocols import compression as formats
from offbeat.protocols.compression import RowFormat, Shapes
from offbeat.protocols.partition import mixed
from offbeat.runtime.compression import Coder, Feedback, build
from offbeat.strategies._base import Axis, Strategy, Traits
from offbeat.strategies.language.fields import Ranges

_FRACTION: Ranges = (("fraction", lambda share: 0 < share <= 1, "a fraction is above 0 and at most 1"),)


@dataclass(frozen=True)
class Compressing(Strategy):
    """A strategy on the compression axis."""

    axis: ClassVar[Axis] = Axis.COMPRESSION
    first_alone: ClassVar[bool] = True
    selects: ClassVar[bool] = False
    """Whether it sends a selection of the numbers unchanged, which another compressor may then encode."""
    encodes_values: ClassVar[bool] = True
    """Whether it can encode any row of numbers, such as the values that another compressor selected."""
    form: ClassVar[type[RowFormat] | None] = None
    """The class of `format`, whose fields are among its own."""
    promises = Traits(synchronous=True, deterministic=True, elastic=True)
    feedback: bool = field(default=True, kw_only=True)
    """Whether what was left out is added to the next step's gradient."""

    def refuses(self, other: Strategy) -> str | None:
        """Exchanges that send nothing that can be compressed."""
        if other.axis is Axis.EXCHANGE and not getattr(other, "carries", False):
            return f"{other} cannot compress what it sends"
        return None

    def follows(self, earlier: Sequence[Strategy]) -> str | None:
        """Values that another compressor selected may be encoded once; nothing else leaves numbers to encode."""
        last = earlier[-1]
        if not getattr(last, "selects", False):
            return f"{last} leaves codes, no numbers that could be made smaller; only topk, threshold and randomk do"
        if self.selects:
            return f"{self} selects numbers, and {last} has done that; write the one that selects fewer"
        if self.format() is None or not self.encodes_values:
            return f"{self} needs whole tensors, and {last} leaves some of their numbers"
        return None

    @property
    def owes(self) -> bool:
        """Whether it keeps error feedback."""
        return self.feedback

    def format(self) -> RowFormat | None:
        """The format of its messages as plain data, for servers and predictions; None if only its coder knows."""
        if self.form is None:
            return None
        return self.form(**{name: getattr(self, name) for name in self.form.__struct_fields__})

    def coder(self, shapes: Shapes, seed: int, inner: Coder | None = None, rank: int = 0) -> Coder:
        """The worker's side for one row: tensors of these shapes, side by side.

        Randomness comes from `seed`, which is the same on all workers, and where theirs must differ from `rank` too;
        `inner` encodes the values that it selects.
        """
        form = self.format()
        if form is None:
            raise StrategyError(
                f"{type(self).__name__} has no worker's side. Give it `format(self)` or `coder(self, shapes, seed, "
                f"inner, rank)`."
            )
        unbiased = self.selects and not self.owes
        return build(form, shapes, seed=seed, own_seed=mixed(seed, rank), inner=inner, unbiased=unbiased)


def compressor(compressions: Sequence[Compressing], shapes: Shapes, seed: int, rank: int) -> Feedback:
    """The coder of a sum of compressors for one row, with error feedback if the first of them keeps it."""
    inner: Coder | None = None
    for compression in reversed(compressions):
        inner = compression.coder(shapes, seed, inner, rank)
    if inner is None:
        raise StrategyError("no compression was named, so there is nothing to compress by")
    return Feedback(inner, compressions[0].owes)


@dataclass(frozen=True)
class Half(Compressing):
    """Half the bytes: numbers are rounded to half precision, and summed in it.

    Rounding to the nearest has no bias, so there is no error feedback unless asked for. Half precision ends at 65,504
    and loses what is below 6e-8; `bfloat` has the range of float32 and 3 bits less of precision.
    """

    feedback: bool = field(default=False, kw_only=True)
    """Whether the rounding error is added to the next step's gradient."""

    form = formats.HalfFormat
    examples = ("half", "topk + half")


@dataclass(frozen=True)
class BFloat(Half):
    """Half the bytes: numbers are rounded to brain floats, which have the range of float32, and summed in them.

    Rounding to the nearest has no bias, so there is no error feedback unless asked for.
    """

    form = formats.BFloatFormat
    examples = ("bfloat", "randomk(0.1) + bfloat")


@dataclass(frozen=True)
class Quantize(Compressing):
    """Numbers become integers of 8, 4 or 2 bits, times a scale for every 2,048 of them.

    Rounded to the nearest, the error is added to the next step's gradient. Rounded at random (`stochastic`), numbers
    are right on average and there is no error feedback. (Alistarh et al., "QSGD", 2017; 2 bits: Wen et al., "TernGrad",
    2017.)
    """

    bits: Literal[8, 4, 2] = 8
    """Bits of each number."""
    stochastic: bool = False
    """Whether numbers are rounded up or down at random, with the probabilities that make the mean right."""

    form = formats.QuantizeFormat
    examples = ("quantize", "quantize(4)", "quantize(2, stochastic=True)", "topk(0.05) + quantize(4)")

    @property
    def owes(self) -> bool:
        """Not if stochastic: random rounding may err by more than the number itself, so the feedback would grow."""
        return self.feedback and not self.stochastic


@dataclass(frozen=True)
class Sign(Compressing):
    """One bit for each number, its sign, times the mean magnitude of every 2,048 of them.

    Karimireddy et al., "Error Feedback Fixes SignSGD" (2019); Seide et al., "1-Bit SGD" (2014).
    """

    form = formats.SignFormat
    examples = ("sign", "topk(0.05) + sign")


@dataclass(frozen=True)
class TopK(Compressing):
    """The largest numbers by magnitude, with their indices; each worker chooses its own.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017); Stich, Cordonnier and Jaggi,
    "Sparsified SGD with Memory" (2018).
    """

    fraction: float = 0.01
    """Fraction of the numbers that is sent."""

    selects = True
    form = formats.TopKFormat
    examples = ("topk", "topk(0.05) + quantize", "topk(0.001, feedback=False)")
    _ranges = _FRACTION


@dataclass(frozen=True)
class Threshold(Compressing):
    """All numbers above a magnitude, however many there are, with their indices.

    The magnitude is that of a worker's contribution to the mean over all workers: its own gradient times its share of
    the examples. (Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", 2015; there each is
    sent as one bit, as in `threshold + sign`.)
    """

    above: float = 0.001
    """The magnitude, often called lambda."""

    selects = True
    form = formats.ThresholdFormat
    examples = ("threshold", "threshold(0.01) + sign")
    _ranges = (("above", lambda magnitude: magnitude > 0, "a magnitude is above 0"),)


@dataclass(frozen=True)
class RandomK(Compressing):
    """Numbers at random indices that all workers draw alike: no index is sent, and values are summed in transit.

    With feedback the other numbers are sent in a later step. Without it each stands for those around it: right on
    average over many steps, but far off in any one. (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018.)
    """

    fraction: float = 0.25
    """Fraction of the numbers that is sent."""

    selects = True
    form = formats.RandomKFormat
    examples = ("randomk", "randomk(0.1) + half")
    _ranges = _FRACTION


@dataclass(frozen=True)
class LowRank(Compressing):
    """Matrices become products of two thin ones, by power iteration that continues from step to step.

    What is not a matrix, or would not get smaller, is sent as it is. Thin matrices are summed in transit, in two
    exchanges. Vogels, Karimireddy and Jaggi, "PowerSGD" (2019).
    """

    rank: int = 4
    """Columns of the thin matrices."""

    encodes_values = False
    aliases = MappingProxyType({"powersgd": "lowrank"})
    form = formats.LowRankFormat
    examples = ("lowrank", "lowrank(2)")
    _ranges = (("rank", lambda rank: rank >= 1, "a rank is 1 or more"),)

    def refuses(self, other: Strategy) -> str | None:
        """Exchanges whose messages have a single receiver."""
        if getattr(other, "point_to_point", False):
            return (
                f"{self} needs all workers to sum the same thin matrices in two exchanges, and {other} sends each "
                "message to one receiver"
            )
        return super().refuses(other)


COMPRESSORS: tuple[type[Compressing], ...] = (Half, BFloat, Quantize, Sign, TopK, Threshold, RandomK, LowRank)
"""The built-in compressors, in the order in which they are listed."""
