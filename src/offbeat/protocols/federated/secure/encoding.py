"""Updates as integers modulo 2^32: fixed point with room for the sum over all clients, and the weight at the end."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.errors import NonFiniteError, UsageError
from offbeat.limits import SIMULATED_WORKERS, above_zero, whole
from offbeat.protocols.federated.secure.masks import Row

MODULUS: Final = 2**32
MOST_NUMBERS: Final = 2**28 - 1
"""Numbers of an update: with its weight, a payload of 1 GiB."""
LARGEST_RANGE: Final = 1e30
_BLOCK: Final = 65_536  # Numbers encoded at once, so that what is temporary stays in the cache.


class FixedPoint(Struct, frozen=True, kw_only=True):
    """How updates become integers: each is multiplied by its share of the largest weight, scaled and rounded.

    Rounding is up or down at random, so that it is right on average. A sum over all clients stays below 2^31 in
    magnitude, so no sum wraps around.
    """

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
        most = (MODULUS - 1) // self.clients
        whole("examples", self.examples, most, why=f"the weights of {self.clients:,} clients must add up below 2^32")

    @property
    def words(self) -> int:
        """Integers of an encoded update: its numbers, and its weight."""
        return self.length + 1

    @property
    def nbytes(self) -> int:
        """Bytes of an encoded update."""
        return 4 * self.words

    @property
    def largest(self) -> int:
        """The integer that `bound` becomes."""
        # One less than fits, as rounding may go up.
        return (MODULUS // 2 - 1) // self.clients - 1

    def encode(self, values: NDArray[np.floating], examples: int, seed: int) -> Row:
        """An update as integers, rounded with random numbers that follow from a seed; NaN is refused."""
        if values.shape != (self.length,):
            raise UsageError(f"an update has shape {values.shape}, but the round is for {self.length:,} numbers.")
        whole("examples", examples, self.examples, why="the largest weight that the round provides for")
        row = np.empty(self.words, np.uint32)
        random = np.random.Generator(np.random.PCG64(seed))
        scale = self.largest / self.bound * (examples / self.examples)
        for start in range(0, self.length, _BLOCK):
            part = values[start : start + _BLOCK].astype(np.float64)
            if not np.isfinite(part).all():
                raise NonFiniteError("an update has NaN or infinite numbers, which cannot be summed: it is not sent.")
            np.clip(part, -self.bound, self.bound, out=part)
            part *= scale
            part += random.random(len(part))
            # Through signed integers: negative numbers wrap around to the upper half.
            row[start : start + len(part)] = np.floor(part, out=part).astype(np.int64).astype(np.uint32)
        row[-1] = examples
        return row

    def clipped(self, values: NDArray[np.floating]) -> int:
        """How many numbers of an update are clipped."""
        return int(np.count_nonzero(np.abs(values) > self.bound))

    def decode(self, total: Row) -> tuple[NDArray[np.float64], int]:
        """The mean of the updates whose integers were summed, weighted by examples, and the sum of these."""
        if total.shape != (self.words,):
            raise UsageError(f"a sum has shape {total.shape}, but the round is for {self.words:,} integers.")
        examples = int(total[-1])
        if not examples:
            raise UsageError("a sum without examples has no mean: no update is in it.")
        unit = self.bound / self.largest * self.examples / examples
        return total[:-1].view(np.int32).astype(np.float64) * unit, examples
