"""A task with enough layers to be divided into units."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from offbeat import Data, Task


class Deep(Task):
    """Ten layers of a MiB each."""

    global_batch = 8

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(10)))

    def data(self) -> Data:
        points = TensorDataset(torch.randn(32, 512, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 512)
        return Data(points, points, points)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        return SGD(params, lr=0.05, momentum=0.9)

    def score(self, model: nn.Module, data: Iterable[tuple[Tensor, Tensor]]) -> float:
        return -float(torch.stack([self.criterion(model(x), y) for x, y in data]).mean())
