"""Entries for processes that use gradient buckets directly; each worker sends what it saw to the launcher."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from offbeat.runtime.gradients import buckets
from offbeat.runtime.gradients.buckets import GradientBuckets
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.run.stopwatch import Stopwatch

Seen = dict[str, Any]


class Bench:
    """A model of three layers whose gradients are exchanged."""

    def __init__(self, capacity: int) -> None:
        torch.manual_seed(0)
        self.group = DirectGroup(where(), timedelta(seconds=20), torch.device("cpu"))
        self.stopwatch = Stopwatch()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        buckets.FIRST_BYTES = min(capacity, buckets.FIRST_BYTES)  # This process's own copy: it ends with the test.
        self.buckets = GradientBuckets(self.layers.parameters(), self.group, self.stopwatch, capacity)

    def backward(self, order: tuple[int, ...] = (0, 1, 2), factor: float = 1.0) -> list[float]:
        """One pass; gradients become ready from the last layer of `order` to the first."""
        self.layers.zero_grad()
        x = torch.ones(1, 4)
        for number in order:
            x = torch.tanh(self.layers[number](x))
        (x.sum() * factor).backward()
        return [0.0 if p.grad is None else float(p.grad.sum()) for p in self.layers.parameters()]


def order(bench: Bench, seen: Seen) -> None:
    """Worker 0 uses the layers in one order, the others in another: worker 0's is taken by all."""
    rank = bench.group.rank
    bench.backward((0, 1, 2) if rank == 0 else (2, 0, 1))
    seen["order"] = bench.buckets.order
    seen["gradients"] = [bench.backward((0, 1, 2) if rank == 0 else (2, 0, 1)) for _ in range(2)][-1]


def header(bench: Bench, seen: Seen) -> None:
    """Worker r stands for r + 1 examples, and only worker 0 uses the last layer."""
    group = bench.group
    total = sum(range(1, group.size + 1))
    seen["mean"] = []
    for known in (total, None):
        bench.buckets.weigh(group.rank + 1, known)
        seen["mean"].append(bench.backward((0, 1, 2) if group.rank == 0 else (0, 1), factor=group.rank + 1.0))
    numbers = bench.buckets._numbers.tolist()
    seen["examples"], seen["arrivals"] = numbers[0], numbers[1 : 1 + group.size]
    seen["batches"] = numbers[1 + group.size : 1 + 2 * group.size]
    seen["used"] = numbers[1 + 2 * group.size :]


def unequal_totals(bench: Bench, seen: Seen) -> None:
    bench.buckets.weigh(3, 99)
    bench.backward()


def lateness(bench: Bench, seen: Seen) -> None:
    """Worker 1 comes 0.2 s late, three times."""
    for _ in range(2):
        bench.backward()
    bench.group.barrier()
    bench.stopwatch.restart()
    bench.stopwatch.switch("compute")
    for _ in range(3):
        if bench.group.rank == 1:
            time.sleep(0.2)
        bench.backward()
    bench.stopwatch.total()
    seen["seconds"] = dict(bench.stopwatch.seconds)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return gradient


def overlap(bench: Bench, seen: Seen) -> None:
    """The later layers' bucket starts before the slow backward of what is below them: 0.1 s of it are overlapped."""
    bench.backward()
    bench.stopwatch.restart()
    for _ in range(2):
        x = torch.tanh(bench.layers[0](torch.ones(1, 4)))
        bench.layers[2](torch.tanh(bench.layers[1](_Slow.apply(x)))).sum().backward()
    seen["overlapped"] = bench.stopwatch.overlapped
    seen["buckets"] = len(bench.buckets._buckets)


def run(config: Mapping[str, Any], control: Control) -> None:
    """The entry: `case` names a function of this file."""
    bench = Bench(config["capacity"])
    seen: Seen = {}
    globals()[config["case"]](bench, seen)
    control.send({"rank": bench.group.rank, "seen": seen})
    bench.group.barrier()
    bench.buckets.close()
    bench.group.close()
