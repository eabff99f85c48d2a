"""Layers that take a fixed time, by sleeping."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class Pace:
    """Sleeps, and sums up how long that took.

    A sleep that took too long shortens the next one, so that a stage keeps its pace on average.
    """

    def __init__(self) -> None:
        self.slept, self._late = 0.0, 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep so long, less what earlier sleeps took too long."""
        begin = time.perf_counter()
        time.sleep(max(0.0, seconds - self._late))
        taken = time.perf_counter() - begin
        self._late += taken - seconds
        self.slept += taken

    def turn(self) -> float:
        """Seconds slept since the last call."""
        slept, self.slept = self.slept, 0.0
        return slept


class _Slow(torch.autograd.Function):
    """The identity, which takes its time forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, pace: Pace, forward: float, backward: float) -> Tensor:
        ctx.pace, ctx.backward_seconds = pace, backward
        if forward:
            pace.sleep(forward)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.pace.sleep(ctx.backward_seconds)
        return gradients[0], None, None, None


class PacedLayer(nn.Module):
    """Takes `seconds` for a microbatch: a third each for forward, the gradient of inputs, and that of weights."""

    def __init__(self, seconds: float, pace: Pace) -> None:
        super().__init__()
        self.pace, self.third = pace, seconds / 3
        self.bias = nn.Parameter(torch.zeros(8))  # So that the first layer, too, has a gradient to compute early.
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs times the weight."""
        weight = _Slow.apply(self.weight, self.pace, 0.0, self.third)
        return _Slow.apply(inputs + self.bias, self.pace, self.third, self.third) * weight
