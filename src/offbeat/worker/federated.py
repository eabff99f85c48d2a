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
from offbeat.runtime.federated.client_state import ClientStates
from offbeat.runtime.federated.exact_sum import ExactSum
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.local_training import LocalTrainer, Visit, check_loss, examples_of
from offbeat.runtime.federated.round_log import RoundLog
from offbeat.simulate.federated import Participant, RoundOutcome, RoundProgress, VirtualRounds
from offbeat.strategies.federated.algorithms import ServerSide
from offbeat.strategies.federated.strategy import Federated, FederatedWorker
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

    def __init__(self, flat: FlatModel, server: ServerSide, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
        self.base = flat.values.clone()
        """The global parameters."""
        self.progress = RoundProgress()
        """The place in the sequence of rounds."""
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.older: dict[int, Tensor] = {}
        """Models that clients are still training from, by version."""
        self._kept: dict[str, Any] = {"server": server, "optimizer": optimizer}
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
        self.model = GlobalModel(self.flat, self._server, optimizer, self._schedule)
        folder = team.folder
        self._states = ClientStates(folder / CLIENTS_FOLDER) if folder and algorithm.keeps_state else None
        self._log = RoundLog(folder if team.group.membership.leads else None)
        self._plan = self._strategy.plan()
        self._virtual: VirtualRounds | None = None
        self._hopeless = 0

    def begin(self) -> None:
        """Continue after the last round of the model."""
        model = self.model
        nbytes = self.flat.nbytes * (2 if self._strategy.algorithm.sends_more else 1)
        sizes, seed = self._parts.sizes, self._team.seed
        self._virtual = VirtualRounds(self._plan, sizes, nbytes, nbytes, seed, start=model.progress)

    def next(self) -> None:
        """One round: its clients train, their updates are summed, and the model moves."""
        team, model = self._team, self.model
        virtual = cast("VirtualRounds", self._virtual)
        outcome = next(virtual)
        with team.stopwatch.spent_on("compute"):
            sums = self._train(outcome)
        with team.stopwatch.spent_on("communicate"):
            team.group.sum(sums.integers, "the sum of updates")
        with team.stopwatch.spent_on("compute"):
            move = self._move(outcome, sums)
            model.go_on(virtual.progress, move)
            if self._schedule is not None:
                self._schedule.step()
        self._count(outcome, move is not None, sums)

    def scored(self, score: Callable[[], float]) -> float:
        """A score of the global model."""
        with self._team.stopwatch.spent_on("evaluate"):
            self.flat.values.copy_(self.model.base)
            return score()

    def notes(self) -> dict[str, Any]:
        """The result's entry."""
        return {**self.model.counts, "clients": self._strategy.clients, "simulated_seconds": self.model.progress.now}

    def _train(self, outcome: RoundOutcome) -> RoundSums:
        """The sums over this worker's share of the clients."""
        team, model, participants = self._team, self.model, outcome.participants
        parts, algorithm = self._parts, self._strategy.algorithm
        sizes = [int(parts.sizes[each.client]) for each in participants]
        whole = sum(size * each.factor for size, each in zip(sizes, participants, strict=True))
        sums = RoundSums(self.flat, whole, len(participants) if algorithm.sends_more else 0)
        for position in shares(participants, sizes, team.size)[team.rank]:
            each = participants[position]
            visit = Visit(each.client, outcome.number, parts.part(each.client))
            state = None if self._states is None else self._states.read(each.client, outcome.number)
            if algorithm.whole_gradient:
                result = self._trainer.gradient(visit, model.at(each.version))
            else:
                result = self._trainer.train(visit, model.at(each.version), self._client, state)
            added = sums.add(result.update, result.extra, result.loss, sizes[position], each.factor, result.examples)
            if added and self._states is not None and state is not None:
                # Repeated after a resume, so the states of the last checkpoint's round must stay.
                self._states.write(each.client, outcome.number, state, team.checkpointed)
        return sums

    def _move(self, outcome: RoundOutcome, sums: RoundSums) -> Callable[[Tensor], None] | None:
        """How the global model moves by the mean; None if too few updates counted."""
        if sums.updates < self._plan.fewest or outcome.failed:
            return None
        mean, extra = sums.mean(self.flat.values.dtype)
        whole = self._strategy.algorithm.whole_gradient

        def move(base: Tensor) -> None:
            if whole:
                self._trainer.step(base, mean)
            else:
                self._server.apply(base, mean, extra)

        return move

    def _count(self, outcome: RoundOutcome, accepted: bool, sums: RoundSums) -> None:
        team, counts = self._team, self.model.counts
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


class RoundSums:
    """A round's sums, as one row of integers that workers add up."""

    _TAIL: Final = 2  # Weights and losses, in fixed point.
    _WHOLE: Final = 2  # Updates and examples, as they are.

    def __init__(self, flat: FlatModel, whole: float, extras: int) -> None:
        size = flat.values.numel()
        wide = size + (size if extras else 0)
        self.integers = torch.zeros(wide + self._TAIL + self._WHOLE, dtype=torch.int64)
        """What is added up."""
        self._update = ExactSum(self.integers[:size], whole)
        self._extra = ExactSum(self.integers[size:wide], extras) if extras else None
        self._tail = ExactSum(self.integers[wide : wide + self._TAIL], whole)
        self._counts = self.integers[wide + self._TAIL :]

    def add(self, update: Tensor, extra: Tensor | None, loss: float, size: int, factor: float, examples: int) -> bool:
        """Add a client's update by its examples times a factor; False if it cannot be summed."""
        if self._extra is not None and (extra is None or not ExactSum.fits(extra)):
            return False
        if not self._update.add(update, size * factor):
            return False
        if self._extra is not None and extra is not None:
            self._extra.add(extra, 1.0)
        self._tail.add(torch.tensor([1.0, loss if ExactSum.fits(torch.tensor(loss)) else 0.0]), size * factor)
        self._counts += torch.tensor([1, examples])
        return True

    @property
    def updates(self) -> int:
        """Updates that count."""
        return int(self._counts[0])

    @property
    def examples(self) -> int:
        """Examples that these clients went through."""
        return int(self._counts[1])

    @property
    def loss(self) -> float:
        """Mean loss of the clients, by their examples."""
        weight, loss = self._tail.read().tolist()
        return loss / weight

    def mean(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The mean update, and the sum of further vectors."""
        weight = float(self._tail.read()[0])
        mean = self._update.read().div_(weight).to(dtype)
        return mean, None if self._extra is None else self._extra.read().to(dtype)


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
