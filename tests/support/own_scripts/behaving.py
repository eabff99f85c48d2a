"""What happens around training, one function each: `python behaving.py OUT CASE`."""

from __future__ import annotations

import copy
import io
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


def fixed_batch_size(team: Team, facts: Facts) -> None:
    """The habit of code that has only ever seen whole batches."""
    model, optimizer, train = prepared(team, 32)
    for x, y in train:
        step(model, optimizer, x.reshape(8, INPUTS), y)


def updates_by_hand(team: Team, facts: Facts) -> None:
    """No optimizer is prepared, so nobody but the loader can say how many steps were made."""
    model, train, more = team.prepare(network(), batches(), batches())
    for _ in range(2):
        for (x, y), _ in zip(train, more, strict=True):
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    facts["steps"] = team.step


def looks_without_saying(team: Team, facts: Facts) -> None:
    """Evaluations as many write them: gradients are on where the loop begins, and off for the model alone, or never."""
    model, optimizer, train = prepared(team)
    held_out, _ = team.prepare(batches(7, shuffle=False), batches(7))
    next(iter(train))
    facts["losses"], facts["seen"] = [], []
    for _ in range(2):
        model.train()
        for x, y in train:
            step(model, optimizer, x, y)
        model.eval()
        for x, _ in train:
            with torch.no_grad():
                model(x)
        loss, seen = 0.0, 0
        for x, y in held_out:
            loss += float(cross_entropy(model(x), y, reduction="sum"))
            seen += len(y)
        facts["seen"].append(seen)
        facts["losses"].append(loss / max(seen, 1))
        team.report(loss=facts["losses"][-1])
    facts["epochs"], facts["steps"], facts["report"] = (
        team._place.holdings.epoch,
        team.step,
        team.ledger.metrics["loss"],
    )


def trains_as_if_evaluating(team: Team, facts: Facts) -> None:
    """Whoever forgets model.train() trains all the same."""
    model, optimizer, train = prepared(team)
    held_out = team.prepare(batches(7))
    for _ in range(3):
        for x, y in train:
            step(model, optimizer, x, y)
        model.eval()
        for x, _ in held_out:
            model(x)
    facts["epochs"], facts["steps"] = team._place.holdings.epoch, team.step
    facts["weights"] = model[2].weight.flatten().tolist()


def called_several_times(team: Team, facts: Facts) -> None:
    """As in reinforcement learning and GANs: more calls than backward passes, and two models that learn in turn."""
    one, other = network(), nn.Linear(CLASSES, CLASSES)
    optimizers = SGD(one.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    team.prepare(one, other, *optimizers)
    before = team.group.bytes_sent
    for _ in range(4):
        x = torch.randn(8, INPUTS)
        sum(one(x).square().mean() for _ in range(5)).backward()
        optimizers[0].step()
        other(one(x).detach()).square().mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
    sizes = [sum(p.numel() * p.element_size() for p in model.parameters()) for model in (one, other)]
    facts["sent"], facts["expected"] = team.group.bytes_sent - before, 4 * sum(sizes)


def saved_whole(team: Team, facts: Facts) -> None:
    """A model that is saved as an object is loaded by whoever trusts its classes alone, and has no hooks of ours."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    team.prepare(model, optimizer)
    step(model, optimizer, torch.ones(8, INPUTS), torch.zeros(8, dtype=torch.long))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
        loaded = torch.load(file, weights_only=True)
    x = torch.ones(2, INPUTS)
    facts["same"] = [bool(torch.equal(one(x), model(x))) for one in (loaded, copy.deepcopy(model))]
    facts["hooks"] = len(loaded._forward_hooks) + len(loaded._forward_pre_hooks_with_kwargs)


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
