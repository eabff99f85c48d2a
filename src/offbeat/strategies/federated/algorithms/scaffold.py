"""SCAFFOLD: control variates correct the drift of clients whose data differ.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (2020), algorithm 1 with option
II. Models are averaged by examples; variates equally, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from offbeat.errors import StrategyError
from offbeat.runtime.federated.client_state import ClientState
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.strategies.federated.algorithms.base import ClientSide, FederatedAlgorithm, ServerSide

VARIATE: Final = "variate"


@dataclass(frozen=True)
class Scaffold(FederatedAlgorithm):
    """Each client corrects its gradients by how its own usually differ from all clients'.

    Clients keep their variates on disk, in the run's folder. The task's optimizer must be plain SGD.
    """

    name: ClassVar[str] = "scaffold"
    keeps_state: ClassVar[bool] = True
    sends_more: ClassVar[bool] = True
    rate: float = 1.0
    """How far the server moves towards the mean of the clients' models."""

    _ranges = (("rate", lambda rate: rate > 0, "a step is longer than 0"),)

    def client(self, model: FlatModel, server: ServerSide) -> ClientSide:
        """Correct gradients by the variates."""
        variate = server.start_message()
        if variate is None:
            raise StrategyError("scaffold's client needs the server's variate.")
        return VariateClient(model, variate)

    def server(self, model: FlatModel, clients: int) -> ServerSide:
        """Keep the mean of all clients' variates."""
        return VariateServer(model, clients, self.rate)


class VariateClient(ClientSide):
    """Adds c - c_i to each gradient, and computes the new c_i."""

    def __init__(self, model: FlatModel, common: Tensor) -> None:
        super().__init__(model)
        self._common = common
        self._own = torch.zeros_like(model.values)
        self._correction = torch.zeros_like(model.values)
        self._state: ClientState | None = None

    def begin(self, base: Tensor, state: ClientState | None) -> None:
        """Fetch the client's variate; 0 if this is its first round."""
        del base
        self._state = state
        kept = None if state is None else state.tensors.get(VARIATE)
        if kept is None:
            self._own.zero_()
        else:
            self._own.copy_(kept)
        torch.sub(self._common, self._own, out=self._correction)

    def adjust(self) -> None:
        """Correct the gradient."""
        self.model.add_to_gradients(self._correction)

    def finish(self, update: Tensor, steps: int, optimizer: Optimizer) -> Tensor | None:
        """The change of the client's variate: -c - update / (steps * rate)."""
        count, rate = self.model.trainable, _learning_rate(optimizer)
        change = torch.zeros_like(update)
        change[:count] = -self._common[:count] - update[:count] / (steps * rate)
        if self._state is not None:
            self._state.tensors[VARIATE] = self._own + change
        return change


class VariateServer(ServerSide):
    """Moves by the mean update, and its variate by the mean change over all clients."""

    def __init__(self, model: FlatModel, clients: int, rate: float) -> None:
        self._clients, self._rate = clients, rate
        self._common = torch.zeros_like(model.values)

    def start_message(self) -> Tensor | None:
        """The common variate."""
        return self._common

    def apply(self, model: Tensor, mean: Tensor, extra: Tensor | None) -> None:
        """Move model and variate."""
        model.add_(mean, alpha=self._rate)
        if extra is not None:
            self._common.add_(extra, alpha=1 / self._clients)

    def state_dict(self) -> dict[str, Any]:
        """The common variate."""
        return {"common": self._common}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from it."""
        self._common.copy_(state["common"])


def _learning_rate(optimizer: Optimizer) -> float:
    """The learning rate of plain SGD, which the variates' formula takes for granted."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    plain = type(optimizer) is SGD and not any(group["momentum"] for group in optimizer.param_groups)
    if not plain or len(rates) != 1:
        raise StrategyError(
            "scaffold's variates follow from steps of plain SGD with one learning rate, and the task's optimizer is "
            f"{type(optimizer).__name__} with rates {sorted(rates)}. Use SGD without momentum, or another algorithm."
        )
    return rates.pop()
