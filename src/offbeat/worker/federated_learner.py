"""What the clients of a federated run compute, and how the global model moves by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from offbeat.runtime.federated.client_state import ClientState
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.local_training import Examples, LocalResult, LocalTrainer, Visit, check_loss
from offbeat.simulate.federated import RoundProgress
from offbeat.strategies.federated.strategy import Federated
from offbeat.strategies.federated.update_path import UpdatePath, update_path
from offbeat.task import Task
from offbeat.team.team import Team
from offbeat.worker.task_data import loader_over, on_device, size_of

COUNTS: Final = ("rounds", "updates", "late", "dropped", "refused", "failed_rounds", "bytes_down", "bytes_up")
"""What is counted over the rounds of a run."""
CHUNKS: Final = 16
"""Parts in which a model is scored, whatever the number of workers: so the score is the same, too."""


class GlobalModel:
    """The model that all clients share and the place in the sequence of rounds; what a checkpoint holds."""

    def __init__(self, base: Tensor, kept: Mapping[str, Any]) -> None:
        self.base = base
        """The global parameters."""
        self.progress = RoundProgress()
        """The place in the sequence of rounds."""
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.older: dict[int, Tensor] = {}
        """Models that clients are still training from, by version."""
        self._kept = dict(kept)

    def at(self, version: int) -> Tensor:
        """The global parameters of a version that is still needed."""
        return self.base if version == self.progress.version else self.older[version]

    def go_on(self, progress: RoundProgress, move: Callable[[Tensor], None] | None) -> None:
        """A round is done: make the next version, and keep the versions from which clients still train."""
        needed = {flight.version for flight in progress.flights}
        if self.progress.version in needed:
            self.older[self.progress.version] = self.base.clone()
        self.older = {version: model for version, model in self.older.items() if version in needed}
        if move is not None:
            move(self.base)
        self.progress = progress

    def state_dict(self) -> dict[str, Any]:
        """Everything from which the next round follows."""
        return {
            "base": self.base,
            "older": {str(version): model for version, model in self.older.items()},
            # JSON, which holds what is not tensors, has no infinite numbers.
            "progress": msgspec.msgpack.encode(self.progress).hex(),
            "counts": dict(self.counts),
            **{name: thing.state_dict() for name, thing in self._kept.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        self.base.copy_(state["base"])
        self.older = {int(version): model for version, model in state["older"].items()}
        self.progress = msgspec.msgpack.decode(bytes.fromhex(state["progress"]), type=RoundProgress)
        self.counts = {name: int(state["counts"].get(name, 0)) for name in COUNTS}
        for name, thing in self._kept.items():
            thing.load_state_dict(state[name])


class Learner(ABC):
    """One kind of task under federated rounds."""

    model: GlobalModel
    path: UpdatePath
    keeps_state: bool
    """Whether clients keep something between rounds."""

    @abstractmethod
    def result(self, visit: Visit, base: Tensor, state: ClientState | None) -> LocalResult:
        """What a client computes from these global parameters."""

    @abstractmethod
    def move(self, base: Tensor, mean: Tensor, extra: Tensor | None) -> None:
        """Move the global parameters, in place, by what the clients' updates amount to."""

    @abstractmethod
    def round_done(self) -> None:
        """A round is over, whether or not the model has moved."""

    @abstractmethod
    def scorer(self, data: Dataset[Any]) -> Callable[[], float]:
        """The function that scores the global model on a part of the data, the same on all workers."""

    @abstractmethod
    def trained(self) -> dict[str, Tensor]:
        """The global model, for its file."""


class GradientLearner(Learner):
    """Clients train the model of a `Task`."""

    def __init__(self, task: Task, team: Team, examples: Examples) -> None:
        self.task, self._team, self._examples = task, team, examples
        self._strategy = strategy = cast("Federated", team.strategy.exchange)
        self.flat = FlatModel(task.model().to(team.device))
        optimizer = task.optimizer(self.flat.parameters)
        for group in optimizer.param_groups:
            group["lr"] *= team.goal.rate_factor
        self._schedule = task.schedule(optimizer)
        self._algorithm = strategy.algorithm
        self._server = self._algorithm.server(self.flat, strategy.clients)
        self._client = self._algorithm.client(self.flat, self._server)
        self.path = update_path(team.strategy, self.flat, team.seed)
        self.keeps_state = self._algorithm.keeps_state or self.path.keeps_state
        kept = {"server": self._server, "aggregation": self.path.aggregation, "optimizer": optimizer}
        self.model = GlobalModel(
            self.flat.values.clone(), kept if self._schedule is None else {**kept, "schedule": self._schedule}
        )
        self.optimizer = optimizer
        """The clients' optimizer."""
        self._trainer = self.trainer(team.seed, strategy.epochs)

    def trainer(self, seed: int, epochs: int) -> LocalTrainer:
        """Trains clients in the place of the global model, with random numbers from this seed."""
        batch = None if self._strategy.batch == "full" else self._strategy.batch
        return LocalTrainer(self.flat, self.optimizer, self._loss, self._examples, seed, epochs, batch)

    def _loss(self, batch: Any) -> Tensor:
        loss = self.task.loss(self.flat.module, on_device(batch, self._team.device))
        return check_loss(loss, type(self.task).__name__)

    def result(self, visit: Visit, base: Tensor, state: ClientState | None) -> LocalResult:
        """The client's update, or its gradient."""
        if self._algorithm.whole_gradient:
            return self._trainer.gradient(visit, base)
        return self._trainer.train(visit, base, self._client, state)

    def move(self, base: Tensor, mean: Tensor, extra: Tensor | None) -> None:
        """A step of the server, or of the task's optimizer with the cohort's gradient."""
        if self._algorithm.whole_gradient:
            self._trainer.step(base, mean)
        else:
            self._server.apply(base, mean, extra)

    def round_done(self) -> None:
        """The schedule of the clients' learning rate goes by rounds."""
        if self._schedule is not None:
            self._schedule.step()

    def scorer(self, data: Dataset[Any]) -> Callable[[], float]:
        """Scores the global model in the place of a client's."""
        score = Scorer(self.task, self.flat.module, self._team, data)

        def scored() -> float:
            self.flat.load(self.model.base)
            return score()

        return scored

    def trained(self) -> dict[str, Tensor]:
        """The state of the module, with the global parameters."""
        self.flat.load(self.model.base)
        return {name: value for name, value in self.flat.module.state_dict().items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Scorer:
    """Scores a model on one part of the data: in chunks that workers share, if the task allows it."""

    task: Task
    module: nn.Module
    team: Team
    data: Dataset[Any]

    def __call__(self) -> float:
        """The score, the same on all workers."""
        count, chunks = size_of(self.data), CHUNKS
        if not self.task.score_by_parts or count < 2 * CHUNKS:
            return self.here(self.data)
        bounds = [count * i // chunks for i in range(chunks + 1)]
        own = [0.0] * chunks
        for chunk in range(self.team.rank, chunks, self.team.size):
            own[chunk] = self.here(Subset(self.data, range(bounds[chunk], bounds[chunk + 1])))
        scores: Sequence[float] = self.team.group.gather(own, "a score").sum(dim=0).tolist()
        sizes = [stop - start for start, stop in pairwise(bounds)]
        return sum(score * size for score, size in zip(scores, sizes, strict=True)) / count

    def here(self, data: Dataset[Any]) -> float:
        """The score on this data, which this worker computes by itself."""
        batches = loader_over(data, self.task.evaluate_batch, self.task.collate, shuffle=False)
        with torch.no_grad():
            self.module.eval()
            return float(self.task.score(self.module, (on_device(batch, self.team.device) for batch in batches)))
