"""Whole numbers of few bits, times a scale for each block: the largest magnitude over the largest whole number.

Rounding is to the nearest, or stochastic: up or down with the chances that make the mean right (Alistarh et al.,
"QSGD", 2017; with 2 bits, minus one, nought and one, it is Wen et al., "TernGrad", 2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offbeat.protocols.compression import QuantizeFormat
from offbeat.protocols.partition import mixed
from offbeat.runtime.compression.blocks import SMALLEST, Blocks
from offbeat.runtime.compression.coder import PIECE

_MARGIN = 1 + 2**-20
"""Scales are this much too large, so that rounding them never lifts a number beyond the largest code."""


class Quantized(Blocks):
    """Codes of 8, 4 or 2 bits.

    Numbers that share a byte are as far apart in their block as can be, so that packing moves whole stretches of it.
    """

    def __init__(self, form: QuantizeFormat, seed: int = 0) -> None:
        self.bits = form.bits
        self._levels = form.levels
        self._chance = _Chance(seed) if form.stochastic else None

    def encode(self, row: Tensor) -> Tensor:
        """Scales, then codes."""
        if self._chance is not None:
            self._chance.next_row()
        return super().encode(row)

    def write(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        """The largest magnitude decides the scale."""
        held = values.abs()
        scales.copy_(held.amax(1, keepdim=True).mul_(_MARGIN / self._levels).clamp_(min=SMALLEST))
        torch.mul(values, scales.to(values.dtype).reciprocal(), out=held)
        if self._chance is None:
            held.round_()
        else:
            held.add_(self._chance.numbers(held)).floor_()
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
        """How many rows chance has been used for."""
        return {} if self._chance is None else {"rows": self._chance.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        if self._chance is not None:
            self._chance.rows = int(state["rows"])


class _Chance:
    """Cheap random numbers: a row of evenly spaced ones in random order, entered anywhere for every piece.

    Drawing a number for each number of the row would cost more than all the rest. Evenly spaced, because then the mean
    of rounded numbers is right, not only nearly so.
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
        """As many as a piece has, between 0 and 1."""
        start = int(torch.randint(PIECE, (), generator=self._draws))
        return self._twice[start : start + like.numel()].view(like.shape)
