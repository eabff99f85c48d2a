"""Compressors as pure data: what each leaves of a row of numbers, how many bytes that is, and how it is summed.

A row is the numbers of some tensors side by side. The coders that do it (`runtime.compression`) make letters of exactly
the lengths that are computed here; so do predictions, without a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple

from msgspec import Struct

BLOCK = 2048
"""Numbers that share a scale: few enough that an outlier spoils little, enough that scales cost next to nothing."""
SCALE_BYTES = 4
INDEX_BYTES = 4
COUNT_BYTES = 8
"""What stands before a letter whose reader cannot know how many numbers it holds, or which draw chose them."""
SUMMED_AT_ONCE = 1 << 20
"""Numbers that are summed at once: what is narrow then stays in the cache, and each exchange is long enough to pay."""
LARGEST_ROW = 2**31 - 1
"""Indices are whole numbers of 32 bits."""

Shapes = Sequence[tuple[int, ...]]
"""The tensors that lie side by side in a row."""


class SumMethod(StrEnum):
    """How what workers send is summed."""

    GATHER = "gather"
    """Everybody reads everybody's letter."""
    REDUCE = "reduce"
    """Letters are summed on the way, as numbers of their own kind."""


class RowFormat(Struct, frozen=True, tag=True):
    """What is left of a row; the fields say how much."""

    fixed: ClassVar[bool] = True
    """Whether the number of bytes depends on nothing but the row's length; else the most there can be is told."""

    def way(self, inner: RowFormat | None = None) -> SumMethod:
        """How it is summed."""
        del inner
        return SumMethod.GATHER

    def nbytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """Bytes that one worker brings to a sum, from numbers of `width` bytes; `inner` encodes those that are kept."""
        raise NotImplementedError

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:
        """Bytes of each exchange of one sum, where one must wait for the other."""
        return (self.nbytes(shapes, width, inner),)

    def letter(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """Bytes of a letter to one receiver, such as a server."""
        return self.nbytes(shapes, width, inner)


class HalfFormat(RowFormat, frozen=True, tag="half"):
    """IEEE half precision: 11 bits of precision, up to 65,504."""

    def way(self, inner: RowFormat | None = None) -> SumMethod:
        """Sums of halves are halves."""
        del inner
        return SumMethod.REDUCE

    def nbytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """Two bytes for each number."""
        del width, inner
        return 2 * numbers_in(shapes)

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:
        """A long row piece by piece."""
        del width, inner
        count = numbers_in(shapes)
        return tuple(2 * min(SUMMED_AT_ONCE, count - start) for start in range(0, count, SUMMED_AT_ONCE))


class BFloatFormat(HalfFormat, frozen=True, tag="bfloat"):
    """Brain floats: 8 bits of precision, and the range of float32."""


class QuantizeFormat(RowFormat, frozen=True, tag="quantize"):
    """Whole numbers of 8, 4 or 2 bits times a scale for each block."""

    bits: int = 8
    stochastic: bool = False

    @property
    def levels(self) -> int:
        """The largest whole number; minus that is the smallest."""
        return 2 ** (self.bits - 1) - 1

    def nbytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """A scale for each block, and the bits without a gap."""
        del width, inner
        count = numbers_in(shapes)
        return blocks_of(count) * SCALE_BYTES + math.ceil(count * self.bits / 8)


class SignFormat(RowFormat, frozen=True, tag="sign"):
    """One bit for each number, times the mean magnitude of its block."""

    def nbytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """A scale for each block, and a bit for each number."""
        del width, inner
        count = numbers_in(shapes)
        return blocks_of(count) * SCALE_BYTES + math.ceil(count / 8)


class TopKFormat(RowFormat, frozen=True, tag="topk"):
    """The largest numbers by magnitude, with their indices."""

    fraction: float = 0.01

    def nbytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """An index and a value for each number that is kept."""
        kept = kept_of(numbers_in(shapes), self.fraction)
        return kept * INDEX_BYTES + _values(kept, width, inner)


class ThresholdFormat(RowFormat, frozen=True, tag="threshold"):
    """All numbers beyond a magnitude, with their indices."""

    above: float = 0.001
    fixed: ClassVar[bool] = False

    def nbytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """At most, if every number is kept."""
        return self.holding(numbers_in(shapes), width, inner)

    def holding(self, kept: int, width: int = 4, inner: RowFormat | None = None) -> int:
        """With so many numbers kept: how many, and an index and a value for each."""
        return COUNT_BYTES + kept * INDEX_BYTES + _values(kept, width, inner)


class RandomKFormat(RowFormat, frozen=True, tag="randomk"):
    """Numbers at random places that all workers draw alike, so that no index travels."""

    fraction: float = 0.25

    def way(self, inner: RowFormat | None = None) -> SumMethod:
        """As their values are summed."""
        return SumMethod.REDUCE if inner is None else inner.way()

    def nbytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """A value for each number that is kept."""
        return sum(self.sums(shapes, width, inner))

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:
        """As the values are summed."""
        kept = kept_of(numbers_in(shapes), self.fraction)
        return (kept * width,) if inner is None else inner.sums([(kept,)], width)

    def letter(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """A receiver must be told which draw it was."""
        return COUNT_BYTES + self.nbytes(shapes, width, inner)


class LowRankFormat(RowFormat, frozen=True, tag="lowrank"):
    """Matrices as the product of two thin ones; everything else, and what would not get smaller, as it is."""

    rank: int = 4

    def way(self, inner: RowFormat | None = None) -> SumMethod:
        """Thin matrices are summed like any numbers, one side after the other."""
        del inner
        return SumMethod.REDUCE

    def nbytes(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> int:
        """Both thin matrices of each, and the rest."""
        return sum(self.sums(shapes, width, inner))

    def sums(self, shapes: Shapes, width: int = 4, inner: RowFormat | None = None) -> tuple[int, ...]:
        """Left sides with the rest, and then right sides."""
        del inner
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
"""Every one there is: what a description off a wire may be."""


class Matrix(NamedTuple):
    """Where a matrix lies in a row, and the rank that is left of it."""

    start: int
    rows: int
    columns: int
    rank: int


def numbers_in(shapes: Shapes) -> int:
    """How many numbers these tensors have together."""
    return sum(math.prod(shape) for shape in shapes)


def blocks_of(count: int) -> int:
    """How many blocks a row is cut into; the last may be shorter."""
    return -(-count // BLOCK)


def kept_of(count: int, fraction: float) -> int:
    """How many numbers of a row are kept: this fraction, but at least one."""
    return min(count, max(1, round(count * fraction)))


def matrices_in(shapes: Shapes, rank: int) -> list[Matrix]:
    """The tensors that get smaller as products of thin matrices: their first dimension against all others."""
    found: list[Matrix] = []
    start = 0
    for shape in shapes:
        count = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 0
        columns = count // rows if rows else 0
        if rows and rank * (rows + columns) < count:
            found.append(Matrix(start, rows, columns, rank))
        start += count
    return found


def _values(kept: int, width: int, inner: RowFormat | None) -> int:
    return kept * width if inner is None else inner.nbytes([(kept,)], width)
