"""Numbers of two bytes: half precision and bfloat16."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import NonFiniteError
from offbeat.protocols.compression import SUMMED_AT_ONCE
from offbeat.runtime.compression.coder import PIECE, Coder, GroupLink, expect, numbers

_INFINITE, _SIGN = 0x7C00, 0x8000
"""Bits of a half: infinity, and the sign."""


class HalfCoder(Coder):
    """Numbers rounded to a two-byte dtype, and summed as such in transit."""

    def __init__(self, kind: torch.dtype) -> None:
        self._kind = kind

    def encode(self, row: Tensor) -> Tensor:
        """Two bytes for each number."""
        return row.detach().to(self._kind).view(torch.uint8)

    def add(self, payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add the numbers."""
        expect(payload, 2 * out.numel())
        narrow, held = numbers(payload, self._kind), torch.empty(min(PIECE, out.numel()), dtype=out.dtype)
        for start in range(0, out.numel(), PIECE):
            piece = out[start : start + PIECE]
            # Torch is many times slower at adding two dtypes than at converting one of them.
            piece.add_(held[: len(piece)].copy_(narrow[start : start + PIECE]), alpha=weight)

    def put(self, payload: Tensor, out: Tensor) -> None:
        """Copy the numbers."""
        expect(payload, 2 * out.numel())
        out.copy_(numbers(payload, self._kind))

    def sum(self, row: Tensor, total: Tensor, link: GroupLink) -> None:
        """The sum is rounded, too; no worker keeps that error."""
        for start in range(0, row.numel(), SUMMED_AT_ONCE):
            part = slice(start, start + SUMMED_AT_ONCE)
            narrow = row[part].to(self._kind)
            if row is not total:
                row[part].sub_(narrow.to(row.dtype))
            link.sum(narrow)
            if self._kind == torch.float16 and not _finite(narrow):
                raise NonFiniteError(
                    "a sum in half precision is NaN or infinite: it ends at 65,504. Scale the loss down, or use "
                    "bfloat, which has the range of float32."
                )
            total[part].copy_(narrow)


def _finite(row: Tensor) -> bool:
    """Whether no half is infinite or NaN: as integers, their bits are the largest of either sign."""
    bits = row.view(torch.int16).numpy()
    return bool(bits.max() < _INFINITE and bits.view(np.uint16).max() < _INFINITE + _SIGN)
