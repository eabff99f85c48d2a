"""Updates as integers modulo 2^32: fixed point with room for the sum over all clients, and the weight at the end."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import NonFiniteError, UsageError
from offbeat.protocols.federated.secure.integers import BLOCK, Row, SummedIntegers

MODULUS: Final = 2**32


class FixedPoint(SummedIntegers, frozen=True, kw_only=True, tag=True):
    """How updates become integers: each is multiplied by its share of the largest weight, scaled and rounded.

    Rounding is up or down at random, so that it is right on average. A sum over all clients stays below 2^31 in
    magnitude, so no sum wraps around.
    """

    @property
    def width(self) -> int:
        """As many bits as a machine word has."""
        return 32

    @property
    def words(self) -> int:
        """Integers of an encoded update: its numbers, and its weight."""
        return self.length + 1

    @property
    def largest(self) -> int:
        """The integer that `bound` becomes."""
        # One less than fits, as rounding may go up.
        return (MODULUS // 2 - 1) // self.clients - 1

    def encode(self, values: NDArray[np.floating], examples: int, seed: int) -> Row:
        """An update as integers, rounded with random numbers that follow from a seed; NaN is refused."""
        self.check_values(values, examples)
        row = np.empty(self.words, np.uint32)
        scale = self.largest / self.bound * (examples / self.examples)
        rounded(values, self.bound, scale, seed, row[:-1])
        row[-1] = examples
        return row

    def decode(self, total: Row) -> tuple[NDArray[np.float64], int]:
        """The mean of the updates whose integers were summed, weighted by examples, and the sum of these."""
        self.check_total(total)
        examples = self.weight(total)
        if not examples:
            raise UsageError("a sum without examples has no mean: no update is in it.")
        unit = self.bound / self.largest * self.examples / examples
        return total[:-1].view(np.int32).astype(np.float64) * unit, examples

    def weight(self, total: Row) -> int:
        """The sum of the weights of the updates whose integers were summed."""
        return int(total[-1])


def rounded(values: NDArray[np.floating], bound: float, scale: float, seed: int, out: Row, most: int = 0) -> None:
    """Clip numbers, scale them, and round each up or down at random, with the probabilities that make the mean right.

    Args:
        values: The numbers; NaN is refused.
        bound: Their largest magnitude.
        scale: What they are multiplied by.
        seed: Of the random numbers.
        out: Gets the integers, negative ones modulo 2^32 or whatever its type holds.
        most: The largest integer, to which a sum that floating point has rounded up is lowered; 0: any.

    """
    random = np.random.Generator(np.random.PCG64(seed))
    for start in range(0, len(values), BLOCK):
        part = values[start : start + BLOCK].astype(np.float64)
        if not np.isfinite(part).all():
            raise NonFiniteError("an update has NaN or infinite numbers, which cannot be summed: it is not sent.")
        np.clip(part, -bound, bound, out=part)
        part *= scale
        part += random.random(len(part))
        np.floor(part, out=part)
        if most:
            np.minimum(part, most, out=part)
        # Through signed integers: negative numbers wrap around to the upper half.
        out[start : start + len(part)] = part.astype(np.int64).astype(out.dtype)
