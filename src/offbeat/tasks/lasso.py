"""The lasso by coordinate descent: sparse regression without gradients, with conditions that prove a result optimal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from offbeat.task import Data, IterativeTask
from offbeat.tasks._common import check_at_least, check_positive, divide, generator, mean_over, once, tensors_of

_CORRELATION = 0.5
"""Between neighbouring features: without it one sweep would do, and there would be nothing to iterate."""


@dataclass(eq=False)
class Lasso(IterativeTask):
    """Minimize ‖y - X·w‖²/(2n) + penalty·‖w‖₁ by cyclic coordinate descent, some coordinates a step.

    A step exchanges what its coordinates need and no more; the ones of a step are updated one after the other, so
    the iterates do not depend on `block` (Friedman, Hastie and Tibshirani 2010, section 2). All of it is in float64.
    The target allows, beyond the validation error of the weights that made the data, 8·informative·penalty²: what the
    penalty's shrinking of the weights may cost.

    Its arguments:
    - `examples`: how many, over all three parts; a tenth each goes to validation and test.
    - `features`: weights to learn.
    - `informative`: how many of the weights that generate the data are not zero.
    - `noise`: standard deviation of the noise in y.
    - `penalty`: weight of the 1-norm.
    - `block`: coordinates updated in a step.
    - `seed`: of the data.
    """

    steps = 200

    examples: int = 5000
    features: int = 64
    informative: int = 8
    noise: float = 0.5
    penalty: float = 0.02
    block: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(10, examples=self.examples)
        check_at_least(1, features=self.features, block=self.block, informative=self.informative)
        check_at_least(self.informative, features=self.features)
        check_positive(noise=self.noise, penalty=self.penalty)
        reachable = self.score({"weight": self._truth}, [tensors_of(self.data().validation)])
        self.target = reachable - 8 * self.informative * self.penalty**2

    @once
    def data(self) -> Data:
        """Inputs (as many floats as features) and values."""
        source = generator(self.seed + 1)
        inputs = torch.randn(self.examples, self.features, dtype=torch.float64, generator=source)
        for column in range(1, self.features):
            inputs[:, column] *= (1 - _CORRELATION**2) ** 0.5
            inputs[:, column] += _CORRELATION * inputs[:, column - 1]
        noise = torch.randn(self.examples, dtype=torch.float64, generator=source)
        values = inputs @ self._truth + self.noise * noise
        return divide(inputs, values, validation=self.examples // 10, test=self.examples // 10)

    @cached_property
    def _truth(self) -> Tensor:
        """The weights that generate the data."""
        source = generator(self.seed)
        weight = torch.zeros(self.features, dtype=torch.float64)
        places = torch.randperm(self.features, generator=source)[: self.informative]
        weight[places] = torch.randn(self.informative, dtype=torch.float64, generator=source)
        return weight

    def initial(self) -> Mapping[str, Tensor]:
        """All weights zero, and no step taken."""
        return {"weight": torch.zeros(self.features, dtype=torch.float64), "step": torch.zeros((), dtype=torch.int64)}

    def statistics(self, params: Mapping[str, Tensor], batch: Any) -> Mapping[str, Tensor]:
        """Products of this step's features with the residual and with each other."""
        inputs, values = batch
        chosen = inputs[:, self._coordinates(params)]
        residual = values - inputs @ params["weight"]
        return {
            "correlation": chosen.T @ residual,
            "gram": chosen.T @ chosen,
            "count": torch.tensor(len(values), dtype=torch.int64),
        }

    def update(self, params: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Soft-threshold the coordinates in turn, each seeing what the ones before it became."""
        place, gram = self._coordinates(params), total["gram"]
        correlation = total["correlation"].clone()
        threshold = self.penalty * total["count"]
        weight = params["weight"].clone()
        block = weight[place]
        for j in range(len(block)):
            before = block[j].clone()
            if gram[j, j] > 0:
                value = correlation[j] + gram[j, j] * before
                block[j] = value.sign() * (value.abs() - threshold).clamp(min=0) / gram[j, j]
            correlation -= gram[:, j] * (block[j] - before)
        return {"weight": weight, "step": params["step"] + 1}

    def score(self, params: Mapping[str, Tensor], data: Iterable[Any]) -> float:
        """The mean squared error, negated."""
        weight = params["weight"]
        return -mean_over(data, lambda inputs, values: (values - inputs @ weight).square().sum())

    def _coordinates(self, params: Mapping[str, Tensor]) -> slice:
        blocks = -(-self.features // self.block)
        first = int(params["step"]) % blocks * self.block
        return slice(first, min(first + self.block, self.features))
