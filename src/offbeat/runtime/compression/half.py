"""Numbers of two bytes: half precision and brain floats."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import NonFiniteError
from offbeat.protocols.compression import SUMMED_AT_ONCE
from offbeat.runtime.compression.coder import PIECE, Coder, PayloadExchange, expect, numbers

_INFINITE, _SIGN = 0x7C00, 0x8000
"""Bits of a half: infinity, and the sign."""


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
        narrow, held = numbers(letter, self._kind), torch.empty(min(PIECE, out.numel()), dtype=out.dtype)
        for start in range(0, out.numel(), PIECE):
            piece = out[start : start + PIECE]
            # Torch is many times slower at adding numbers of two kinds than at converting one of them.
            piece.add_(held[: len(piece)].copy_(narrow[start : start + PIECE]), alpha=weight)

    def put(self, letter: Tensor, out: Tensor) -> None:
        """Copy the numbers."""
        expect(letter, 2 * out.numel())
        out.copy_(numbers(letter, self._kind))

    def sum(self, row: Tensor, total: Tensor, link: PayloadExchange) -> None:
        """The sum is rounded, too, so its error is nobody's debt."""
        for start in range(0, row.numel(), SUMMED_AT_ONCE):
            self._sum_piece(
                row[start : start + SUMMED_AT_ONCE], total[start : start + SUMMED_AT_ONCE], link, row is not total
            )

    def _sum_piece(self, row: Tensor, total: Tensor, link: PayloadExchange, apart: bool) -> None:
        said = row.to(self._kind)
        if apart:
            row.sub_(said.to(row.dtype))
        link.sum(said)
        if self._kind == torch.float16 and not _finite(said):
            raise NonFiniteError(
                "a sum in half precision is NaN or infinite: it ends at 65,504. Scale the loss down, or use bfloat, "
                "which has the range of float32."
            )
        total.copy_(said)


def _finite(row: Tensor) -> bool:
    """Whether no half is infinite or NaN: their bits, read as whole numbers, are the largest of either sign."""
    bits = row.view(torch.int16).numpy()
    return bool(bits.max() < _INFINITE and bits.view(np.uint16).max() < _INFINITE + _SIGN)
