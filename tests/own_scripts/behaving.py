"""What happens around training, one function each: `python behaving.py OUT CASE`."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from parts import CLASSES, INPUTS, batches, examples, leave, network
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

import offbeat

Team, Facts = offbeat.Team, dict[str, Any]


def prepared(team: Team, count: int = 33, **options: Any) -> tuple[nn.Module, SGD, Any]:
    model = network()
    return team.prepare(model, SGD(model.parameters(), lr=0.2), batches(count, **options))


def step(model: nn.Module, optimizer: SGD, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def dropout(team: Team, facts: Facts) -> None:
    prepared(team)
    facts["mask"] = nn.functional.dropout(torch.ones(64)).tolist()


def batch_norm(team: Team, facts: Facts) -> None:
    """Running statistics differ between replicas, but not inside `averaged`; evaluations may have uneven lengths."""
    model = nn.Sequential(nn.Linear(INPUTS, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer, train = team.prepare(model, optimizer, batches(32))
    for x, y in train:
        step(model, optimizer, x, y)
    own = model[1].running_mean.clone()
    with team.averaged(model), torch.no_grad():
        model.eval()
        for x, _ in batches(8 * (team.rank + 1)):
            model(x)
        facts["inside"] = model[1].running_mean.tolist()
    facts["own"] = own.tolist()
    facts["back"] = torch.equal(own, model[1].running_mean)


def mixed_precision(team: Team, facts: Facts) -> None:
    model, optimizer, train = prepared(team)
    for _ in range(2):
        for x, y in train:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    facts["weights"] = model[2].weight.flatten().tolist()


def stops_by_report(team: Team, facts: Facts) -> None:
    """The score grows with the worker's number, so that only the mean reaches the target everywhere at once."""
    model, optimizer, train = prepared(team)
    for epoch in range(10):
        for x, y in train:
            step(model, optimizer, x, y)
        if team.report(quality=0.1 * epoch + 0.1 * team.rank):
            break
    facts["epochs"], facts["steps"] = epoch + 1, team.step


def different_metrics(team: Team, facts: Facts) -> None:
    prepared(team)
    team.report(**{"accuracy_top1" if team.rank else "accuracy_top5": 1.0})


def not_a_number(team: Team, facts: Facts) -> None:
    model, optimizer, train = prepared(team)
    for number, (x, y) in enumerate(train, 1):
        step(model, optimizer, x * float("nan") if number == 3 and team.rank == 1 else x, y)


def sleeps(team: Team, facts: Facts) -> None:
    model, optimizer, train = prepared(team)
    for number, (x, y) in enumerate(train, 1):
        if number == 2 and team.rank == 1:
            time.sleep(60)
        step(model, optimizer, x, y)


def never_backward(team: Team, facts: Facts) -> None:
    model, optimizer, train = prepared(team)
    for number, (x, y) in enumerate(train, 1):
        if number > 2 and team.rank == 1:
            time.sleep(0.01)
            continue
        step(model, optimizer, x, y)
    time.sleep(60)


def reports_instead(team: Team, facts: Facts) -> None:
    """Two different exchanges at the same time must not be taken for each other."""
    model, optimizer, train = prepared(team)
    for number, (x, y) in enumerate(train, 1):
        if number < 3 or team.rank != 1:
            step(model, optimizer, x, y)
    team.report(quality=1.0)


def skips_one_backward(team: Team, facts: Facts) -> None:
    model, optimizer, train = prepared(team)
    for number, (x, y) in enumerate(train, 1):
        if number != 2 or team.rank == 0:
            step(model, optimizer, x, y)


def optimizer_forgotten(team: Team, facts: Facts) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, train = team.prepare(model, batches())
    for x, y in train:
        step(model, optimizer, x, y)


def model_forgotten(team: Team, facts: Facts) -> None:
    model = network()
    optimizer, train = team.prepare(SGD(model.parameters(), lr=0.1), batches())
    for x, y in train:
        step(model, optimizer, x, y)


def loading_processes(team: Team, facts: Facts) -> None:
    model = network()
    loader = DataLoader(examples(), batch_size=8, num_workers=2, persistent_workers=True)
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    for x, y in train:
        step(model, optimizer, x, y)


def prepared_twice(team: Team, facts: Facts) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2)
    model, optimizer, train = team.prepare(model, optimizer, batches())
    again = team.prepare(model, optimizer, train)
    facts["same"] = [one is other for one, other in zip(again, (model, optimizer, train), strict=True)]
    for x, y in train:
        step(model, optimizer, x, y)
    facts["steps"] = team.step


if __name__ == "__main__":
    out, name = sys.argv[1:3]
    torch.manual_seed(0)
    facts: Facts = {}
    with offbeat.init() as team:
        globals()[name](team, facts)
        leave(out, team.rank, {}, facts)
