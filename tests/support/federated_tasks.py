"""Tasks of a few clients, small enough to be learned again by hand, and faulty on demand."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, TensorDataset

import offbeat

SIZES = (5, 1, 9, 3)
"""Examples of the four clients."""
RATE = 0.1


def points(sizes: Iterable[int], seed: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and owners: every client has a curve of its own."""
    random = torch.Generator().manual_seed(seed)
    owners = torch.cat([torch.full((size,), client) for client, size in enumerate(sizes)])
    inputs = torch.randn(len(owners), 2, generator=random, dtype=torch.float64)
    return inputs, torch.sin(inputs.sum(dim=1, keepdim=True)) + 0.3 * owners[:, None], owners


def network() -> nn.Module:
    """Two layers of 64-bit numbers, always the same."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


@dataclass(eq=False)
class Owners(offbeat.Task):
    """Each client fits a curve of its own."""

    momentum: float = 0.0
    own_datasets: bool = False
    empty: bool = False  # Whether client 1 has no examples.
    rate: float = RATE
    global_batch: int = 6

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples of the clients."""
        return (5, 0, 9, 3) if self.empty else SIZES

    def model(self) -> nn.Module:
        return network()

    def data(self) -> offbeat.Data:
        inputs, targets, owners = points(self.sizes)
        train: Dataset[Any] = TensorDataset(inputs, targets, owners)
        if self.own_datasets:
            pieces = zip(*(whole.split(list(self.sizes)) for whole in (inputs, targets, owners)), strict=True)
            train = offbeat.ClientDatasets({f"site {i}": TensorDataset(*piece) for i, piece in enumerate(pieces)})
        return offbeat.Data(train, TensorDataset(inputs, targets), TensorDataset(inputs, targets))

    def client_of(self, example: Any) -> int:
        return int(example[2])

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        return SGD(params, lr=self.rate, momentum=self.momentum)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        return -float(sum(nn.functional.mse_loss(model(x), y, reduction="sum") for x, y in data))


@dataclass(eq=False)
class Images(offbeat.Task):
    """Everything whose bits could depend on the process: dropout, batch norm, 32-bit numbers, minibatches."""

    folder: str = ""
    kill: str = ""  # `2.5`: worker 2 is killed at its fifth batch, once.
    nan_clients: tuple[int, ...] = ()  # Clients whose losses are NaN; -1: all.
    examples: int = 240

    def __post_init__(self) -> None:
        self._batches = 0

    def model(self) -> nn.Module:
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def data(self) -> offbeat.Data:
        random = torch.Generator().manual_seed(5)
        inputs = torch.randn(self.examples, 6, generator=random)
        labels = inputs[:, :3].argmax(dim=1)
        owners = torch.arange(self.examples) % 12
        train = TensorDataset(inputs, labels, owners)
        train.targets = labels  # pyright: ignore[reportAttributeAccessIssue]
        held = TensorDataset(inputs[:60], labels[:60])
        return offbeat.Data(train, held, held)

    def client_of(self, example: Any) -> int:
        return int(example[2])

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        return SGD(params, lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._batches += 1
        self._die()
        inputs, labels, owners = batch
        sick = -1 in self.nan_clients or int(owners[0]) in self.nan_clients
        # A batch of one has no variance.
        model.train(len(inputs) > 1)
        return nn.functional.cross_entropy(model(inputs), labels) * (float("nan") if sick else 1.0)

    def _die(self) -> None:
        if not self.kill:
            return
        rank, batch = self.kill.split(".")
        flag = Path(self.folder) / "killed"
        if os.environ["RANK"] == rank and self._batches == int(batch) and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        return offbeat.accuracy(model, data)


@dataclass(eq=False)
class Means(offbeat.IterativeTask):
    """Two means by expectation-maximization, of points that clients own."""

    sick: str = ""  # `shape`: statistics that differ in shape between clients; `complex`; `update`: NaN.
    target = 100.0

    def data(self) -> offbeat.Data:
        inputs, _, owners = points(SIZES)
        train = TensorDataset(inputs[:, 0], owners)
        return offbeat.Data(train, train, train)

    def client_of(self, example: Any) -> int:
        return int(example[1])

    def initial(self) -> Mapping[str, Tensor]:
        return {"means": torch.tensor([-0.5, 0.7], dtype=torch.float32), "steps": torch.zeros((), dtype=torch.int64)}

    def statistics(self, params: Mapping[str, Tensor], batch: Any) -> Mapping[str, Tensor]:
        if self.sick == "complex":
            return {"sums": torch.zeros(2, dtype=torch.complex64)}
        if self.sick == "shape":
            return {"sums": torch.zeros(len(batch[0]))}
        near = torch.softmax(-((batch[0][:, None] - params["means"].double()) ** 2), dim=1)
        return {"sums": (near * batch[0][:, None]).sum(dim=0), "counts": near.sum(dim=0)}

    def update(self, params: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        means = (total["sums"] / total["counts"]).float() * (float("nan") if self.sick == "update" else 1.0)
        return {"means": means, "steps": params["steps"] + 1}

    def score(self, params: Mapping[str, Tensor], data: Iterable[Any]) -> float:
        return -sum(float((batch[0][:, None] - params["means"]).square().min(dim=1).values.sum()) for batch in data)


@dataclass(eq=False)
class Average(offbeat.IterativeTask):
    """The mean of numbers that are in clients' folders only."""

    def data(self) -> offbeat.Data:
        raise OSError("the numbers are at the clients")

    def client_data(self, folder: Path) -> offbeat.Data:
        numbers = TensorDataset(torch.tensor(json.loads((folder / "numbers.json").read_text()), dtype=torch.float64))
        return offbeat.Data(numbers, numbers, numbers)

    def initial(self) -> Mapping[str, Tensor]:
        return {"mean": torch.zeros((), dtype=torch.float64)}

    def statistics(self, params: Mapping[str, Tensor], batch: Any) -> Mapping[str, Tensor]:
        return {"sum": batch[0].sum(), "count": torch.tensor(len(batch[0]))}

    def update(self, params: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"mean": total["sum"] / total["count"]}

    def score(self, params: Mapping[str, Tensor], data: Iterable[Any]) -> float:
        return -float(sum((batch[0] - params["mean"]).abs().sum() for batch in data))


@dataclass(eq=False)
class Empty(Owners):
    """No client has an example."""

    def data(self) -> offbeat.Data:
        return offbeat.Data(offbeat.ClientDatasets([TensorDataset(torch.zeros(0, 2))] * 4), *[_one()] * 2)


def _one() -> Dataset[Any]:
    inputs, targets, _ = points((1,))
    return TensorDataset(inputs, targets)


@dataclass(eq=False)
class Nobodys(Owners):
    """Does not say whose its examples are."""

    def client_of(self, example: Any) -> int:
        return offbeat.Task.client_of(self, example)
