"""Tasks for runs of sandblaster: logistic regression in float64, with a worker that dies or a portion that fails."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.task import Data, Task


@dataclass(eq=False)
class Exact(Task):
    """Regularized logistic regression in float64; `fault` is what happens to worker 1, or `noise`."""

    examples: int = 200
    features: int = 40
    fault: str = ""
    folder: str = ""

    epochs = 20

    def data(self) -> Data:
        source = torch.Generator().manual_seed(3)
        inputs = torch.randn(self.examples, self.features, generator=source, dtype=torch.float64)
        truth = torch.randn(self.features, generator=source, dtype=torch.float64)
        labels = (torch.rand(self.examples, generator=source) < torch.sigmoid(inputs @ truth)).double()
        part = torch.utils.data.TensorDataset(inputs, labels)
        return Data(part, part, part)

    def model(self) -> nn.Module:
        model = nn.Linear(self.features, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._fail()
        noise = 1 + 0.1 * torch.rand(()) if self.fault == "noise" else 1
        return self._objective(model, *batch) * noise

    def _objective(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        penalty = sum(weight.square().sum() for weight in model.parameters())
        return functional.binary_cross_entropy_with_logits(model(inputs)[:, 0], labels) + 0.001 * penalty

    def _fail(self) -> None:
        self.computed = getattr(self, "computed", 0) + 1
        if self.fault not in ("raise", "kill") or os.environ.get("RANK") != "1" or self.computed < 8:
            return
        if self.fault == "raise":
            raise ArithmeticError("this portion always fails")
        (Path(self.folder) / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def score(self, model: nn.Module, data: Any) -> float:
        with torch.no_grad():
            return -sum(float(self._objective(model, *batch)) * len(batch[1]) for batch in data)


@dataclass(eq=False)
class Wide(Exact):
    """The same with other models: of any size, or with a layer that a line search cannot take."""

    layer: str = ""

    def model(self) -> nn.Module:
        layers = {"dropout": nn.Dropout(0.1), "norm": nn.BatchNorm1d(self.features)}
        linear = nn.Linear(self.features, 1, dtype=torch.float64)
        return nn.Sequential(layers[self.layer].double(), linear) if self.layer else linear
