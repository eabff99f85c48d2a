"""Handwritten digits, 8 by 8 pixels: learned in seconds, real enough to compare strategies on."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import torch
from safetensors.torch import load
from torch import nn

from offbeat.task import Data
from offbeat.tasks._common import Classifier, divide, once

_HELD_OUT = 300  # Images in the validation part, and again in the test part; the other 1,197 are for training.
_WHITE = 16  # The brightest grey level of the images.


@dataclass(eq=False)
class Digits(Classifier):
    """Classify the 1,797 digits of the UCI test set with a small convolutional network.

    The network has neither batch normalization nor dropout, so that p workers can be compared exactly with one.

    Its arguments:
    - `rate`: learning rate of SGD with momentum 0.9.
    """

    target = 0.97
    global_batch = 64
    epochs = 20
    score_by_parts = True

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
                # Torch's default initialization is too small for ReLU: the target would barely be reached.
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return layers

    @once
    def data(self) -> Data:
        """Images (1, 8, 8) between 0 and 1, and their digits."""
        stored = load(resources.files("offbeat.tasks").joinpath("data", "digits.safetensors").read_bytes())
        images = stored["images"].unsqueeze(1).to(torch.float32) / _WHITE
        return divide(images, stored["labels"].long(), validation=_HELD_OUT, test=_HELD_OUT)
