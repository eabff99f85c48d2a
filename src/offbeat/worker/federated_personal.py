"""Models of each client's own under `federated`: trained beside the rounds or after them, kept on disk, and scored.

A client's model and scores follow from the seed, the client and the round, so the result does not depend on the number
of workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from offbeat.errors import StrategyError
from offbeat.protocols.federated.client_parts import ClientParts
from offbeat.protocols.partition import Indices, mixed
from offbeat.runtime.federated.client_state import ClientState, ClientStates
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.local_training import LocalTrainer, Visit
from offbeat.strategies.federated.algorithms import ClientSide
from offbeat.strategies.federated.personal import Ditto, PersonalModel, TetheredClient
from offbeat.strategies.federated.strategy import Federated
from offbeat.team.team import Team
from offbeat.worker.federated_learner import GradientLearner, Scorer

PERSONAL_FOLDER: Final = "personal"
"""The folder, in that of the run, of clients' own models."""
MODEL: Final = "model"
STREAM: Final = 0xC0431  # Which of a seed's streams of random numbers these are; see also `protocols.federated`.
SAMPLE: Final = 0xC0432


@dataclass(frozen=True)
class OwnExamples:
    """The examples of all clients."""

    data: Dataset[Any]
    """All of them."""
    train: ClientParts
    """Those that each client trains on."""
    held: ClientParts
    """Those that each client's models are scored on."""


class PersonalModels:
    """The clients' own models, as one worker trains its share of them."""

    def __init__(self, learner: GradientLearner, team: Team, examples: OwnExamples) -> None:
        setting, folder = cast("Federated", team.strategy.exchange).personal, team.folder
        if setting is None or folder is None:
            raise StrategyError(f"personal={setting} keeps models of clients in the run's folder, and there is none.")
        self._setting: PersonalModel = setting
        self._team, self._learner, self._examples = team, learner, examples
        self._flat: FlatModel = learner.flat
        self._states = ClientStates(folder / PERSONAL_FOLDER)
        self._trainer: LocalTrainer = learner.trainer(mixed(team.seed, STREAM), setting.epochs)
        self._spring = TetheredClient(self._flat, setting.pull) if isinstance(setting, Ditto) else None

    def train(self, visit: Visit, base: Tensor) -> None:
        """A client takes part in a round that starts from these global parameters: it trains its own model, too."""
        if self._spring is None:
            return
        own = self._own(visit.client, visit.number)
        self._spring.tie(base)
        self._train(visit, base if own is None else own, self._spring)
        self._keep(visit, self._team.memory.written_at)

    def scored(self) -> dict[str, Any]:
        """Score the global model and each client's own on what it holds out; of all clients, or a sample."""
        clients, rank, size = self._sample(), self._team.rank, self._team.size
        rows = torch.zeros(len(clients), 3, dtype=torch.float64)
        with self._team.stopwatch.spent_on("evaluate"):
            for place in range(rank, len(clients), size):
                rows[place] = torch.tensor(self._scores(int(clients[place])), dtype=torch.float64)
            self._team.group.sum(rows, "the scores of personal models")
        rows = rows[rows[:, 2] > 0]
        before, after = rows[:, 0].tolist(), rows[:, 1].tolist()
        return {
            "method": str(self._setting),
            "clients": len(rows),
            "without": len(clients) - len(rows),
            "before": spread(before),
            "after": spread(after),
            "better": sum(new > old for old, new in zip(before, after, strict=True)),
            "worse": sum(new < old for old, new in zip(before, after, strict=True)),
        }

    def _sample(self) -> Indices:
        """The clients that are scored, if they have models of their own."""
        able = np.flatnonzero((self._examples.held.sizes > 0) & (self._examples.train.sizes > 0)).astype(np.int64)
        if len(able) <= self._setting.scored:
            return able
        chosen = np.random.default_rng(mixed(self._team.seed, SAMPLE)).choice(able, self._setting.scored, replace=False)
        return np.sort(chosen)

    def _scores(self, client: int) -> tuple[float, float, float]:
        """Scores before and after, and 1; zeros if the client has no model of its own, or a score is not a number."""
        base, last = self._learner.model.base, self._learner.model.progress.number
        own = self._own(client, last + 1)
        if own is None and self._setting.trains_in_rounds:
            return 0.0, 0.0, 0.0
        held = Subset(self._examples.data, self._examples.held.part(client).tolist())
        score = Scorer(self._learner.task, self._flat.module, self._team, held).here
        self._flat.load(base)
        before = score(held)
        if self._setting.trains_in_rounds and own is not None:
            self._flat.load(own)
        else:
            visit = Visit(client, last, self._examples.train.part(client))
            self._train(visit, base, ClientSide(self._flat))
            self._keep(visit, last)
        after = score(held)
        return (before, after, 1.0) if math.isfinite(before) and math.isfinite(after) else (0.0, 0.0, 0.0)

    def _train(self, visit: Visit, start: Tensor, correction: ClientSide) -> None:
        """Train a client's own model in the place of the global one; fedsgd's server keeps its optimizer's state."""
        state = self._learner.optimizer.state
        kept = dict(state)
        state.clear()
        self._trainer.train(visit, start, correction)
        state.update(kept)

    def _own(self, client: int, before: int) -> Tensor | None:
        return self._states.read(client, before).tensors.get(MODEL)

    def _keep(self, visit: Visit, safe: int) -> None:
        """Keep the model that has just been trained."""
        self._states.write(visit.client, visit.number, ClientState({MODEL: self._flat.values.clone()}), safe)


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
