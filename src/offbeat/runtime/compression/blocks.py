"""Rows in blocks that share a scale: how such letters are laid out, and worked through piece by piece.

A letter holds the scales of all blocks as float32, then the codes of all numbers. Only the last block may be shorter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from offbeat.protocols.compression import BLOCK, SCALE_BYTES, blocks_of
from offbeat.runtime.compression.coder import PIECE, Coder, expect, numbers

SMALLEST = 1e-30
"""A scale below it is taken for it, so that a block of zeros divides nothing by zero."""


class Blocks(Coder):
    """What coders with a scale for each block have in common."""

    bits: int
    """Of each number."""

    @abstractmethod
    def write(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Fill scales and codes for some blocks, the rows of `values`; the last byte of a row may not be full."""

    @abstractmethod
    def read(self, scales: Tensor, codes: Tensor, values: Tensor) -> None:
        """Fill the rows of `values` with what scales and codes say; there is one for every code, used or not."""

    def encode(self, row: Tensor) -> Tensor:
        """Scales, then codes."""
        letter = torch.empty(self._length(row.numel()), dtype=torch.uint8)
        for piece, scales, codes in self._pieces(row.detach(), letter):
            self.write(piece, scales, codes)
        return letter

    def add(self, letter: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add codes times scales."""
        expect(letter, self._length(out.numel()))
        held = torch.empty(min(PIECE, max(out.numel(), BLOCK)), dtype=out.dtype)
        for piece, scales, codes in self._pieces(out, letter):
            columns = codes.shape[1] * 8 // self.bits
            values = held[: codes.shape[0] * columns].view(-1, columns)
            self.read(scales, codes, values)
            piece.add_(values[:, : piece.shape[1]], alpha=weight)

    def put(self, letter: Tensor, out: Tensor) -> None:
        """Codes times scales, written where they belong."""
        expect(letter, self._length(out.numel()))
        for piece, scales, codes in self._pieces(out, letter):
            columns = codes.shape[1] * 8 // self.bits
            if columns == piece.shape[1]:
                self.read(scales, codes, piece)
            else:
                values = torch.empty(1, columns, dtype=out.dtype)
                self.read(scales, codes, values)
                piece.copy_(values[:, : piece.shape[1]])

    def _length(self, count: int) -> int:
        return blocks_of(count) * SCALE_BYTES + -(-count * self.bits // 8)

    def _pieces(self, row: Tensor, letter: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Some whole blocks at a time as rows of a matrix, with their scales and codes; then the shorter last one."""
        count, cut = row.numel(), blocks_of(row.numel()) * SCALE_BYTES
        scales, codes = numbers(letter[:cut], torch.float32), letter[cut:]
        whole, width = count // BLOCK * BLOCK, BLOCK * self.bits // 8
        for start in range(0, whole, PIECE):
            stop = min(start + PIECE, whole)
            first, last = start // BLOCK, stop // BLOCK
            yield (
                row[start:stop].view(-1, BLOCK),
                scales[first:last].unsqueeze(1),
                codes[first * width : last * width].view(-1, width),
            )
        if whole < count:
            yield row[whole:].unsqueeze(0), scales[-1:].unsqueeze(1), codes[whole * self.bits // 8 :].unsqueeze(0)
