"""Logistic regression on sparse examples, with sparse gradients: each step reads and writes a few of many weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.optim import SGD, Optimizer

from offbeat.task import Data, Task
from offbeat.tasks._common import check_at_least, check_positive, divide, generator, mean_over, once


@dataclass(eq=False)
class Sparse(Task):
    """Minimize the mean of log(1 + exp(-y·Σw_i)), the sum over the features i that an example has; y is -1 or 1.

    As in text, a few features are in many examples and most are in few. An example is given by the indices of its
    features. Gradients are sparse tensors, so a step costs the same however many weights there are, and two steps
    seldom touch the same weight: what Hogwild! is made for (Niu et al. 2011, section 2).

    Its arguments:
    - `examples`: how many, over all three parts; a tenth each goes to validation and test.
    - `features`: weights to learn.
    - `active`: features that an example has; one that is drawn twice counts twice.
    - `seed`: of the data; the weights start at zero.
    - `rate`: learning rate of plain SGD.
    """

    target = -0.43
    global_batch = 64
    epochs = 10
    score_by_parts = True

    examples: int = 20000
    features: int = 4000
    active: int = 16
    seed: int = 0
    rate: float = 2.0

    def __post_init__(self) -> None:
        check_at_least(10, examples=self.examples)
        check_at_least(1, features=self.features, active=self.active)
        check_positive(rate=self.rate)

    def model(self) -> nn.Module:
        """One weight for each feature; the output is the sum of an example's weights."""
        weights = nn.EmbeddingBag(self.features, 1, mode="sum", sparse=True)
        nn.init.zeros_(weights.weight)
        return weights

    @once
    def data(self) -> Data:
        """Inputs (the numbers of `active` features) and labels 0 or 1."""
        source = generator(self.seed)
        drawn = torch.rand(self.examples, self.active, generator=source, dtype=torch.float64)
        # Squared, so that feature i is drawn with a probability that falls as 1/√i.
        inputs = (drawn.square() * self.features).long()
        truth = torch.randn(self.features, generator=source)
        chances = torch.sigmoid(truth[inputs].sum(dim=1))
        labels = (torch.rand(self.examples, generator=source) < chances).float()
        return divide(inputs, labels, validation=self.examples // 10, test=self.examples // 10)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean log loss of a batch."""
        return functional.binary_cross_entropy_with_logits(output[:, 0], target)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """Plain SGD, which changes only the weights that a sparse gradient names."""
        return SGD(params, lr=self.rate)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """The negated mean log loss, in nats."""
        entropy = functional.binary_cross_entropy_with_logits
        return -mean_over(data, lambda inputs, labels: entropy(model(inputs)[:, 0], labels, reduction="sum"))
