"""Small tasks for the contract suites: exact, uneven, observable, and faulty on demand."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from offbeat.task import Data, Task

SEED = 20260


@dataclass
class CurveTask(Task):
    """Fit a small network to a curve, without dropout or batch norm, so that strategies can be compared to the bit."""

    folder: str  # Where each worker writes its process id and the fingerprints of its replica.
    examples: int = 37
    batch: int = 8
    fault: str = ""  # `raise`, `kill`, `nan`, or nothing.
    fault_rank: int = 1
    fault_step: int = 3
    pause: float = 0.0  # Seconds that each step sleeps, so that it can be interrupted.

    def __post_init__(self) -> None:
        self.global_batch = self.batch
        self._steps = 0
        self._rank = int(os.environ.get("RANK", "0"))

    def model(self) -> nn.Module:
        """Two layers; the same on all workers, by the seed."""
        if "RANK" in os.environ:  # The launcher may look at a model, too.
            note(Path(self.folder) / f"pid-{self._rank}", str(os.getpid()))
        self._model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        return self._model

    def data(self) -> Data:
        """The same points for training, validation and test: only the arithmetic matters."""
        points = TensorDataset(*curve(self.examples))
        points.targets = torch.arange(self.examples) % 5  # pyright: ignore[reportAttributeAccessIssue]  # for parts by label
        return Data(points, points, points)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """Momentum, so that state must be right too."""
        return SGD(params, lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The squared error; writes a fingerprint of the replica first, and fails when due."""
        factor = self._begin_step()
        inputs, target = batch
        # In forward, where parameters that are otherwise released have been gathered.
        hook = self._model.register_forward_pre_hook(self._note_replica)
        output = model(inputs)
        hook.remove()
        return nn.functional.mse_loss(output, target) * factor

    def _note_replica(self, *_: Any) -> None:
        note(Path(self.folder) / f"replica-{self._rank}", fingerprint(self._model))

    def _begin_step(self) -> float:
        """Fail when due; returns what to multiply the loss by."""
        self._steps += 1
        if self.pause:
            time.sleep(self.pause)
        return self._fault() if self._rank == self.fault_rank and self._steps == self.fault_step else 1.0

    def _fault(self) -> float:
        if self.fault == "raise":
            raise ArithmeticError("this failure was asked for")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return float("nan") if self.fault == "nan" else 1.0

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """The negated squared error."""
        errors = [(nn.functional.mse_loss(model(x), y, reduction="sum"), len(x)) for x, y in data]
        return -float(sum(e for e, _ in errors)) / sum(n for _, n in errors)


class SplitCurveTask(CurveTask):
    """The same for strategies that take the model apart: the loss is a criterion, and steps end in the optimizer."""

    loss = Task.loss

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """The squared error; NaN, when due, whichever worker computes it."""
        due = self.fault == "nan" and self._steps + 1 == self.fault_step
        return nn.functional.mse_loss(output, target) * (float("nan") if due else 1.0)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """The same, with a step that every worker makes, whatever it holds of the model."""
        optimizer = super().optimizer(params)

        def before(*_: Any) -> None:
            self._begin_step()
            self._note_replica()

        optimizer.register_step_pre_hook(before)
        return optimizer


def curve(examples: int) -> tuple[Tensor, Tensor]:
    """Points of the curve."""
    random = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(examples, 3, generator=random)
    return inputs, torch.sin(inputs.sum(dim=1, keepdim=True))


def fingerprint(model: nn.Module) -> str:
    """A short text that differs if any bit of the parameters does."""
    digest = hashlib.blake2b(digest_size=12)
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def note(path: Path, text: str) -> None:
    """Append a line."""
    with path.open("a") as file:
        file.write(text + "\n")
