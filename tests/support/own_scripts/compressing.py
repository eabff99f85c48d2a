"""An entry for processes that sum compressed gradients; each worker sends what it had and what it got."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from torch import nn

from offbeat.runtime.backend import _host_discovery
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies import AllReduce, combined, parse
from offbeat.strategies.compressors import Compressing
from offbeat.strategies.worker.exchange import adopt

SEED = 11
STEPS = 4
MEANT = 40
"""Numbers of the row whose mean is taken after the steps."""


class Net(nn.Module):
    """Two layers that all use, one that worker 0 uses alone, one that all use only in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, step: int, rank: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 12) * (rank + 1) + step
        for number, layer in enumerate(self.layers):
            if number < 2 or (number == 2 and rank == 0) or (number == 3 and step % 2 == 0):
                x = torch.tanh(layer(x))
        return x.square().sum()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def own_gradients(step: int, rank: int) -> list[torch.Tensor | None]:
    """What a worker computes by itself."""
    model = net()
    model(step, rank).backward()
    return [p.grad for p in model.parameters()]


def run(config: Mapping[str, Any], control: Control) -> None:
    """Some steps of every strategy."""
    place = where()
    if config["apart"]:
        _host_discovery.host_identity = lambda: f"host {place.rank}"  # This process's own copy: it ends with the test.
    group = DirectGroup(place, timedelta(seconds=20), torch.device("cpu"))
    for text in config["strategies"]:
        model, sums = net(), []
        exchange = AllReduce().connect(group, Stopwatch())
        exchange.compressions = cast("tuple[Compressing, ...]", combined(parse(text)).compressions)
        exchange.seed = SEED
        adopt(exchange, model)
        for step in range(STEPS):
            model.zero_grad()
            exchange.weigh(group.rank + 1, sum(range(1, group.size + 1)))
            model(step, group.rank).backward()
            sums.append([None if p.grad is None else p.grad.reshape(-1).tolist() for p in model.parameters()])
        row = torch.arange(float(MEANT)) * (group.rank + 1)
        exchange.mean(row, "a test")
        exchange.close()
        control.send({"rank": group.rank, "strategy": text, "sums": sums, "mean": row.tolist(), **exchange.notes()})
    control.send({"rank": group.rank, "strategy": "", "shares": group.shares_memory})
    group.close()
