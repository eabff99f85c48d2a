"""Numbers of two bytes: half precision and brain floats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offbeat.errors import NonFiniteError
from offbeat.runtime.compression.coder import Coder, Link, expect, numbers


class Narrow(Coder):
    """Numbers rounded to the nearest of a narrower kind, and summed as such on the way."""

    def __init__(self, kind: torch.dtype) -> None:
        self._kind = kind

    def encode(self, row: Tensor) -> Tensor:
        """Two bytes for each number."""
        return row.detach().to(self._kind).view(torch.uint8)

    def add(self, letter: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add the numbers."""
        expect(letter, 2 * out.numel())
        out.add_(numbers(letter, self._kind), alpha=weight)

    def sum(self, row: Tensor, total: Tensor, link: Link) -> None:
        """The sum is rounded, too, so its error is nobody's debt."""
        said = row.detach().to(self._kind)
        if row is not total:
            row.sub_(said)
        total.copy_(link.sum(said))
        if self._kind == torch.float16 and not math.isfinite(float(total.sum())):
            raise NonFiniteError(
                "a sum in half precision is NaN or infinite: it ends at 65,504. Scale the loss down, or use bfloat, "
                "which has the range of float32."
            )
