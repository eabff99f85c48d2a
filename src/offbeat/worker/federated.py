"""A worker under `federated`: the clients of a round, one after the other, in one model, and one exchange a round.

Which clients take part follows from the seed, so workers need no message to agree. Each trains its share of them, and
updates are summed in fixed point: the result has the same bits with any number of workers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from msgspec import structs
from torch import Tensor

from offbeat.errors import DataError, NonFiniteError
from offbeat.protocols.federated.client_parts import held_out
from offbeat.protocols.federated.plan import round_failure
from offbeat.runtime.federated.aggregation import ClientUpdate, Selected
from offbeat.runtime.federated.client_state import ClientStates
from offbeat.runtime.federated.local_training import Visit, examples_of
from offbeat.runtime.federated.poison import Attackers
from offbeat.runtime.federated.round_log import RoundLog
from offbeat.simulate.federated import Participant, RoundOutcome, VirtualRounds
from offbeat.strategies.federated.strategy import Federated, FederatedWorker
from offbeat.task import AnyTask, Data, Task
from offbeat.team.team import Team
from offbeat.worker.client_data import classes_of, divided
from offbeat.worker.federated_learner import GradientLearner, Learner
from offbeat.worker.federated_personal import OwnExamples, PersonalModels
from offbeat.worker.federated_statistics import StatisticsLearner
from offbeat.worker.model_file import write_model
from offbeat.worker.task_data import data_of

CLIENTS_FOLDER: Final = "clients"
"""The folder, in that of the run, of what clients keep."""
_MOST_AGREED: Final = 16
HOPELESS: Final = 10
"""Rounds in a row in which every update was refused, after which the run ends."""


def federate(task: AnyTask, team: Team) -> None:
    """Learn a task in rounds of simulated clients, until the target or the budget is reached."""
    # One thread each: with several, sums inside an operator depend on their number.
    torch.set_num_threads(1)
    data, every = data_of(task), task.evaluate_every or 1
    rounds = Rounds(task, team, data)
    learner, model = rounds.learner, rounds.learner.model
    team.prepare(model)
    team.group.share(model.base, "the sharing of worker 0's model")
    team.resume()
    rounds.begin()
    validate = learner.scorer(data.validation)
    while team.boundary() and not rounds.exhausted:
        team.begin_step()
        rounds.next()
        if team.step % every == 0 or team.exhausted or rounds.exhausted:
            rounds.account()
            with team.stopwatch.spent_on("evaluate"):
                score = validate()
            team.report(score=score)
    with team.stopwatch.spent_on("evaluate"):
        team.notes["test_score"] = learner.scorer(data.test)()
    strategy = cast("Federated", team.strategy.exchange)
    team.notes["epochs"] = max(1, round(team.step * strategy.fraction * strategy.epochs))
    team.notes["federated"] = rounds.notes()
    if rounds.personal is not None:
        team.notes["federated"]["personal"] = rounds.personal.scored()
    write_model(learner.trained(), team)


class Rounds:
    """The rounds of a run, as one worker computes its share of them."""

    def __init__(self, task: AnyTask, team: Team, data: Data) -> None:
        self._team = team
        self._strategy = cast("Federated", team.strategy.exchange)
        self._traffic = cast("FederatedWorker", team.exchange)
        self._parts = divided(data.train, task, self._strategy, team.goal.parts, team.seed)
        if not self._parts.sizes.any():
            raise DataError("no client has an example: there is nothing to train on. Look at the task's data().")
        held = None
        if self._strategy.personal is not None:
            self._parts, held = held_out(self._parts, self._strategy.personal.held, team.seed)
        disturbances, report = team.goal.disturbances, team.reports.disturbed
        self._attackers = Attackers(disturbances, team.seed, lambda: classes_of(data.train), report)
        examples = self._attackers.examples(examples_of(data.train, task.collate))
        if isinstance(task, Task):
            learner = GradientLearner(task, team, examples)
            self.learner: Learner = learner
            own = None if held is None else OwnExamples(data.train, self._parts, held)
            self.personal = None if own is None else PersonalModels(learner, team, own)
        else:
            self.personal = None
            self.learner = StatisticsLearner(task, team, examples, self._parts)
        self._path = self.learner.path
        folder = team.folder
        self._states = ClientStates(folder / CLIENTS_FOLDER) if folder and self.learner.keeps_state else None
        self._log = RoundLog(folder if team.group.membership.leads else None)
        self._plan = self._strategy.plan()
        self._virtual: VirtualRounds | None = None
        self._hopeless = 0
        self._added: list[int] = []  # Clients of this round whose updates this worker has added.

    def begin(self) -> None:
        """Continue after the last round of the model."""
        sizes, path, seed = self._parts.sizes, self._path, self._team.seed
        path.aggregation.prepare(self._team.goal.steps, self._agreed)
        start = self.learner.model.progress
        self._virtual = VirtualRounds(self._plan, sizes, path.model_bytes, path.update_bytes, seed, start=start)

    def next(self) -> None:
        """One round: its clients train, their updates are summed, and the model moves."""
        team, learner = self._team, self.learner
        virtual = cast("VirtualRounds", self._virtual)
        outcome = next(virtual)
        with team.stopwatch.spent_on("compute"):
            self._train(outcome)
        with team.stopwatch.spent_on("communicate"):
            self._path.aggregation.combine(team.group.sum)
        if not outcome.failed:
            outcome = structs.replace(outcome, failed=self._failure(len(outcome.cohort)))
        if outcome.failed and self._strategy.secure:
            self._forget(outcome.number)
        with team.stopwatch.spent_on("compute"):
            move = self._move(outcome)
            learner.model.go_on(virtual.progress, move)
            learner.round_done()
        self._count(outcome, accepted=move is not None)

    @property
    def exhausted(self) -> str:
        """Why no further round may be made, though the budget of rounds is not spent; empty if one may."""
        return self._path.aggregation.exhausted

    def account(self) -> None:
        """Before a report: bring the figures up to date that it shows."""
        if self._team.group.membership.leads:
            self._traffic.latest = self._path.aggregation.figures()

    def notes(self) -> dict[str, Any]:
        """The result's entry."""
        team, model = self._team, self.learner.model
        early = self.exhausted and not (team.exhausted or team.ledger.reached)
        stopped = {"stopped": self.exhausted} if early else {}
        counts = {**model.counts, "clients": self._strategy.clients, "simulated_seconds": model.progress.now}
        more = self._path.aggregation.notes() if team.group.membership.leads else {}
        return counts | more | stopped

    def _agreed(self, compute: Callable[[], Sequence[float]]) -> Sequence[float]:
        """What worker 0 computes."""
        group, row = self._team.group, torch.zeros(_MOST_AGREED, dtype=torch.float64)
        if group.rank == 0:
            numbers = torch.tensor(compute(), dtype=torch.float64)
            row[0], row[1 : 1 + len(numbers)] = len(numbers), numbers
        group.share(row, "what worker 0 has computed for all")
        return row[1 : 1 + int(row[0])].tolist()

    def _train(self, outcome: RoundOutcome) -> None:
        """Add this worker's share of the clients' updates."""
        team, learner, participants = self._team, self.learner, outcome.participants
        path, sizes = self._path, self._parts.sizes
        path.aggregation.begin(Selected(outcome.number, outcome.cohort, sizes[list(outcome.cohort)].tolist()))
        examples = [int(sizes[each.client]) for each in participants]
        self._added = []
        for position in shares(participants, examples, team.size)[team.rank]:
            each = participants[position]
            # What a client draws follows from its turn, which is a round unless the server is asynchronous.
            visit = Visit(each.client, each.turn or outcome.number, self._parts.part(each.client))
            state = None if self._states is None else self._states.read(each.client, outcome.number)
            base = learner.model.at(each.version)
            with self._attackers.training(each.client, outcome.number):
                result = learner.result(visit, base, state)
            update = path.filtered(result.update, each.client, visit.number, state)
            update = self._attackers.attack(update, each.client, outcome.number)
            weight = examples[position] * each.factor
            sent = ClientUpdate(each.client, update, result.extra, weight, result.loss, result.examples, state)
            if not path.aggregation.add(sent):
                continue
            self._added.append(each.client)
            if self._states is not None and state is not None:
                # Repeated after a resume, so the states of the last checkpoint's round must stay.
                self._states.write(each.client, outcome.number, state, team.memory.written_at)
            if self.personal is not None:
                self.personal.train(visit, base, outcome.number)

    def _forget(self, number: int) -> None:
        """A round has no secure sum: its clients keep, as real ones do, what they had before it."""
        for client in self._added:
            if self._states is not None:
                self._states.forget(client, number)
            if self.personal is not None:
                self.personal.forget(client, number)

    def _failure(self, selected: int) -> str:
        """Why the updates that have come do not move the model, as refused ones do not count; empty if they do."""
        sums = self._path.aggregation
        return sums.failure or ("" if sums.moves_always else round_failure(self._plan, selected, sums.updates))

    def _move(self, outcome: RoundOutcome) -> Callable[[Tensor], None] | None:
        """How the global model moves by the mean; None if too few updates counted."""
        aggregation = self._path.aggregation
        if outcome.failed and not aggregation.moves_always:
            return None
        mean, extra = aggregation.mean()
        return lambda base: self.learner.move(base, mean, extra)

    def _count(self, outcome: RoundOutcome, accepted: bool) -> None:
        team, counts, sums = self._team, self.learner.model.counts, self._path.aggregation
        refused = len(outcome.participants) - sums.updates
        known = {"updates": sums.updates, "late": len(outcome.late), "dropped": len(outcome.dropped), "rounds": 1}
        traffic = {"bytes_down": outcome.bytes_down, "bytes_up": outcome.bytes_up}
        for name, count in {**known, **traffic, "refused": refused, "failed_rounds": int(not accepted)}.items():
            counts[name] += count
        team.ledger.steps += 1
        team.ledger.samples += sums.examples
        if not math.isnan(sums.loss):
            team.reports.last_loss = sums.loss
        if team.group.membership.leads:
            self._traffic.count(outcome.bytes_down + outcome.bytes_up)
            self._traffic.rounds = {**counts, "simulated_seconds": outcome.ended}
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
