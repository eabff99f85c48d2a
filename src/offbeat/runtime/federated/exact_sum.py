"""Sums of floating-point vectors that come out the same, bit for bit, in any order: fixed point in 64-bit integers."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

FRACTION_BITS: Final = 40
"""Binary digits after the point of a weighted mean: it is exact to 1e-12."""
LARGEST: Final = 2.0**20
"""Largest number that can be summed; an update with a larger one has diverged."""
_WHOLE_DOUBLES: Final = 2.0**52
"""Up to here sums of whole numbers are exact in 64-bit floating point, which is faster than integers."""


class ExactSum:
    """A weighted sum of vectors, in integers.

    With weights that sum to at most `whole`, sums stay below 2^61, so they cannot overflow. Partial sums of several
    workers are added as integers, which is exact.
    """

    def __init__(self, total: Tensor, whole: float = 1.0) -> None:
        self._total = total
        self.unit = 1.0
        """What 1 is as an integer."""
        self._wide = torch.empty(total.numel(), dtype=torch.float64, device=total.device)
        # Small terms are summed here first, as whole numbers; `_bound` is above the largest.
        self._doubles = torch.zeros_like(self._wide)
        self._bound = 0.0
        self.begin(whole)

    def begin(self, whole: float) -> None:
        """Start from 0, for weights that sum to at most `whole`.

        The unit is a power of two, so that scaling rounds nothing.
        """
        self._total.zero_()
        self._doubles.zero_()
        self._bound = 0.0
        self.unit = 2.0 ** (FRACTION_BITS - math.ceil(math.log2(max(whole, 1.0))))

    def add(self, vector: Tensor, weight: float) -> bool:
        """Add a vector `weight` times; False, and nothing is added, if it has NaN or a number that is too large."""
        largest = _bound_of(vector)
        if not largest <= LARGEST:  # NaN compares as False.
            return False
        scale = weight * self.unit
        wide = self._wide.copy_(vector).mul_(scale).round_()
        term = largest * scale + 1
        if self._bound + term > _WHOLE_DOUBLES:
            self.settle()
        if term > _WHOLE_DOUBLES:
            self._total += wide.long()
        else:
            self._doubles += wide
            self._bound += term
        return True

    def settle(self) -> Tensor:
        """The sum so far, as integers, in the tensor that was given."""
        if self._bound:
            self._total += self._doubles.long()
            self._doubles.zero_()
            self._bound = 0.0
        return self._total

    @staticmethod
    def fits(vector: Tensor) -> bool:
        """Whether all its numbers can be summed."""
        return _bound_of(vector) <= LARGEST

    def read(self) -> Tensor:
        """The sum as 64-bit floating-point numbers."""
        return self.settle().double().div_(self.unit)


def _bound_of(vector: Tensor) -> float:
    """At least the largest magnitude, and the largest itself where it matters; NaN or infinite if a number is."""
    # The root of the sum of squares is found in a quarter of the time, and nearly always small enough.
    bound = 1.001 * math.sqrt(float(torch.dot(vector, vector)))
    if bound <= LARGEST or not vector.numel():
        return bound
    least, most = torch.aminmax(vector)
    return max(-float(least), float(most)) if float(least) <= float(most) else math.nan
