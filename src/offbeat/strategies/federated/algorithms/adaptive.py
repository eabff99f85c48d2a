"""Server optimizers: the mean update as a gradient for Adagrad, Adam or Yogi.

Reddi et al., "Adaptive Federated Optimization" (2021), algorithm 2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.strategies.federated.algorithms.base import FederatedAlgorithm, ServerSide
from offbeat.strategies.language.fields import Ranges

_RANGES: Ranges = (
    ("rate", lambda rate: rate > 0, "a step is longer than 0"),
    ("beta1", lambda beta: 0 <= beta < 1, "it is the share of momentum that is kept"),
    ("tau", lambda tau: tau > 0, "it keeps steps finite where there were no updates"),
)


@dataclass(frozen=True)
class AdaptiveServer(FederatedAlgorithm):
    """Base of server optimizers that scale each number's step by its second moment."""

    rate: float = 0.1
    """The server's learning rate."""
    beta1: float = 0.9
    """Share of the momentum that is kept."""
    beta2: float = 0.99
    """Share of the second moment that is kept; Adagrad keeps all of it."""
    tau: float = 1e-3
    """Added to the root of the second moment: how adaptive the steps are."""

    _ranges = (*_RANGES, ("beta2", lambda beta: 0 <= beta < 1, "it is the share of the second moment that is kept"))

    def server(self, model: FlatModel, clients: int) -> ServerSide:
        """Moments of the updates, and steps with them."""
        del clients
        return Moments(self, model)

    @abstractmethod
    def second_moment(self, moment: Tensor, squares: Tensor) -> None:
        """Take in the squares of a mean update, in place."""


@dataclass(frozen=True)
class FedAdagrad(AdaptiveServer):
    """FedAvg whose server steps with Adagrad."""

    name: ClassVar[str] = "fedadagrad"
    beta1: float = 0.0
    """Share of the momentum that is kept."""

    def second_moment(self, moment: Tensor, squares: Tensor) -> None:
        """The sum of squares."""
        moment.add_(squares)


@dataclass(frozen=True)
class FedAdam(AdaptiveServer):
    """FedAvg whose server steps with Adam."""

    name: ClassVar[str] = "fedadam"

    def second_moment(self, moment: Tensor, squares: Tensor) -> None:
        """A moving mean of squares."""
        moment.mul_(self.beta2).add_(squares, alpha=1 - self.beta2)


@dataclass(frozen=True)
class FedYogi(AdaptiveServer):
    """FedAvg whose server steps with Yogi."""

    name: ClassVar[str] = "fedyogi"

    def second_moment(self, moment: Tensor, squares: Tensor) -> None:
        """Squares, added or subtracted towards them."""
        moment.sub_(squares * torch.sign(moment - squares), alpha=1 - self.beta2)


class Moments(ServerSide):
    """The server's first and second moments; buffers of the model take the mean itself."""

    def __init__(self, settings: AdaptiveServer, model: FlatModel) -> None:
        self._settings, self._count = settings, model.trainable
        values = model.values[: model.trainable]
        self._first = torch.zeros_like(values)
        self._second = torch.full_like(values, settings.tau**2)

    def apply(self, model: Tensor, mean: Tensor, extra: Tensor | None) -> None:
        """Step with the moments."""
        del extra
        settings, count = self._settings, self._count
        update = mean[:count]
        self._first.mul_(settings.beta1).add_(update, alpha=1 - settings.beta1)
        settings.second_moment(self._second, update.square())
        model[:count].addcdiv_(self._first, self._second.sqrt().add_(settings.tau), value=settings.rate)
        model[count:].add_(mean[count:])

    def state_dict(self) -> dict[str, Any]:
        """The moments."""
        return {"first": self._first, "second": self._second}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from them."""
        self._first.copy_(state["first"])
        self._second.copy_(state["second"])
