"""Personal models: settings of `federated` for a model of each client's own, which never leaves it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from torch import Tensor

from offbeat.runtime.federated.client_state import ClientState
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.strategies._base import Setting
from offbeat.strategies.federated.algorithms.fedprox import ProximalClient
from offbeat.strategies.language.fields import Ranges

_RANGES: Final[Ranges] = (
    ("held", lambda share: 0 < share < 1, "it is the share of a client's examples that models are scored on"),
    ("scored", lambda count: 1 <= count <= 1_000_000, "1 to 1,000,000 clients are scored"),
    ("epochs", lambda epochs: epochs >= 1, "a client makes one pass over its data or more"),
)


@dataclass(frozen=True)
class PersonalModel(Setting):
    """How clients get models of their own."""

    trains_in_rounds: ClassVar[bool] = False
    """Whether a client trains its model whenever it takes part in a round; otherwise all do after the last round."""
    epochs: int = field(default=1, kw_only=True)
    """Passes of a client over its data to train its own model."""
    held: float = field(default=0.2, kw_only=True)
    """Share of each client's examples that no model is trained on, to score models on."""
    scored: int = field(default=1_000, kw_only=True)
    """Clients that are scored at most; of more, a random sample."""

    _ranges = _RANGES


@dataclass(frozen=True)
class Finetune(PersonalModel):
    """After the last round, each client trains the global model on its own examples."""

    name: ClassVar[str] = "finetune"


@dataclass(frozen=True)
class Ditto(PersonalModel):
    """In its rounds, each client also trains a model of its own, which a spring holds near the global one.

    Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization" (2021), algorithm 1. A client's first
    model is the global one of its first round.
    """

    name: ClassVar[str] = "ditto"
    trains_in_rounds: ClassVar[bool] = True
    pull: float
    """Strength of the spring, lambda in the paper: with more, personal models are more alike."""

    _ranges = (*_RANGES, ("pull", lambda pull: pull > 0, "a spring pulls with more than 0; without one use finetune"))


class TetheredClient(ProximalClient):
    """Adds pull * (v - w_global) to each gradient, wherever the client starts from."""

    def __init__(self, model: FlatModel, pull: float) -> None:
        super().__init__(model, pull)

    def tie(self, base: Tensor) -> None:
        """Tie the spring to these global parameters."""
        super().begin(base, None)

    def begin(self, base: Tensor, state: ClientState | None) -> None:
        """The client starts from its own model, and the spring stays where it is tied."""
