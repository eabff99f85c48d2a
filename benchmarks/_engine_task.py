"""An MLP of 25 MiB on noise: what `benchmarks/engines.py` trains on several machines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import offbeat


class Mlp(offbeat.Task):
    """Two hidden layers, 6.6 million parameters."""

    global_batch = 32
    epochs = 1000

    def model(self) -> nn.Module:
        """The MLP."""
        return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2400), nn.ReLU(), nn.Linear(2400, 10))

    def data(self) -> offbeat.Data:
        """Noise, the same everywhere."""
        random = torch.Generator().manual_seed(0)
        noise = TensorDataset(torch.randn(320, 784, generator=random), torch.randint(0, 10, (320,), generator=random))
        return offbeat.Data(noise, noise, noise)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy."""
        return nn.functional.cross_entropy(output, target)

    def optimizer(self, params: Any) -> SGD:
        """Plain SGD."""
        return SGD(params, lr=0.01)

    def score(self, model: nn.Module, data: Any) -> float:
        """Not of interest."""
        del model, data
        return 0.0
