"""Federated averaging: the server takes the mean of the clients' models.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.strategies.federated.algorithms.base import FederatedAlgorithm, ServerSide


@dataclass(frozen=True)
class FedAvg(FederatedAlgorithm):
    """The mean of the clients' models, weighted by examples."""

    name: ClassVar[str] = "fedavg"
    rate: float = 1.0
    """How far the server moves towards the mean; 1 takes the mean itself."""

    _ranges = (("rate", lambda rate: rate > 0, "a step is longer than 0"),)

    def server(self, model: FlatModel, clients: int) -> ServerSide:
        """Move by the mean update."""
        del model, clients
        return ServerSide() if self.rate == 1 else _Scaled(self.rate)


class _Scaled(ServerSide):
    """Moves by a multiple of the mean update."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def apply(self, model: Tensor, mean: Tensor, extra: Tensor | None) -> None:
        """Move the global parameters."""
        del extra
        model.add_(mean, alpha=self._rate)
