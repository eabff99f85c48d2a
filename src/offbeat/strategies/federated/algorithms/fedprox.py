"""FedProx: a spring holds a client's model near the global one.

Li et al., "Federated Optimization in Heterogeneous Networks" (2020), algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.runtime.federated.client_state import ClientState
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.strategies.federated.algorithms.base import ClientSide, FederatedAlgorithm, ServerSide


@dataclass(frozen=True)
class FedProx(FederatedAlgorithm):
    """FedAvg, with mu/2 times the squared distance to the global model added to each client's loss."""

    name: ClassVar[str] = "fedprox"
    mu: float
    """Strength of the spring."""

    _ranges = (("mu", lambda mu: mu > 0, "a spring pulls with more than 0; without one this is fedavg"),)

    def client(self, model: FlatModel, server: ServerSide) -> ClientSide:
        """Add the spring's gradient before each step."""
        del server
        return ProximalClient(model, self.mu)


class ProximalClient(ClientSide):
    """Adds mu * (w - w_global) to each gradient."""

    def __init__(self, model: FlatModel, mu: float) -> None:
        super().__init__(model)
        self._mu, self._base = mu, model.values
        self._distance = torch.empty_like(model.values)

    def begin(self, base: Tensor, state: ClientState | None) -> None:
        """The spring is tied to the global parameters."""
        del state
        self._base = base

    def adjust(self) -> None:
        """Add the spring's gradient."""
        torch.sub(self.model.values, self._base, out=self._distance)
        self.model.add_to_gradients(self._distance, self._mu)
