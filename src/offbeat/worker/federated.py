"""A worker under `federated`: the clients of a round, one after the other, in one model, and one exchange a round.

Which clients take part follows from the seed, so workers need no message to agree. Each trains its share of them, and
updates are summed in fixed point: the result has the same bits with any number of workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Subset

from offbeat.errors import DataError, NonFiniteError
from offbeat.runtime.federated.aggregation import ClientUpdate, Selected
from offbeat.runtime.federated.client_state import ClientState, ClientStates
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.local_training import LocalResult, LocalTrainer, Visit, check_loss, examples_of
from offbeat.runtime.federated.round_log import RoundLog
from offbeat.simulate.federated import Participant, RoundOutcome, RoundProgress, VirtualRounds
from offbeat.strategies.federated.algorithms import ServerSide
from offbeat.strategies.federated.strategy import Federated, FederatedWorker
from offbeat.strategies.federated.update_path import UpdatePath, update_path
from offbeat.task import Task
from offbeat.team.team import Team
from offbeat.worker.client_data import divided
from offbeat.worker.model_file import write_model
from offbeat.worker.task_data import data_of, loader_over, on_device, size_of

CLIENTS_FOLDER: Final = "clients"
"""The folder, in that of the run, of what clients keep."""
COUNTS: Final = ("rounds", "updates", "late", "dropped", "refused", "failed_rounds", "bytes_down", "bytes_up")
"""What is counted over the rounds of a run."""
CHUNKS: Final = 16
"""Parts in which a model is scored, whatever the number of workers: so the score is the same, too."""
HOPELESS: Final = 10
"""Rounds in a row in which every update was refused, after which the run ends."""


def federate(task: Task, team: Team) -> None:
    """Train a task in rounds of simulated clients, until the target or the budget is reached."""
    # One thread each: with several, sums inside an operator depend on their number.
    torch.set_num_threads(1)
    rounds = Rounds(task, team)
    team.prepare(rounds.model)
    team.group.share(rounds.model.base, "the sharing of worker 0's model")
    team.resume()
    rounds.begin()
    data, every = data_of(task), task.evaluate_every or 1
    validate = Scorer(task, rounds.flat.module, team, data.validation)
    while team.boundary():
        team.begin_step()
        rounds.next()
        if team.step % every == 0 or team.exhausted:
            team.report(score=rounds.scored(validate))
    team.notes["test_score"] = rounds.scored(Scorer(task, rounds.flat.module, team, data.test))
    strategy = cast("Federated", team.strategy.exchange)
    team.notes["epochs"] = max(1, round(team.step * strategy.fraction * strategy.epochs))
    team.notes["federated"] = rounds.notes()
    rounds.flat.values.copy_(rounds.model.base)
    write_model({k: v for k, v in rounds.flat.module.state_dict().items() if isinstance(v, Tensor)}, team)


class GlobalModel:
    """The model that all clients share and the place in the sequence of rounds; what a checkpoint holds."""

    def __init__(
        self, flat: FlatModel, server: ServerSide, path: UpdatePath, optimizer: Optimizer, schedule: LRScheduler | None
    ) -> None:
        self.base = flat.values.clone()
        """The global parameters."""
        self.progress = RoundProgress()
        """The place in the sequence of rounds."""
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.older: dict[int, Tensor] = {}
        """Models that clients are still training from, by version."""
        self._kept: dict[str, Any] = {"server": server, "aggregation": path.aggregation, "optimizer": optimizer}
        if schedule is not None:
            self._kept["schedule"] = schedule

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


class Rounds:
    """The rounds of a run, as one worker computes its share of them."""

    def __init__(self, task: Task, team: Team) -> None:
        self._team = team
        self._strategy = cast("Federated", team.strategy.exchange)
        self._traffic = cast("FederatedWorker", team.exchange)
        train = data_of(task).train
        self._parts = divided(train, task, self._strategy, team.goal.parts, team.seed)
        if not self._parts.sizes.any():
            raise DataError("no client has an example: there is nothing to train on. Look at the task's data().")
        module = task.model().to(team.device)
        self.flat = FlatModel(module)
        optimizer = task.optimizer(self.flat.parameters)
        for group in optimizer.param_groups:
            group["lr"] *= team.goal.rate_factor
        self._schedule = task.schedule(optimizer)
        self._trainer = _trainer(task, train, self.flat, optimizer, team, self._strategy)
        algorithm = self._strategy.algorithm
        self._server = algorithm.server(self.flat, self._strategy.clients)
        self._client = algorithm.client(self.flat, self._server)
        self._path = update_path(team.strategy, self.flat, team.seed)
        self.model = GlobalModel(self.flat, self._server, self._path, optimizer, self._schedule)
        folder, keeps_state = team.folder, algorithm.keeps_state or self._path.keeps_state
        self._states = ClientStates(folder / CLIENTS_FOLDER) if folder and keeps_state else None
        self._log = RoundLog(folder if team.group.membership.leads else None)
        self._plan = self._strategy.plan()
        self._virtual: VirtualRounds | None = None
        self._hopeless = 0

    def begin(self) -> None:
        """Continue after the last round of the model."""
        model = self.model
        sizes, path, seed = self._parts.sizes, self._path, self._team.seed
        start = model.progress
        self._virtual = VirtualRounds(self._plan, sizes, path.model_bytes, path.update_bytes, seed, start=start)

    def next(self) -> None:
        """One round: its clients train, their updates are summed, and the model moves."""
        team, model = self._team, self.model
        virtual = cast("VirtualRounds", self._virtual)
        outcome = next(virtual)
        with team.stopwatch.spent_on("compute"):
            self._train(outcome)
        with team.stopwatch.spent_on("communicate"):
            self._path.aggregation.combine(team.group.sum)
        with team.stopwatch.spent_on("compute"):
            move = self._move(outcome)
            model.go_on(virtual.progress, move)
            if self._schedule is not None:
                self._schedule.step()
        self._count(outcome, accepted=move is not None)

    def scored(self, score: Callable[[], float]) -> float:
        """A score of the global model."""
        with self._team.stopwatch.spent_on("evaluate"):
            self.flat.values.copy_(self.model.base)
            return score()

    def notes(self) -> dict[str, Any]:
        """The result's entry."""
        return {**self.model.counts, "clients": self._strategy.clients, "simulated_seconds": self.model.progress.now}

    def _train(self, outcome: RoundOutcome) -> None:
        """Add this worker's share of the clients' updates."""
        team, model, participants = self._team, self.model, outcome.participants
        path, sizes = self._path, self._parts.sizes
        path.aggregation.begin(Selected(outcome.number, outcome.cohort, sizes[list(outcome.cohort)].tolist()))
        examples = [int(sizes[each.client]) for each in participants]
        for position in shares(participants, examples, team.size)[team.rank]:
            each = participants[position]
            visit = Visit(each.client, outcome.number, self._parts.part(each.client))
            state = None if self._states is None else self._states.read(each.client, outcome.number)
            result = self._result(visit, model.at(each.version), state)
            update = path.filtered(result.update, each.client, outcome.number, state)
            weight = examples[position] * each.factor
            sent = ClientUpdate(each.client, update, result.extra, weight, result.loss, result.examples)
            if path.aggregation.add(sent) and self._states is not None and state is not None:
                # Repeated after a resume, so the states of the last checkpoint's round must stay.
                self._states.write(each.client, outcome.number, state, team.checkpointed)

    def _result(self, visit: Visit, base: Tensor, state: ClientState | None) -> LocalResult:
        if self._strategy.algorithm.whole_gradient:
            return self._trainer.gradient(visit, base)
        return self._trainer.train(visit, base, self._client, state)

    def _move(self, outcome: RoundOutcome) -> Callable[[Tensor], None] | None:
        """How the global model moves by the mean; None if too few updates counted."""
        if self._path.aggregation.updates < self._plan.fewest or outcome.failed:
            return None
        mean, extra = self._path.aggregation.mean()
        whole = self._strategy.algorithm.whole_gradient

        def move(base: Tensor) -> None:
            if whole:
                self._trainer.step(base, mean)
            else:
                self._server.apply(base, mean, extra)

        return move

    def _count(self, outcome: RoundOutcome, accepted: bool) -> None:
        team, counts, sums = self._team, self.model.counts, self._path.aggregation
        refused = len(outcome.participants) - sums.updates
        known = {"updates": sums.updates, "late": len(outcome.late), "dropped": len(outcome.dropped), "rounds": 1}
        traffic = {"bytes_down": outcome.bytes_down, "bytes_up": outcome.bytes_up}
        for name, count in {**known, **traffic, "refused": refused, "failed_rounds": int(not accepted)}.items():
            counts[name] += count
        team.ledger.steps += 1
        team.ledger.samples += sums.examples
        if sums.updates:
            team.reports.last_loss = sums.loss
        if team.group.membership.leads:
            self._traffic.count(outcome.bytes_down + outcome.bytes_up)
        self._log.write(outcome, sums.updates, refused)
        self._hopeless = self._hopeless + 1 if refused and not sums.updates else 0
        if self._hopeless == HOPELESS:
            raise NonFiniteError(
                f"in the last {HOPELESS} rounds every client's update had NaN or numbers too large to average. The "
                f"model is that of round {outcome.number - HOPELESS}. A lower learning rate often helps."
            )


def shares(participants: Sequence[Participant], sizes: Sequence[int], workers: int) -> list[list[int]]:
    """Positions of the participants that each worker trains: the largest first, each to the least loaded."""
    loads = [(0, worker) for worker in range(workers)]
    parts: list[list[int]] = [[] for _ in range(workers)]
    for position in sorted(range(len(participants)), key=lambda i: (-sizes[i], i)):
        load, worker = heapq.heappop(loads)
        parts[worker].append(position)
        heapq.heappush(loads, (load + max(1, sizes[position]), worker))
    return [sorted(part) for part in parts]


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
            return self._score(self.data)
        bounds = [count * i // chunks for i in range(chunks + 1)]
        own = [0.0] * chunks
        for chunk in range(self.team.rank, chunks, self.team.size):
            own[chunk] = self._score(Subset(self.data, range(bounds[chunk], bounds[chunk + 1])))
        scores = self.team.group.gather(own, "a score").sum(dim=0).tolist()
        sizes = [stop - start for start, stop in pairwise(bounds)]
        return sum(score * size for score, size in zip(scores, sizes, strict=True)) / count

    def _score(self, data: Dataset[Any]) -> float:
        batches = loader_over(data, self.task.evaluate_batch, self.task.collate, shuffle=False)
        with torch.no_grad():
            self.module.eval()
            return float(self.task.score(self.module, (on_device(batch, self.team.device) for batch in batches)))


def _trainer(
    task: Task, train: Dataset[Any], flat: FlatModel, optimizer: Optimizer, team: Team, strategy: Federated
) -> LocalTrainer:
    name = type(task).__name__

    def loss(batch: Any) -> Tensor:
        return check_loss(task.loss(flat.module, on_device(batch, team.device)), name)

    batch = None if strategy.batch == "full" else strategy.batch
    return LocalTrainer(flat, optimizer, loss, examples_of(train, task.collate), team.seed, strategy.epochs, batch)
