"""A training loop whose layers take a fixed time by sleeping; each worker writes how long its steps took, and slept."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat


class Pace:
    """Sleeps, and sums up how long that took: a busy machine oversleeps."""

    def __init__(self) -> None:
        self.slept = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep so long, or a little longer."""
        begin = time.perf_counter()
        time.sleep(seconds)
        self.slept += time.perf_counter() - begin

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


def main() -> None:
    """Train, and write the seconds of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of a layer, for a microbatch")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--examples", type=int, required=True)
    options = parser.parse_args()
    pace, taken, slept = Pace(), list[float](), list[float]()
    losses: list[float] = []
    with offbeat.init(seed=1) as team:
        torch.manual_seed(1)
        model = nn.Sequential(*(PacedLayer(options.seconds, pace) for _ in range(options.parts)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(options.examples, 8), torch.randn(options.examples, 8))
        model, optimizer, loader = team.prepare(model, optimizer, DataLoader(data, batch_size=options.examples))
        step = team.pipeline(model, nn.functional.mse_loss)
        for _ in range(options.steps):
            for inputs, target in loader:
                optimizer.zero_grad()
                pace.turn()
                begin = time.perf_counter()
                losses.append(float(step(inputs, target)))
                taken.append(time.perf_counter() - begin)
                slept.append(pace.turn())
                optimizer.step()
        written = {"seconds": taken, "slept": slept, "losses": losses}
        options.out.with_suffix(f".{team.rank}").write_text(json.dumps(written), encoding="utf-8")


main()
