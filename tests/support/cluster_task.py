"""A small task for federated tests: points around the centres of classes, and a linear model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import offbeat
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.run.settings import Assignment, Goal
from offbeat.runtime.state.random_state import seed_everything
from offbeat.team.team import Team
from offbeat.worker.federated import federate


@dataclass(eq=False)
class Clusters(offbeat.Task):
    """Tell classes apart by their centres; with `turned`, a third of the clients has the classes in another order."""

    examples: int = 600
    rate: float = 0.1
    classes: int = 4
    features: int = 8
    spread: float = 1.0

    def model(self) -> nn.Module:
        return nn.Linear(self.features, self.classes)

    def data(self) -> offbeat.Data:
        generator = torch.Generator().manual_seed(5)
        centres = torch.randn(self.classes, self.features, generator=generator) * 1.5
        parts: list[TensorDataset] = []
        for count in (self.examples, 200, 200):
            labels = torch.randint(self.classes, (count,), generator=generator)
            noise = torch.randn(count, self.features, generator=generator) * self.spread
            parts.append(TensorDataset(centres[labels] + noise, labels))
        return offbeat.Data(*parts)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        return SGD(params, lr=self.rate)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        right = [(int((model(x).argmax(1) == y).sum()), len(y)) for x, y in data]
        return sum(hits for hits, _ in right) / sum(count for _, count in right)


def federated_run(task: offbeat.Task, strategy: str, steps: int, folder: Path | None = None, **goal: Any) -> Any:
    """One worker's run of a task in this process; returns the result message, with the faults that fired."""
    messages: list[Mapping[str, Any]] = []
    seed_everything(goal.setdefault("seed", 1))
    team = Team(Assignment(Goal(strategy=strategy, steps=steps, **goal), folder=folder, send=messages.append), where())
    with team:
        federate(task, team)
    result = dict(next(message for message in messages if message["kind"] == "result"))
    return result | {"fired": [each["number"] for each in messages if each["kind"] == "disturbed"]}
