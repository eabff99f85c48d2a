"""Updates as integers of few bits on one scale that all clients of a round share, so that they are summed undecoded.

Whatever needs more precision, such as a loss, comes at the end, each number in several integers.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import UsageError
from offbeat.limits import whole
from offbeat.protocols.federated.secure.fixed_point import MODULUS, FixedPoint, rounded
from offbeat.protocols.federated.secure.integers import Row, SummedIntegers

FEWEST_BITS: Final = 2
"""Of one bit nothing is left but a sign, and no 0."""
MOST_BITS: Final = 16
"""With more, the integers of `FixedPoint` are hardly larger."""


class CommonScale(SummedIntegers, frozen=True, kw_only=True, tag=True):
    """Integers of `bits` bits, whose sum over all clients has just as many more as it needs.

    The last `fine` numbers, and the weight, are rounded as `FixedPoint` does, and travel as digits to the base 2^bits.
    Digits are summed like all other integers, and none of their sums wraps around.
    """

    bits: int  # Of each number, its sign included.
    fine: int = 0  # Numbers at the end that are not rounded to so few bits.
    fine_bound: float = 8.0  # Their largest magnitude.

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        super().__post_init__()
        whole("bits", self.bits, MOST_BITS, FEWEST_BITS)
        whole("fine", self.fine, self.length - 1, 0, why="other numbers must be left")
        if self.width > 32:
            raise UsageError(
                f"bits={self.bits} and {self.clients:,} clients need {self.width} bits for each integer of their sum, "
                f"and 32 is the limit: plain updates take no more. Select fewer clients, or do not quantize."
            )
        if self.fine:
            FixedPoint(length=self.fine, clients=self.clients, bound=self.fine_bound, examples=self.examples)

    @property
    def width(self) -> int:
        """Bits of the sum of one integer of every client."""
        return self.bits + (self.clients - 1).bit_length()

    @property
    def words(self) -> int:
        """Integers of an encoded update: its numbers, then the digits of those that are fine and of its weight."""
        return self.length - self.fine + self._digits * (self.fine + 1)

    @property
    def largest(self) -> int:
        """The integer that `bound` becomes."""
        return 2 ** (self.bits - 1) - 1

    @property
    def _digits(self) -> int:
        """Integers of a fine number."""
        return -(-32 // self.bits)

    def encode(self, values: NDArray[np.floating], examples: int, seed: int) -> Row:
        """An update as integers, rounded with random numbers that follow from a seed; NaN is refused."""
        self.check_values(values, examples)
        coarse, row = self.length - self.fine, np.empty(self.words, self.dtype)
        scale = self.largest / self.bound * (examples / self.examples)
        rounded(values[:coarse], self.bound, scale, seed, row[:coarse], self.largest)
        tail = np.array([examples], np.uint32)
        if self.fine:
            tail = self._point.encode(values[coarse:], examples, seed ^ 1)
        places = np.arange(self._digits, dtype=np.uint32) * np.uint32(self.bits)
        row[coarse:] = ((tail[:, None] >> places) & np.uint32(2**self.bits - 1)).reshape(-1)
        return self.reduced(row)

    def decode(self, total: Row) -> tuple[NDArray[np.float64], int]:
        """The mean of the updates whose integers were summed, weighted by examples, and the sum of these."""
        self.check_total(total)
        coarse, tail = self.length - self.fine, self._tail(total)
        examples = int(tail[-1])
        if not examples:
            raise UsageError("a sum without examples has no mean: no update is in it.")
        values = np.empty(self.length)
        values[:coarse] = self.signed(total[:coarse]) * (self.bound / self.largest * self.examples / examples)
        if self.fine:
            values[coarse:] = self._point.decode(tail)[0]
        return values, examples

    def weight(self, total: Row) -> int:
        """The sum of the weights of the updates whose integers were summed."""
        return int(self._tail(total)[-1])

    def _tail(self, total: Row) -> NDArray[np.uint32]:
        """The fine numbers and the weight of a sum, put together from their digits."""
        digits = total[self.length - self.fine :].reshape(-1, self._digits).astype(np.uint64)
        places = np.arange(self._digits, dtype=np.uint64) * np.uint64(self.bits)
        return ((digits << places).sum(axis=1) % MODULUS).astype(np.uint32)

    def clipped(self, values: NDArray[np.floating]) -> int:
        """How many numbers of an update are clipped."""
        coarse = self.length - self.fine
        clipped = np.count_nonzero(np.abs(values[:coarse]) > self.bound)
        return int(clipped + np.count_nonzero(np.abs(values[coarse:]) > self.fine_bound))

    def sent(self, row: Row, examples: int) -> NDArray[np.float64]:
        """What the integers of a single update stand for, without its fine numbers."""
        return self.signed(row[: self.length - self.fine]) * (self.bound / self.largest * self.examples / examples)

    def signed(self, row: Row) -> NDArray[np.float64]:
        """Integers of the upper half as negative numbers."""
        numbers, half = row.astype(np.int64), 2 ** (self.width - 1)
        return ((numbers + half) % (2 * half) - half).astype(np.float64)

    @property
    def _point(self) -> FixedPoint:
        """How fine numbers are rounded."""
        return FixedPoint(length=self.fine, clients=self.clients, bound=self.fine_bound, examples=self.examples)
