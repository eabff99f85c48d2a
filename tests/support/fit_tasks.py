"""Tasks that the tests of `fit` learn: watched, so that a test sees which examples and learning rates were used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import offbeat


class Stream(IterableDataset[Any]):
    """Examples that come one after the other; how many is not known beforehand."""

    def __init__(self, examples: list[tuple[Tensor, Tensor]]) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.examples)


@dataclass(eq=False)
class Watched(offbeat.Task):
    """Learn y = sin(x) on numbered examples; each worker notes the numbers it sees and the rate it learns with."""

    folder: str
    examples: int = 24
    batch: int = 6
    every: int = 0
    decay: float = 0.0
    by_parts: bool = False
    stream: bool = False

    def __post_init__(self) -> None:
        self.global_batch = self.batch
        self.evaluate_every = self.every or None
        self.score_by_parts = self.by_parts
        self.evaluate_batch = 5
        self._optimizer: Optimizer | None = None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def data(self) -> offbeat.Data:
        numbers = torch.arange(self.examples, dtype=torch.float32).unsqueeze(1)
        points = TensorDataset(numbers, numbers.sin())
        points.labels = (torch.arange(self.examples) % 4).tolist()  # pyright: ignore[reportAttributeAccessIssue]
        train: Dataset[Any] = Stream([points[i] for i in range(self.examples)]) if self.stream else points
        return offbeat.Data(train, points, points)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        self._optimizer = SGD(params, lr=0.1)
        return self._optimizer

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return ExponentialLR(optimizer, self.decay) if self.decay else None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        numbers, target = batch
        rate = self._optimizer.param_groups[0]["lr"] if self._optimizer else 0.0
        with (Path(self.folder) / f"seen-{os.environ['RANK']}").open("a") as file:
            file.writelines(f"{int(number)} {rate!r}\n" for number in numbers)
        return nn.functional.mse_loss(model(numbers / self.examples), target)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        errors = [(float((model(x / self.examples) - y).square().sum()), len(x)) for x, y in data]
        return -sum(error for error, _ in errors) / sum(count for _, count in errors)
