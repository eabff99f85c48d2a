"""Regularized logistic regression with a known optimum: convex, so that a run can be checked against theory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from offbeat.task import Data, Task
from offbeat.tasks._common import check_at_least, check_positive, divide, generator, mean_over, once, tensors_of

_NON_ZEROS = 8  # Features of an example that are not zero, where the problem is sparse.
_DECAY = 100  # Steps after which the decay of the learning rate sets in.


@dataclass(eq=False)
class Logistic(Task):
    """Minimize the mean of log(1 + exp(-y·w·x)) + penalty/2·‖w‖², where y is -1 for label 0 and 1 for label 1.

    Dense examples are vectors. A sparse example has 8 categories, each with its own range of values: it is given by
    the 8 indices at which its vector is one instead of zero. The model looks up only these, so a gradient touches few
    coordinates; the penalty on a weight is shared out over the examples that use it, as in Hogwild!
    (Niu et al. 2011, section 2), which leaves the mean over the training part as it was.

    Its arguments:
    - `examples`: how many, over all three parts; a tenth each goes to validation and test.
    - `features`: weights to learn.
    - `seed`: of the data; the weights start at zero.
    - `sparse`: whether examples have 8 features that are not zero, or all.
    - `penalty`: weight of the regularization.
    - `rate`: learning rate of plain SGD at the start; at step t it is rate/√(1 + t/100).
    """

    target = -0.002
    global_batch = 32
    epochs = 20
    score_by_parts = True

    examples: int = 5000
    features: int = 200
    seed: int = 0
    sparse: bool = False
    penalty: float = 0.01
    rate: float = 0.5

    def __post_init__(self) -> None:
        check_at_least(10, examples=self.examples)
        check_at_least(_NON_ZEROS if self.sparse else 1, features=self.features)
        check_positive(penalty=self.penalty, rate=self.rate)

    def model(self) -> nn.Module:
        """A weight vector; its output has two columns: an example's w·x, and its share of the penalty."""
        if not self.sparse:
            return _Linear(self.features, torch.tensor(self.penalty))
        inputs, _ = tensors_of(self.data().train)
        uses = torch.bincount(inputs.flatten(), minlength=self.features)
        return _Linear(self.features, self.penalty * len(inputs) / uses.clamp(min=1))

    @once
    def data(self) -> Data:
        """Inputs (as many floats as features, or 8 places) and labels 0 or 1."""
        source = generator(self.seed)
        if self.sparse:
            bounds = torch.arange(_NON_ZEROS + 1) * self.features // _NON_ZEROS
            chosen = torch.rand(self.examples, _NON_ZEROS, generator=source, dtype=torch.float64)
            inputs = bounds[:-1] + (chosen * bounds.diff()).long()
        else:
            # Scaled so that the margins, and with them the noise in the labels, are those of the sparse problem.
            inputs = torch.randn(self.examples, self.features, generator=source)
            inputs *= (_NON_ZEROS / self.features) ** 0.5
        truth = torch.randn(self.features, generator=source)
        drawn = torch.rand(self.examples, generator=source)
        labels = (drawn < torch.sigmoid(_margins(inputs, truth))).long()
        return divide(inputs, labels, validation=self.examples // 10, test=self.examples // 10)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """The regularized loss, from the two columns of the output."""
        return (_losses(output[:, 0], target) + output[:, 1]).mean()

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """Plain SGD."""
        return SGD(params, lr=self.rate)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """The rate that makes SGD converge on a convex problem."""
        return LambdaLR(optimizer, lambda step: (1 + step / _DECAY) ** -0.5)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """Negated excess loss: the optimum's mean regularized loss on these batches, less the model's.

        On the training part it is the negated suboptimality, at most 0; on others the optimum of the training part
        need not be the best, and a score a little above 0 can happen.
        """
        best = self.solution()

        def excess(inputs: Tensor, labels: Tensor) -> Tensor:
            optimal = _losses(_margins(inputs, best.to(inputs.device)), labels)
            return (_losses(model(inputs)[:, 0].detach().double(), labels) - optimal).sum()

        norms = sum(float(weight.detach().double().square().sum()) for weight in model.parameters())
        return -(mean_over(data, excess) + self.penalty / 2 * (norms - float(best.square().sum())))

    def optimum(self) -> float:
        """The smallest regularized loss on the training part, to about 1e-12."""
        return float(self._objective(self.solution())[0])

    @once
    def solution(self) -> Tensor:
        """The weights (float64) at which the optimum is taken."""
        weight = torch.zeros(self.features, dtype=torch.float64)
        limits = {"max_iter": 1000, "history_size": 20}
        solver = LBFGS([weight], **limits, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe")

        def closure() -> float:
            loss, weight.grad = self._objective(weight)
            return float(loss)

        solver.step(closure)
        return weight

    def _objective(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The regularized loss on the training part, and its gradient, by hand so that no autograd need be on."""
        inputs, labels = tensors_of(self.data().train)
        margins = _margins(inputs, weight)
        loss = _losses(margins, labels).mean() + self.penalty / 2 * weight.square().sum()
        slopes = (torch.sigmoid(margins) - labels) / len(labels)
        if self.sparse:
            gradient = torch.zeros_like(weight)
            gradient.index_add_(0, inputs.flatten(), slopes.repeat_interleave(inputs.shape[1]))
        else:
            gradient = inputs.to(weight).T @ slopes
        return loss, gradient + self.penalty * weight


class _Linear(nn.Module):
    """A weight vector, and how much of the penalty an example bears for each weight that it uses."""

    shares: Tensor

    def __init__(self, features: int, shares: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))
        self.register_buffer("shares", shares.to(torch.float32), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Margins and penalties, in two columns."""
        if inputs.is_floating_point():
            penalty = (self.shares / 2 * self.weight.square().sum()).expand(len(inputs))
            return torch.stack([inputs @ self.weight, penalty], dim=1)
        used = self.weight[inputs]
        return torch.stack([used.sum(dim=1), (self.shares[inputs] / 2 * used.square()).sum(dim=1)], dim=1)


def _margins(inputs: Tensor, weight: Tensor) -> Tensor:
    return inputs.to(weight) @ weight if inputs.is_floating_point() else weight[inputs].sum(dim=1)


def _losses(margins: Tensor, labels: Tensor) -> Tensor:
    return functional.softplus(torch.where(labels == 1, -margins, margins))
