"""What every federated algorithm has: a client's side and the server's side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from offbeat.runtime.federated.client_state import ClientState
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.strategies._base import Setting


class ClientSide:
    """What a client does beside plain local training. One object serves all clients, one after the other."""

    def __init__(self, model: FlatModel) -> None:
        self.model = model

    def begin(self, base: Tensor, state: ClientState | None) -> None:
        """A client begins, from these global parameters, with what it kept from earlier rounds."""

    def adjust(self) -> None:
        """Change the gradients of a batch before the local step."""

    def finish(self, update: Tensor, steps: int, optimizer: Optimizer) -> Tensor | None:
        """The client's training is done; returns a further vector for the server, if the algorithm has one."""
        del update, steps, optimizer
        return None


class ServerSide:
    """What the server does with a round's result; every worker does it, to the same bits."""

    def start_message(self) -> Tensor | None:
        """A further vector that clients get with the model."""
        return None

    def apply(self, model: Tensor, mean: Tensor, extra: Tensor | None) -> None:
        """Move the global parameters by the mean update; `extra` is the sum of the clients' further vectors."""
        del extra
        model.add_(mean)

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to continue to the same bits."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        del state


@dataclass(frozen=True)
class FederatedAlgorithm(Setting):
    """A federated algorithm."""

    keeps_state: ClassVar[bool] = False
    """Whether clients keep a state between rounds."""
    sends_more: ClassVar[bool] = False
    """Whether clients send a further vector of the model's size, and get one."""
    whole_gradient: ClassVar[bool] = False
    """Whether a client sends the gradient of all its data instead of training."""

    @property
    def buffer(self) -> int | None:
        """Updates after which the server steps, if it does not work in rounds."""
        return None

    def client(self, model: FlatModel, server: ServerSide) -> ClientSide:
        """The client's side."""
        del server
        return ClientSide(model)

    def server(self, model: FlatModel, clients: int) -> ServerSide:
        """The server's side; `clients` is the number of all clients."""
        del model, clients
        return ServerSide()
