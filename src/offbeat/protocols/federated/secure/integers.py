"""What the integers of a secure sum have in common: each has a fixed number of bits, and travels in no more."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.errors import UsageError
from offbeat.limits import SIMULATED_WORKERS, above_zero, whole

Row = NDArray[Any]
"""Integers without sign, modulo a power of two."""
MOST_NUMBERS: Final = 2**28 - 1
"""Numbers of an update: with its weight, a payload of 1 GiB."""
LARGEST_RANGE: Final = 1e30
BLOCK: Final = 65_536
"""Numbers encoded or packed at once, so that what is temporary stays in the cache."""
_GROUP: Final = 8  # Integers of any width fill whole bytes if there are so many.
MOST_WEIGHT: Final = 2**32 - 1
"""Largest sum of the weights of all clients."""


class SummedIntegers(Struct, frozen=True, kw_only=True):
    """How the updates of a round become integers that are summed modulo 2^width, and travel in `width` bits each."""

    length: int  # Numbers of an update.
    clients: int  # Most clients whose updates are summed.
    bound: float = 8.0  # Largest magnitude of a number; larger ones are clipped to it.
    examples: int = 1  # Largest weight of a client: its number of examples.

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        whole("length", self.length, MOST_NUMBERS)
        whole("clients", self.clients, SIMULATED_WORKERS)
        above_zero("bound", self.bound)
        if self.bound > LARGEST_RANGE:
            raise UsageError(f"bound {self.bound:g} is more than {LARGEST_RANGE:g}, the limit.")
        most = MOST_WEIGHT // self.clients
        whole("examples", self.examples, most, why=f"the weights of {self.clients:,} clients must add up below 2^32")

    @property
    def width(self) -> int:
        """Bits of an integer, in a sum and on its way."""
        raise NotImplementedError

    @property
    def words(self) -> int:
        """Integers of an encoded update, its weight included."""
        raise NotImplementedError

    @property
    def largest(self) -> int:
        """The integer that `bound` becomes."""
        raise NotImplementedError

    def encode(self, values: NDArray[np.floating], examples: int, seed: int) -> Row:
        """An update as integers, rounded with random numbers that follow from a seed; NaN is refused."""
        raise NotImplementedError

    def decode(self, total: Row) -> tuple[NDArray[np.float64], int]:
        """The mean of the updates whose integers were summed, weighted by examples, and the sum of these."""
        raise NotImplementedError

    def weight(self, total: Row) -> int:
        """The sum of the weights of the updates whose integers were summed."""
        raise NotImplementedError

    def clipped(self, values: NDArray[np.floating]) -> int:
        """How many numbers of an update are clipped."""
        return int(np.count_nonzero(np.abs(values) > self.bound))

    # In memory and on the way.

    @property
    def nbytes(self) -> int:
        """Bytes of an encoded update on its way."""
        return -(-self.words * self.width // 8)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds an integer."""
        return np.dtype("<u1" if self.width <= 8 else "<u2" if self.width <= 16 else "<u4")

    def reduced(self, row: Row) -> Row:
        """A row modulo 2^width."""
        return row & self.dtype.type(2**self.width - 1)

    def packed(self, row: Row) -> NDArray[np.uint8]:
        """A row on its way, `width` bits for each integer."""
        if self.width == 8 * self.dtype.itemsize:
            return row.astype(self.dtype, copy=False).view(np.uint8)
        content = np.zeros(-(-self.words // _GROUP) * self.width, np.uint8)
        for start in range(0, self.words, BLOCK):
            part = row[start : start + BLOCK]
            groups = np.zeros((-(-len(part) // _GROUP), _GROUP), np.uint64)
            groups.reshape(-1)[: len(part)] = self.reduced(part)
            first = start // _GROUP * self.width
            out = content[first : first + len(groups) * self.width].reshape(-1, self.width)
            for place in range(_GROUP):
                at, shift = divmod(place * self.width, 8)
                moved = groups[:, place] << np.uint64(shift)
                for byte in range(-(-(shift + self.width) // 8)):
                    out[:, at + byte] |= (moved >> np.uint64(8 * byte)).astype(np.uint8)
        return content[: self.nbytes]

    def unpacked(self, content: Any) -> Row:
        """The row that was packed."""
        whole_bytes = np.frombuffer(content, np.uint8)
        if self.width == 8 * self.dtype.itemsize:
            return whole_bytes.view(self.dtype)
        row = np.empty(-(-self.words // _GROUP) * _GROUP, self.dtype)
        padded = np.zeros(len(row) // _GROUP * self.width, np.uint8)
        padded[: len(whole_bytes)] = whole_bytes
        for start in range(0, len(row), BLOCK):
            groups = row[start : start + BLOCK].reshape(-1, _GROUP)
            first = start // _GROUP * self.width
            taken = padded[first : first + len(groups) * self.width].reshape(-1, self.width)
            for place in range(_GROUP):
                at, shift = divmod(place * self.width, 8)
                moved = np.zeros(len(groups), np.uint64)
                for byte in range(-(-(shift + self.width) // 8)):
                    moved |= taken[:, at + byte].astype(np.uint64) << np.uint64(8 * byte)
                groups[:, place] = (moved >> np.uint64(shift)) & np.uint64(2**self.width - 1)
        return row[: self.words]

    def check_values(self, values: NDArray[np.floating], examples: int) -> None:
        """Refuse an update of another length, and a weight out of range."""
        if values.shape != (self.length,):
            raise UsageError(f"an update has shape {values.shape}, but the round is for {self.length:,} numbers.")
        whole("examples", examples, self.examples, why="the largest weight that the round provides for")

    def check_total(self, total: Row) -> None:
        """Refuse a sum of another length."""
        if total.shape != (self.words,):
            raise UsageError(f"a sum has shape {total.shape}, but the round is for {self.words:,} integers.")
