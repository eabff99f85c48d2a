"""Loops under strategies whose replicas part, watched step by step: `python parted.py FOLDER CASE...`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from parts import batches, examples, network, run_cases
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, Adam, Optimizer

import offbeat

Team, Facts, Models = offbeat.Team, dict[str, Any], Mapping[str, nn.Module]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def watched(team: Team, facts: Facts, optimizer: Optimizer | None = None, model: nn.Module | None = None) -> Models:
    """Every step: what the model was before the strategy had its turn, and after; how many examples were behind it."""
    model = model or network()
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    facts |= {"alone": [], "after": [], "examples": [], "state": []}
    optimizer.register_step_post_hook(lambda *_: facts["alone"].append(flat(model)))
    model, optimizer, train = team.prepare(model, optimizer, batches())
    facts["start"] = flat(model)
    for _ in range(2):
        for x, y in train:
            step(model, optimizer, (x, y))
            facts["after"].append(flat(model))
            facts["examples"].append(len(x))
            facts["state"].append({i: _kept(s) for i, s in enumerate(optimizer.state.values())})
    facts["sent"] = team.group.bytes_sent
    facts["steps"] = team.step
    facts["own"] = flat(model)
    with team.averaged(model):
        facts["mean"] = flat(model)
    facts["back"] = flat(model)
    return {"model": model}


def _kept(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def with_momentum(team: Team, facts: Facts) -> Models:
    model = network()
    return watched(team, facts, SGD(model.parameters(), lr=0.1, momentum=0.9), model)


def with_adam(team: Team, facts: Facts) -> Models:
    model = network()
    return watched(team, facts, Adam(model.parameters(), lr=0.01), model)


def with_adagrad(team: Team, facts: Facts) -> Models:
    model = network()
    return watched(team, facts, Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.5), model)


def without_a_loader(team: Team, facts: Facts) -> Models:
    """The loop cuts its own batches."""
    optimizer, model = team.prepare(SGD((made := network()).parameters(), lr=0.1), made)
    x, y = examples(8 * team.size).tensors
    facts["after"] = []
    for number in range(6):
        at = slice(8 * team.rank + number, 8 * team.rank + number + 2)
        step(model, optimizer, (x[at], y[at]))
        facts["after"].append(flat(model))
    return {"model": model}


def parts_of_different_lengths(team: Team, facts: Facts) -> Models:
    """Worker 0 has the fewest batches; nobody hangs, and its model does not move on batches that do not count."""
    x, y = examples(8).tensors
    model = network()
    own = [(x, y)] * (3 + 4 * team.rank)
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.1), own, split=False)
    facts["moved"] = []
    for batch in train:
        before = flat(model)
        step(model, optimizer, batch)
        facts["moved"].append(bool((flat(model) != before).any()))
    team.report(done=1.0)
    facts["steps"] = team.step
    return {"model": model}


def nobody_waits(team: Team, facts: Facts) -> Models:
    """Worker 1 makes its first step only when worker 0 has made three."""
    told = Path(os.environ["TOLD"])
    model = network()
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.1), batches(count=32))
    for number, batch in enumerate(train):
        deadline = time.monotonic() + 60
        while number == 0 and team.rank == 1 and not told.exists():
            assert time.monotonic() < deadline, "waited in vain for worker 0"
            time.sleep(0.01)
        step(model, optimizer, batch)
        if number == 2 and team.rank == 0:
            told.touch()
    facts["steps"] = team.step
    return {"model": model}


class WithLargeParameters(nn.Module):
    """A network beside parameters that learn nothing: large ones, of which one is not contiguous, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.layer = network(), nn.Linear(150, 150)
        self.transposed = nn.Parameter(torch.zeros(140, 130).t())

    def forward(self, inputs: Tensor) -> Tensor:
        """The network alone."""
        return self.network(inputs)


def with_large_parameters(team: Team, facts: Facts) -> Models:
    """The same with parameters that are large enough to be mixed where they are."""
    return at_different_points(team, facts, WithLargeParameters())


def at_different_points(team: Team, facts: Facts, replica: nn.Module | None = None) -> Models:
    """Everybody starts somewhere else and learns nothing: what changes is the strategy's doing alone."""
    model = (replica or network()).double()
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.0), batches(count=64))
    chance = torch.Generator().manual_seed(100 + team.rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=chance, dtype=parameter.dtype))
    facts["after"] = [flat(model)]
    for x, y in train:
        step(model, optimizer, (x.double(), y))
        facts["after"].append(flat(model))
    with team.averaged(model):
        facts["mean"] = flat(model)
    facts["distance"] = team.exchange.figures().get("distance")
    facts["notes"] = team.exchange.notes()
    return {"model": model}


def talking(team: Team, facts: Facts) -> Models:
    """Everybody starts somewhere else, and one is slow; until all have met often enough, nobody learns anything."""
    model = network().double()
    model, optimizer = team.prepare(model, SGD(model.parameters(), lr=0.0))
    chance = torch.Generator().manual_seed(100 + team.rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=chance, dtype=parameter.dtype))
    facts["start"] = flat(model)
    x, y = examples(8).tensors
    for _ in range(40 if team.rank == 0 else 400):
        step(model, optimizer, (x.double(), y))
        time.sleep(0.02 if team.rank == 0 else 0.002)
    with team.averaged(model):
        facts["mean"] = flat(model)
    facts["own"] = flat(model)
    team.checkpoint()
    facts["notes"] = team.exchange.notes()
    facts["sent"] = team.exchange.payload()
    return {"model": model}


if __name__ == "__main__":
    run_cases({name: case for name, case in globals().items() if callable(case)})
