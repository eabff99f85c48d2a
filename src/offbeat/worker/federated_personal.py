"""Models of each client's own under `federated`: trained beside the rounds or after them, kept on disk, and scored.

A client's model and scores follow from the seed, the client and the round, so the result does not depend on the number
of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from offbeat.errors import StrategyError
from offbeat.protocols.federated.client_parts import ClientParts
from offbeat.protocols.partition import Indices, mixed
from offbeat.runtime.federated.client_state import ClientStates
from offbeat.runtime.federated.local_training import Visit
from offbeat.strategies.federated.personal import STREAM, PersonalModel, PersonalTrainer, compared
from offbeat.strategies.federated.strategy import Federated
from offbeat.team.team import Team
from offbeat.worker.federated_learner import GradientLearner, Scorer

PERSONAL_FOLDER: Final = "personal"
"""The folder, in that of the run, of clients' own models."""
SAMPLE: Final = 0xC0432  # Which of a seed's streams of random numbers this is; see also `protocols.federated`.


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
        self._states = ClientStates(folder / PERSONAL_FOLDER)
        self._own = PersonalTrainer(setting, learner.trainer(mixed(team.seed, STREAM), setting.epochs))

    def train(self, visit: Visit, base: Tensor, number: int) -> None:
        """A client takes part in a round that starts from these global parameters: it trains its own model, too."""
        if not self._setting.trains_in_rounds:
            return
        kept = self._own.in_round(visit, base, self._states.read(visit.client, number))
        if kept is not None:
            self._states.write(visit.client, number, kept, self._team.memory.written_at)

    def forget(self, client: int, number: int) -> None:
        """The client's update of this round does not count, so its own model is what it was before."""
        self._states.forget(client, number)

    def scored(self) -> dict[str, Any]:
        """Score the global model and each client's own on what it holds out; of all clients, or a sample."""
        clients, rank, size = self._sample(), self._team.rank, self._team.size
        rows = torch.zeros(len(clients), 3, dtype=torch.float64)
        with self._team.stopwatch.spent_on("evaluate"):
            for place in range(rank, len(clients), size):
                rows[place] = torch.tensor(self._scores(int(clients[place])), dtype=torch.float64)
            self._team.group.sum(rows, "the scores of personal models")
        rows = rows[rows[:, 2] > 0]
        pairs = list(zip(rows[:, 0].tolist(), rows[:, 1].tolist(), strict=True))
        return compared(self._setting, pairs, len(clients) - len(rows))

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
        held = Subset(self._examples.data, self._examples.held.part(client).tolist())
        score = Scorer(self._learner.task, self._learner.flat.module, self._team, held).here
        visit = Visit(client, last, self._examples.train.part(client))
        result = self._own.scores(visit, base, self._states.read(client, last + 1), lambda: score(held))
        if result is None or not all(map(math.isfinite, result[0])):
            return 0.0, 0.0, 0.0
        if not self._setting.trains_in_rounds:
            self._states.write(client, last, result[1], last)
        return (*result[0], 1.0)
