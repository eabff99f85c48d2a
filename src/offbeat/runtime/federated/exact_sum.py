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


class ExactSum:
    """A weighted sum of vectors, in integers.

    With weights that sum to at most `whole`, sums stay below 2^61, so they cannot overflow. Partial sums of several
    workers are added as integers, which is exact.
    """

    def __init__(self, total: Tensor, whole: float = 1.0) -> None:
        self.total = total
        """The sum so far, as integers."""
        self.unit = 1.0
        """What 1 is as an integer."""
        self._wide = torch.empty(total.numel(), dtype=torch.float64, device=total.device)
        self._rounded = torch.empty_like(total)
        self.begin(whole)

    def begin(self, whole: float) -> None:
        """Choose the unit for weights that sum to at most `whole`: a power of two, so that scaling rounds nothing."""
        self.unit = 2.0 ** (FRACTION_BITS - math.ceil(math.log2(max(whole, 1.0))))

    def add(self, vector: Tensor, weight: float) -> bool:
        """Add a vector `weight` times; False, and nothing is added, if it has NaN or a number that is too large."""
        if not self.fits(vector):
            return False
        wide = self._wide.copy_(vector).mul_(weight * self.unit)
        self.total += self._rounded.copy_(wide.round_())
        return True

    @staticmethod
    def fits(vector: Tensor) -> bool:
        """Whether all its numbers can be summed."""
        if not vector.numel():
            return True
        least, most = torch.aminmax(vector)
        return float(least) >= -LARGEST and float(most) <= LARGEST  # NaN compares as False.

    def read(self) -> Tensor:
        """The sum as 64-bit floating-point numbers."""
        return self.total.double().div_(self.unit)
