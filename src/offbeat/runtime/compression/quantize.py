"""Numbers of few bits, times a scale for each block of the row.

Stochastic rounding, up or down with probabilities that make the mean right: Alistarh et al., "QSGD", 2017; with 2
bits, which hold -1, 0 and 1, Wen et al., "TernGrad", 2017. The scaled sign: Karimireddy et al., "Error Feedback Fixes
SignSGD and other Gradient Compression Schemes", 2019.

A payload holds the scales of all blocks as float32, then the codes of all numbers. Only the last block may be shorter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.protocols.compression import BLOCK, SCALE_BYTES, QuantizeFormat, blocks_of
from offbeat.protocols.partition import mixed
from offbeat.runtime.compression.coder import PIECE, Coder, expect, numbers

_SMALLEST = 1e-30
"""Smallest scale, so that a block of zeros is not divided by zero."""
_MARGIN = 1 + 2**-20
"""Scales are this much too large, so that rounding never lifts a number beyond the largest code."""


class BlockCoder(Coder):
    """Base of coders with a scale for each block."""

    bits: int
    """Of each number."""

    @abstractmethod
    def write(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Fill scales and codes for some blocks, the rows of `values`; the last byte of a row may not be full."""

    @abstractmethod
    def read(self, scales: Tensor, codes: Tensor, values: Tensor) -> None:
        """Decode into the rows of `values`, which have a number for every code, used or not."""

    def encode(self, row: Tensor) -> Tensor:
        """Scales, then codes."""
        payload = torch.empty(self._length(row.numel()), dtype=torch.uint8)
        for piece, scales, codes in self._pieces(row.detach(), payload):
            self.write(piece, scales, codes)
        return payload

    def add(self, payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add codes times scales."""
        expect(payload, self._length(out.numel()))
        held = torch.empty(min(PIECE, max(out.numel(), BLOCK)), dtype=out.dtype)
        for piece, scales, codes in self._pieces(out, payload):
            columns = codes.shape[1] * 8 // self.bits
            values = held[: codes.shape[0] * columns].view(-1, columns)
            self.read(scales, codes, values)
            piece.add_(values[:, : piece.shape[1]], alpha=weight)

    def put(self, payload: Tensor, out: Tensor) -> None:
        """Decode straight into `out`."""
        expect(payload, self._length(out.numel()))
        for piece, scales, codes in self._pieces(out, payload):
            columns = codes.shape[1] * 8 // self.bits
            if columns == piece.shape[1]:
                self.read(scales, codes, piece)
            else:
                values = torch.empty(1, columns, dtype=out.dtype)
                self.read(scales, codes, values)
                piece.copy_(values[:, : piece.shape[1]])

    def _length(self, count: int) -> int:
        return blocks_of(count) * SCALE_BYTES + -(-count * self.bits // 8)

    def _pieces(self, row: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Some whole blocks at a time as rows of a matrix, with their scales and codes; then the shorter last one."""
        count, cut = row.numel(), blocks_of(row.numel()) * SCALE_BYTES
        scales, codes = numbers(payload[:cut], torch.float32), payload[cut:]
        whole, width = count // BLOCK * BLOCK, BLOCK * self.bits // 8
        for start in range(0, whole, PIECE):
            stop = min(start + PIECE, whole)
            first, last = start // BLOCK, stop // BLOCK
            block_codes = codes[first * width : last * width].view(-1, width)
            yield row[start:stop].view(-1, BLOCK), scales[first:last].unsqueeze(1), block_codes
        if whole < count:
            yield row[whole:].unsqueeze(0), scales[-1:].unsqueeze(1), codes[whole * self.bits // 8 :].unsqueeze(0)


class SignCoder(BlockCoder):
    """One bit for each number, set if it is negative."""

    bits = 1

    def write(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Mean magnitudes and signs."""
        scales.copy_(values.abs().mean(1, keepdim=True))
        codes.copy_(torch.from_numpy(np.packbits(np.signbit(values.numpy()), axis=1)))

    def read(self, scales: Tensor, codes: Tensor, values: Tensor) -> None:
        """Plus or minus the scale."""
        values.copy_(torch.from_numpy(np.unpackbits(codes.numpy(), axis=1)))
        scale = scales.to(values.dtype)
        values.mul_(scale * -2).add_(scale)


class QuantizeCoder(BlockCoder):
    """Codes of 8, 4 or 2 bits.

    Numbers that share a byte are as far apart in their block as possible, so that packing moves whole stretches of it.
    """

    def __init__(self, form: QuantizeFormat, seed: int = 0) -> None:
        self.bits, self._levels = form.bits, form.levels
        self._noise = _RoundingNoise(seed) if form.stochastic else None

    def encode(self, row: Tensor) -> Tensor:
        """Scales, then codes."""
        if self._noise is not None:
            self._noise.next_row()
        return super().encode(row)

    def write(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        """The largest magnitude decides the scale."""
        held = values.abs()
        scales.copy_(held.amax(1, keepdim=True).mul_(_MARGIN / self._levels).clamp_(min=_SMALLEST))
        torch.mul(values, scales.to(values.dtype).reciprocal(), out=held)
        if self._noise is None:
            held.round_()
        else:
            held.add_(self._noise.numbers(held)).floor_()
        if self.bits == 8:
            codes.view(torch.int8).copy_(held)
            return
        width, whole = codes.shape[1], held.add_(self._levels).to(torch.uint8)
        missing = width * 8 // self.bits - whole.shape[1]
        if missing:
            whole = torch.nn.functional.pad(whole, (0, missing))
        codes.copy_(whole[:, :width])
        for part in range(1, 8 // self.bits):
            codes.bitwise_or_(whole[:, part * width : (part + 1) * width].bitwise_left_shift_(part * self.bits))

    def read(self, scales: Tensor, codes: Tensor, values: Tensor) -> None:
        """Codes times scales."""
        if self.bits == 8:
            torch.mul(codes.view(torch.int8), scales.to(values.dtype), out=values)
            return
        width, mask = codes.shape[1], 2**self.bits - 1
        for part in range(8 // self.bits):
            whole = (codes >> (part * self.bits)).bitwise_and_(mask)
            values[:, part * width : (part + 1) * width].copy_(whole)
        values.sub_(self._levels).mul_(scales.to(values.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Rows that were rounded stochastically."""
        return {} if self._noise is None else {"rows": self._noise.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        if self._noise is not None:
            self._noise.rows = int(state["rows"])


class _RoundingNoise:
    """Cheap random numbers: evenly spaced ones in random order, entered at a random position for every piece.

    Drawing one for each number of the row would cost more than all the rest. Even spacing makes the mean of rounded
    numbers exactly right.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.rows = 0
        """Rows that it was used for."""
        shuffled = torch.randperm(PIECE, generator=torch.Generator().manual_seed(mixed(seed, 0)))
        spaced = shuffled.float().add_(0.5).div_(PIECE)
        self._twice = torch.cat([spaced, spaced])
        self._draws = torch.Generator()

    def next_row(self) -> None:
        self.rows += 1
        self._draws.manual_seed(mixed(self._seed, self.rows))

    def numbers(self, like: Tensor) -> Tensor:
        start = int(torch.randint(PIECE, (), generator=self._draws))
        return self._twice[start : start + like.numel()].view(like.shape)
