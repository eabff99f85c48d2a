"""Personal models: settings of `federated` for a model of each client's own, which never leaves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
from torch import Tensor

from offbeat.runtime.federated.client_state import ClientState
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.local_training import LocalTrainer, Visit
from offbeat.strategies._base import Setting
from offbeat.strategies.federated.algorithms.base import ClientSide
from offbeat.strategies.federated.algorithms.fedprox import ProximalClient
from offbeat.strategies.language.fields import Ranges

STREAM: Final = 0xC0431
"""Which of a seed's streams of random numbers personal models are trained with; see also `protocols.federated`."""
MODEL: Final = "model"
"""The name of a personal model in its client's state."""
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


class PersonalTrainer:
    """Trains and scores clients' own models, one after the other, in the place of the global one.

    A client's model and scores follow from the seed, the client and the round alone, wherever they are computed.
    """

    def __init__(self, setting: PersonalModel, trainer: LocalTrainer) -> None:
        self.setting = setting
        self._trainer, self._flat = trainer, trainer.model
        self._spring = TetheredClient(self._flat, setting.pull) if isinstance(setting, Ditto) else None

    def in_round(self, visit: Visit, base: Tensor, kept: ClientState) -> ClientState | None:
        """A client takes part in a round that starts from these global parameters; returns what it keeps then."""
        if self._spring is None:
            return None
        self._spring.tie(base)
        return self._train(visit, kept.tensors.get(MODEL, base), self._spring)

    def scores(
        self, visit: Visit, base: Tensor, kept: ClientState, score: Callable[[], float]
    ) -> tuple[tuple[float, float], ClientState] | None:
        """After the last round: the scores of the global model and of the client's own, and what it keeps.

        None if the client has no model of its own. `score` is that of the model which is in place.
        """
        own = kept.tensors.get(MODEL)
        if own is None and self.setting.trains_in_rounds:
            return None
        self._flat.load(base)
        before = score()
        if own is not None and self.setting.trains_in_rounds:
            self._flat.load(own)
        else:
            kept = self._train(visit, base, ClientSide(self._flat))
        return (before, score()), kept

    def _train(self, visit: Visit, start: Tensor, correction: ClientSide) -> ClientState:
        """Train a client's own model; fedsgd's server keeps its optimizer's state."""
        state = self._trainer.optimizer.state
        before = dict(state)
        state.clear()
        self._trainer.train(visit, start, correction)
        state.update(before)
        return ClientState({MODEL: self._flat.values.clone()})


def compared(setting: PersonalModel, scores: Sequence[tuple[float, float]], without: int) -> dict[str, Any]:
    """The result's entry, from the scores of the global model and of each client's own, on what each holds out."""
    before, after = [old for old, _ in scores], [new for _, new in scores]
    return {
        "method": str(setting),
        "clients": len(scores),
        "without": without,
        "before": spread(before),
        "after": spread(after),
        "better": sum(new > old for old, new in scores),
        "worse": sum(new < old for old, new in scores),
    }


def spread(scores: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation and extremes of clients' scores, and the mean of the worst tenth."""
    if not scores:
        return {}
    ranked = np.sort(np.asarray(scores, np.float64))
    return {
        "mean": float(ranked.mean()),
        "deviation": float(ranked.std()),
        "worst_tenth": float(ranked[: math.ceil(len(ranked) / 10)].mean()),
        "lowest": float(ranked[0]),
        "highest": float(ranked[-1]),
    }
