"""Digits of three parties, none of which may show its images to the others, and none of which has all digits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import offbeat


class PrivateDigits(offbeat.Task):
    """Recognizes all ten digits, although each party has images of a few of them."""

    epochs = 30

    def __init__(self, rate: float = 0.5) -> None:
        self.rate = rate

    def model(self) -> nn.Module:
        """One hidden layer."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def data(self) -> offbeat.Data:
        """Nobody has all data: there is only `client_data`."""
        raise RuntimeError("no process has the data of all parties")

    def client_data(self, folder: Path) -> offbeat.Data:
        """One party's images: the first four fifths to learn from, the rest to score on."""
        images, labels = party(folder)
        cut = len(labels) * 4 // 5
        held = TensorDataset(images[cut:], labels[cut:])
        return offbeat.Data(TensorDataset(images[:cut], labels[:cut]), held, held)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """Plain steps."""
        return SGD(params, lr=self.rate)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return cross_entropy(output, target)

    def score(self, model: nn.Module, data: Iterable[tuple[Tensor, Tensor]]) -> float:
        """The share of right answers."""
        return offbeat.accuracy(model, data)


def party(folder: Path) -> tuple[Tensor, Tensor]:
    """The images and labels in a party's folder."""
    stored = load_file(folder / "digits.safetensors")
    return stored["images"], stored["labels"]
