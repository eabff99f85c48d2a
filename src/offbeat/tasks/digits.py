"""Handwritten digits, 8 by 8 pixels: small enough to learn in seconds, real enough to compare strategies on."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.optim import SGD, Optimizer

from offbeat.task import Data, Task, accuracy
from offbeat.tasks._common import check_positive, divide, once

_HELD_OUT = 300
"""Images in the validation part, and again in the test part; the other 1,197 are for training."""
_WHITE = 16
"""The brightest grey level of the images."""


class Digits(Task):
    """Classify the 1,797 digits of the UCI test set with a small convolutional network.

    The network has neither batch normalization nor dropout, so that p workers can be compared exactly with one.

    Its arguments:
    - `rate`: learning rate of SGD with momentum 0.9.
    """

    target = 0.97
    global_batch = 64
    epochs = 20
    score_by_parts = True

    def __init__(self, rate: float = 0.03) -> None:
        check_positive(rate=rate)
        self.rate = rate

    def model(self) -> nn.Module:
        """Two convolutions and two linear layers."""
        layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        for layer in layers:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                # Torch's default starts ReLU layers too small: the target would come late, and by a hair.
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return layers

    @once
    def data(self) -> Data:
        """Images (1, 8, 8) between 0 and 1, and their digits."""
        stored = load(resources.files("offbeat.tasks").joinpath("data", "digits.safetensors").read_bytes())
        images = stored["images"].unsqueeze(1).to(torch.float32) / _WHITE
        return divide(images, stored["labels"].long(), validation=_HELD_OUT, test=_HELD_OUT)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(output, target)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """SGD with momentum."""
        return SGD(params, lr=self.rate, momentum=0.9)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """The share of digits that are recognized."""
        return accuracy(model, data)
