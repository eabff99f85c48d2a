"""Loops that are easily exchanged wrongly: `odd_loops.py OUT CASE STRATEGY [CASE STRATEGY ...]`.

Each pair is a team of its own; each worker leaves what it was told and what its model has become.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.runtime.run.settings import ASSIGNED

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Loop:
    """Two models, of which the second is of use to some cases only."""

    def __init__(self, team: offbeat.Team) -> None:
        torch.manual_seed(1)
        self.team = team
        self.facts: dict[str, Any] = {}
        self.model, self.other = nn.Linear(4, 1), nn.Linear(4, 1)
        self.optimizer = SGD(self.model.parameters(), lr=0.05)

    def go(self, things: tuple[Any, ...], update: Callable[[Tensor, Tensor], None], *trained: nn.Module) -> None:
        """Two epochs, each evaluated; `update` is called after backward through the trained models."""
        *_, batches = self.team.prepare(*things, DataLoader(TensorDataset(X, Y), 8))
        for _ in range(2):
            for x, y in batches:
                for model in trained:
                    model.zero_grad()
                torch.stack([(model(x) - y).square().mean() for model in trained]).sum().backward()
                update(x, y)
            with self.team.averaged(self.model), torch.no_grad():
                self.team.report(loss=float((self.model(X) - Y).square().mean()))


def descend(model: nn.Module) -> None:
    """Stochastic gradient descent by hand."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data -= 0.05 * parameter.grad


def by_hand(loop: Loop) -> None:
    """No optimizer at all."""
    loop.go((loop.model,), lambda *_: descend(loop.model), loop.model)


def never_stepped(loop: Loop) -> None:
    """An optimizer is prepared, and something else updates its parameters."""
    loop.go((loop.model, loop.optimizer), lambda *_: descend(loop.model), loop.model)


def second_by_hand(loop: Loop) -> None:
    """Of two prepared models, one has no optimizer and is updated all the same."""

    def update(*_: Tensor) -> None:
        loop.optimizer.step()
        descend(loop.other)

    loop.go((loop.model, loop.other, loop.optimizer), update, loop.model, loop.other)


def second_optimizer(loop: Loop) -> None:
    """A second model and its optimizer, which nobody has prepared."""
    optimizer = Adam(loop.other.parameters())

    def update(*_: Tensor) -> None:
        loop.optimizer.step()
        optimizer.step()

    loop.go((loop.model, loop.optimizer), update, loop.model, loop.other)


def plain(loop: Loop) -> None:
    """A loop as most are."""
    loop.go((loop.model, loop.optimizer), lambda *_: loop.optimizer.step(), loop.model)


def fine(loop: Loop) -> None:
    """A model that follows the first, one that only passes gradients on, and inputs that are fitted: all as meant."""
    follower, critic = nn.Linear(4, 1), nn.Linear(4, 1)

    def update(x: Tensor, y: Tensor) -> None:
        loop.optimizer.step()
        for mine, theirs in zip(follower.parameters(), loop.model.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)
        shift = torch.zeros_like(x, requires_grad=True)
        fitted = SGD([shift], lr=0.1)
        (loop.model(x + shift) - y).square().mean().backward()
        fitted.step()

    loop.go((loop.model, follower, critic, loop.optimizer), update, loop.model, critic)


def _without_loader(loop: Loop, rows: slice, factor: float = 1.0) -> None:
    model, optimizer = loop.team.prepare(loop.model, loop.optimizer)
    for start in range(0, len(X), 8):
        optimizer.zero_grad()
        x, y = X[start : start + 8][rows], Y[start : start + 8][rows]
        ((model(x) - y).square().mean() * factor).backward()
        optimizer.step()


def same_batches(loop: Loop) -> None:
    """Every worker goes through the data in the same order."""
    _without_loader(loop, slice(None))


def own_batches(loop: Loop) -> None:
    """Every worker takes its part of every batch."""
    _without_loader(loop, slice(loop.team.rank, None, loop.team.size))


def no_gradients(loop: Loop) -> None:
    """The same batches, but nothing to learn from them."""
    _without_loader(loop, slice(None), factor=0.0)


def equal_parts(loop: Loop) -> None:
    """Batches that are divided, of examples that are all the same."""
    model, optimizer, batches = loop.team.prepare(loop.model, loop.optimizer, DataLoader(torch.ones(32, 4), 8))
    for x in batches:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    loop.team.report(loss=0.0)


def own_rate(loop: Loop) -> None:
    """A learning rate that follows the loss of the worker's own slice."""
    plateau = ReduceLROnPlateau(loop.optimizer, patience=0, threshold=0.0)

    def update(*_: Tensor) -> None:
        loop.optimizer.step()
        plateau.step(loop.team.step if loop.team.rank else -loop.team.step)

    loop.go((loop.model, loop.optimizer), update, loop.model)


def own_gradients(loop: Loop) -> None:
    """Gradients that never go through backward."""

    def update(x: Tensor, y: Tensor) -> None:
        loop.optimizer.step()
        parameters = list(loop.model.parameters())
        for parameter, slope in zip(
            parameters, torch.autograd.grad((loop.model(x) - y).square().mean(), parameters), strict=True
        ):
            parameter.data -= 0.01 * slope

    loop.go((loop.model, loop.optimizer), update, loop.model)


def own_noise(loop: Loop) -> None:
    """Langevin dynamics: noise on the parameters, of which each worker draws its own."""

    def update(*_: Tensor) -> None:
        loop.optimizer.step()
        for parameter in loop.model.parameters():
            parameter.data += 1e-3 * torch.randn_like(parameter)

    loop.go((loop.model, loop.optimizer), update, loop.model)


def common_noise(loop: Loop) -> None:
    """The same, drawn alike by all."""
    generator = torch.Generator().manual_seed(3)

    def update(*_: Tensor) -> None:
        loop.optimizer.step()
        for parameter in loop.model.parameters():
            parameter.data += 1e-3 * torch.randn(parameter.shape, generator=generator)

    loop.go((loop.model, loop.optimizer), update, loop.model)


def one_infinite(loop: Loop) -> None:
    """One gradient of one worker is infinite once."""
    one_nan(loop, float("inf"))


def one_nan(loop: Loop, spoiled: float = float("nan")) -> None:
    """One gradient of one worker is NaN once; all leave that step out, as loss scaling does."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    loop.model = model
    optimizer = SGD(model.parameters(), lr=0.05)
    *_, batches = loop.team.prepare(model, optimizer, DataLoader(TensorDataset(X, Y), 8))
    number = 0
    for _ in range(6):
        for x, y in batches:
            number += 1
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            if number == 3 and loop.team.rank == 1:
                loss = loss + (model[2].bias * torch.tensor(spoiled)).sum()
            loss.backward()
            fit = {name: bool(p.grad.isfinite().all()) for name, p in model.named_parameters() if p.grad is not None}
            if number == 3:
                loop.facts["unfit"] = [name for name in fit if not fit[name]]
            if all(fit.values()):
                optimizer.step()
            elif number != 3:
                loop.facts.setdefault("later", []).append(number)
    with loop.team.averaged(model), torch.no_grad():
        loop.facts["loss"] = float((model(X) - Y).square().mean())


def one_graph_twice(loop: Loop) -> None:
    """Two losses of one output, and a backward pass for each."""
    model, optimizer, batches = loop.team.prepare(loop.model, loop.optimizer, DataLoader(TensorDataset(X, Y), 8))
    for x, y in batches:
        optimizer.zero_grad()
        output = model(x)
        (output - y).square().mean().backward(retain_graph=True)
        (output * 0.1).square().mean().backward()
        optimizer.step()


def parts_called(loop: Loop) -> None:
    """A container that is prepared, and whose parts are called one by one."""
    loop.model = nn.ModuleDict({"body": nn.Linear(4, 3), "head": nn.Linear(3, 1)})
    optimizer = SGD(loop.model.parameters(), lr=0.05)
    _, _, batches = loop.team.prepare(loop.model, optimizer, DataLoader(TensorDataset(X, Y), 8))
    for x, y in batches:
        optimizer.zero_grad()
        (loop.model["head"](loop.model["body"](x)) - y).square().mean().backward()
        optimizer.step()


def skipped_step(loop: Loop) -> None:
    """One worker leaves a step out, after a backward pass that all have made."""

    def update(*_: Tensor) -> None:
        if loop.team.rank == 0 or loop.team.step != 2:
            loop.optimizer.step()

    loop.go((loop.model, loop.optimizer), update, loop.model)


def line_search(loop: Loop) -> None:
    """An optimizer that evaluates its closure several times in a step."""
    optimizer = LBFGS(loop.model.parameters(), max_iter=4)
    model, optimizer, batches = loop.team.prepare(loop.model, optimizer, DataLoader(TensorDataset(X, Y), 8))
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def steps_in_backward(loop: Loop) -> None:
    """Each parameter is stepped on as soon as it has its gradient."""
    optimizers = {p: SGD([p], lr=0.05) for p in loop.model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    loop.go((loop.model, *optimizers.values()), lambda *_: None, loop.model)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, (case, strategy) in enumerate(zip(sys.argv[2::2], sys.argv[3::2], strict=True)):
        told = ""
        assigned = ASSIGNED.get()
        assert assigned is not None
        # What the command line says goes before what a script says: here each team is to have its own.
        ASSIGNED.set(dataclasses.replace(assigned, goal=dataclasses.replace(assigned.goal, strategy=strategy)))
        try:
            with offbeat.init(check_finite=case not in ("one_nan", "one_infinite")) as team:
                loop = Loop(team)
                globals()[case](loop)
        except OffbeatError as error:
            if assigned.servers is not None:
                raise  # Servers end with their first team.
            told = str(error)
        found = {
            "told": told,
            "facts": loop.facts,
            "warnings": team._place.watch.warnings,
            "state": loop.model.state_dict(),
        }
        torch.save(found, folder / f"{number}-{team.rank}.pt")


main()
