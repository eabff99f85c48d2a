"""Compressors as pure data: what each keeps of a row of numbers, how many bytes that is, and how it is summed.

A row is the numbers of some tensors side by side. The coders (`runtime.compression`) make payloads of exactly the
lengths that are computed here; so do predictions, without a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple

from msgspec import Struct

BLOCK = 2048  # Numbers that share a scale: few, so that an outlier spoils little, but scales cost next to nothing.
SCALE_BYTES = 4
INDEX_BYTES = 4
COUNT_BYTES = 8  # Prefix of a payload whose reader cannot know how many numbers it holds, or which draw chose them.
SUMMED_AT_ONCE = 1 << 20  # Numbers summed at once: narrow ones stay in the cache, and exchanges are long enough.
LARGEST_ROW = 2**31 - 1  # Indices are 32-bit integers.

Shapes = Sequence[tuple[int, ...]]  # The tensors that lie side by side in a row.


class SumMethod(StrEnum):
    """How compressed payloads are summed."""

    GATHER = "gather"  # Every worker reads every payload.
    REDUCE = "reduce"  # Payloads are summed on the way, as numbers of their own type.


class RowFormat(Struct, frozen=True, tag=True):
    """What is kept of a row; the fields say how much."""

    fixed: ClassVar[bool] = True  # Whether bytes depend only on the row's length; else `nbytes` is an upper bound.
    summed: ClassVar[SumMethod] = SumMethod.GATHER

    def way(self, inner: RowFormat | None = None) -> SumMethod:  # noqa: ARG002
        """How it is summed."""
        return self.summed

    def nbytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """Bytes per worker of a sum, from numbers of `width` bytes; `inner` encodes those that are kept."""
        return sum(self.sums(shapes, width, inner))

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:
        """Bytes of each exchange of one sum, where one must wait for the other."""
        raise NotImplementedError

    def message_bytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """Bytes of a payload to one receiver, such as a server."""
        return self.nbytes(shapes, width, inner)


class HalfFormat(RowFormat, frozen=True, tag="half"):
    """IEEE half precision: 11 bits of precision, up to 65,504."""

    summed: ClassVar[SumMethod] = SumMethod.REDUCE

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:  # noqa: ARG002
        """Two bytes for each number; a long row piece by piece."""
        count = numbers_in(shapes)
        return tuple(2 * min(SUMMED_AT_ONCE, count - start) for start in range(0, count, SUMMED_AT_ONCE))


class BFloatFormat(HalfFormat, frozen=True, tag="bfloat"):
    """Brain floats: 8 bits of precision, and the range of float32."""


class QuantizeFormat(RowFormat, frozen=True, tag="quantize"):
    """Integers of 8, 4 or 2 bits times a scale for each block."""

    bits: int = 8
    stochastic: bool = False

    @property
    def levels(self) -> int:
        """The largest integer; minus that is the smallest."""
        return 2 ** (self.bits - 1) - 1

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:  # noqa: ARG002
        """A scale for each block, and the bits without a gap."""
        count = numbers_in(shapes)
        return (blocks_of(count) * SCALE_BYTES + math.ceil(count * self.bits / 8),)


class SignFormat(RowFormat, frozen=True, tag="sign"):
    """One bit for each number, times the mean magnitude of its block."""

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:  # noqa: ARG002
        """A scale for each block, and a bit for each number."""
        count = numbers_in(shapes)
        return (blocks_of(count) * SCALE_BYTES + math.ceil(count / 8),)


class TopKFormat(RowFormat, frozen=True, tag="topk"):
    """The largest numbers by magnitude, with their indices."""

    fraction: float = 0.01

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:
        """An index and a value for each number that is kept."""
        kept = kept_of(numbers_in(shapes), self.fraction)
        return (kept * INDEX_BYTES + _values(kept, width, inner),)


class ThresholdFormat(RowFormat, frozen=True, tag="threshold"):
    """All numbers beyond a magnitude, with their indices."""

    above: float = 0.001
    fixed: ClassVar[bool] = False

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:
        """An upper bound: every number is kept."""
        return (self.holding(numbers_in(shapes), width, inner),)

    def holding(self, kept: int, width: int = 4, inner: RowFormat | None = None) -> int:
        """Bytes with `kept` numbers: the count, and an index and a value for each."""
        return COUNT_BYTES + kept * INDEX_BYTES + _values(kept, width, inner)


class RandomKFormat(RowFormat, frozen=True, tag="randomk"):
    """Numbers at random places that all workers draw alike, so that no index travels."""

    fraction: float = 0.25

    def way(self, inner: RowFormat | None = None) -> SumMethod:
        """As the values are summed."""
        return SumMethod.REDUCE if inner is None else inner.way()

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:
        """A value for each number that is kept, summed as values are."""
        kept = kept_of(numbers_in(shapes), self.fraction)
        return (kept * width,) if inner is None else inner.sums([(kept,)], width)

    def message_bytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """With a prefix that tells the receiver which draw it was."""
        return COUNT_BYTES + self.nbytes(shapes, width, inner)


class LowRankFormat(RowFormat, frozen=True, tag="lowrank"):
    """Matrices as the product of two thin ones; everything else, and what would not get smaller, as it is."""

    rank: int = 4
    summed: ClassVar[SumMethod] = SumMethod.REDUCE

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:  # noqa: ARG002
        """Left sides with the rest, and then right sides."""
        matrices = matrices_in(shapes, self.rank)
        rest = numbers_in(shapes) - sum(m.rows * m.columns for m in matrices)
        lefts, rights = sum(m.rank * m.rows for m in matrices), sum(m.rank * m.columns for m in matrices)
        return (width * (lefts + rest), width * rights) if matrices else (width * rest,)


AnyFormat = (
    HalfFormat
    | BFloatFormat
    | QuantizeFormat
    | SignFormat
    | TopKFormat
    | ThresholdFormat
    | RandomKFormat
    | LowRankFormat
)
"""Every format: what a description received from another process may be."""


class Matrix(NamedTuple):
    """Where a matrix lies in a row, and its reduced rank."""

    start: int
    rows: int
    columns: int
    rank: int


def numbers_in(shapes: Shapes) -> int:
    """Number of elements of these tensors together."""
    return sum(math.prod(shape) for shape in shapes)


def blocks_of(count: int) -> int:
    """Number of blocks of a row; the last may be shorter."""
    return -(-count // BLOCK)


def kept_of(count: int, fraction: float) -> int:
    """Numbers of a row that are kept: this fraction, but at least one."""
    return min(count, max(1, round(count * fraction)))


def matrices_in(shapes: Shapes, rank: int) -> list[Matrix]:
    """The tensors that get smaller as products of thin matrices: their first dimension against all others."""
    matrices: list[Matrix] = []
    start = 0
    for shape in shapes:
        count = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 0
        columns = count // rows if rows else 0
        if rows and rank * (rows + columns) < count:
            matrices.append(Matrix(start, rows, columns, rank))
        start += count
    return matrices


def _values(kept: int, width: int, inner: RowFormat | None) -> int:
    return kept * width if inner is None else inner.nbytes([(kept,)], width)
