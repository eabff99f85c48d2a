"""What a federated server does with tensors: adds up updates, moves the model, scores and records rounds."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from offbeat.errors import RunError
from offbeat.federated.newcomers import Newcomers
from offbeat.federated.server_model import server_model
from offbeat.federated.store import ServerStore
from offbeat.protocols.federated.buffered_turns import ClientTurn, staleness_factor
from offbeat.protocols.federated.federation_state import FederationState
from offbeat.protocols.federated.messages import AddUpdate, CloseRound, DeployedRound, Examine, RoundClosed
from offbeat.protocols.federated.secure.plan import SecureEncoding
from offbeat.protocols.federated.secure.recovery import Unmasking
from offbeat.protocols.federated.secure_sums import SecureTerms
from offbeat.protocols.machine import Payload
from offbeat.runtime.federated.aggregation import Aggregation, ClientUpdate, Selected, alone
from offbeat.runtime.federated.exact_sum import ExactSum
from offbeat.runtime.federated.private_secure_mean import PrivateSecureMean
from offbeat.runtime.federated.round_log import RoundLog
from offbeat.runtime.federated.secure_mean import SecureMean
from offbeat.runtime.run.folder import METRICS_FILE, MODEL_FILE, MetricsWriter
from offbeat.runtime.run.metrics import Ledger
from offbeat.simulate.federated import ClientTimes, Participant, RoundOutcome, RoundProgress, participant
from offbeat.strategies._base import Combined
from offbeat.strategies.federated.update_path import rules_of
from offbeat.task import AnyTask, TaskReference
from offbeat.worker.model_file import write_tensors
from offbeat.worker.task_data import data_of

SCORE: Final = "score"


@dataclass(frozen=True)
class RoundRecord:
    """A round as it is shown."""

    outcome: DeployedRound
    loss: float
    score: float | None
    """Of the model after this round if the server scores it; else of the model before, as the clients scored it."""


class ServerWork:
    """The tensors of a server, and the work that its machine starts."""

    def __init__(
        self,
        task: AnyTask,
        reference: TaskReference,
        strategy: Combined,
        seed: int,
        run: Path,
        ledger: Ledger,
        *,
        rounds: int,
        validate: bool,
    ) -> None:
        self.ledger, self.run, self._rounds = ledger, run, rounds
        self.began = time.monotonic()
        self.earlier_seconds = 0.0
        self.shown: Callable[[RoundRecord], None] = lambda _record: None
        """Gets every round that is closed."""
        self._evaluate_every = task.evaluate_every or 1
        self._strategy, self.rules = strategy, rules_of(strategy)
        self.moves = server_model(task, strategy, seed)
        self.model = self.moves.model
        self.store = ServerStore(run)
        self._newcomers = Newcomers(self.moves, reference, self.store)
        self._validation = data_of(task).validation if validate else None
        self._log, self._metrics = RoundLog(run), MetricsWriter(run / METRICS_FILE)
        self._adding: tuple[int, Aggregation] | None = None  # The round whose updates are in the aggregation.

    @property
    def seconds(self) -> float:
        """Seconds of the run, those of earlier processes included."""
        return self.earlier_seconds + time.monotonic() - self.began

    def load(self) -> FederationState | None:
        """Go on where an earlier process was; None if there was none."""
        state = self.store.load()
        self._newcomers.load()
        if state is None:
            self.moves.path.aggregation.prepare(self._rounds)
            self._keep(0)
            return None
        kept = self.store.read_model(_closed_rounds(state))
        self.model.load_state_dict(kept["model"])
        self.ledger.load_state_dict(kept["ledger"])
        self.earlier_seconds = float(kept["seconds"])
        self._metrics.keep_first(self.ledger.reports)
        self.moves.path.aggregation.prepare(self._rounds)
        return state

    def payload(self) -> Payload:
        """What clients get."""
        return self.moves.payload()

    def do(self, work: Any, state: FederationState) -> Any:
        """Do work of the machine."""
        match work:
            case Examine():
                return self._newcomers.examine(work.description)
            case AddUpdate():
                return self._add(work, state)
            case CloseRound():
                return self._close(work, state)
            case Unmasking():
                return work()
            case _:
                raise RunError(f"{type(work).__name__} is not work of a federated server.")

    # A round.

    def _add(self, work: AddUpdate, state: FederationState) -> str:
        """Add an update; returns why it cannot be used, or nothing."""
        number = work.update.number
        try:
            vectors = self.moves.format.unpack(work.payload, work.client, number)
        except RunError as error:
            return str(error)
        if work.update.examples < 0:
            return f"it says that it went through {work.update.examples} examples"
        kept = {"vectors": vectors, "loss": work.update.loss, "examples": work.update.examples}
        if state.buffer is not None:  # How much it counts is known when the buffer is applied, in any order.
            if not all(map(ExactSum.fits, vectors)):
                return "it has NaN, or numbers too large to average"
            self.store.write_update(state.number, work.client, kept)
            return ""
        self._begin(number, state)
        if not self._added(work.client, vectors, work.update.loss, work.update.examples, state):
            return "it has NaN, or numbers too large to average"
        self.store.write_update(number, work.client, kept)
        return ""

    def _begin(self, number: int, state: FederationState) -> None:
        """Begin to add the updates of a round; those that an earlier process accepted come first."""
        current = number, self.moves.path.aggregation
        if self._adding == current:
            return
        self._adding = current
        chosen = state.round.cohort
        sizes = _sizes(state)
        self.moves.path.aggregation.begin(Selected(number, tuple(chosen), [float(sizes[client]) for client in chosen]))
        for client in state.round.came:
            kept = self.store.read_update(number, client)
            self._added(client, kept["vectors"], kept["loss"], kept["examples"], state)

    def _added(
        self,
        client: int,
        vectors: list[Tensor],
        loss: float,
        examples: int,
        state: FederationState,
        factor: float = 1.0,
    ) -> bool:
        extra = vectors[1] if len(vectors) > 1 else None
        weight = _sizes(state)[client] * factor
        return self.moves.path.aggregation.add(ClientUpdate(client, vectors[0], extra, weight, loss, examples))

    def secure_terms(self) -> SecureTerms | None:
        """What secure sums need; None: updates are seen."""
        sums = self.moves.path.aggregation
        if not isinstance(sums, SecureMean):
            return None

        def encoding(clients: Sequence[int], weights: Sequence[float]) -> SecureEncoding:
            sums.begin(Selected(0, clients, weights))
            return sums.encoding

        return SecureTerms(encoding, secrets.token_bytes, sums.two_thirds)

    @property
    def strategy(self) -> Combined:
        """What clients are told: of private sums also how much noise each round has, which they add themselves."""
        sums, privacy = self.moves.path.aggregation, self.rules.privacy
        if privacy is None or not isinstance(sums, PrivateSecureMean):
            return self._strategy
        settled = replace(privacy, epsilon=None, noise=sums.ledger.deviation, budget=privacy.limit)
        return replace(self._strategy, exchange=replace(self.rules, privacy=settled))

    def _combine(self, work: CloseRound, state: FederationState) -> None:
        """Add up the updates, or take their sum."""
        sums, outcome = self.moves.path.aggregation, work.outcome
        if isinstance(sums, SecureMean):
            sizes = _sizes(state)
            sums.begin(Selected(outcome.number, outcome.cohort, [float(sizes[client]) for client in outcome.cohort]))
            if not outcome.failed:
                sums.receive(np.frombuffer(work.total, sums.encoding.dtype), outcome.participants)
        elif state.buffer is not None:
            self._apply_buffer(outcome, state)
        else:
            self._begin(outcome.number, state)
            sums.combine(alone)

    def _apply_buffer(self, outcome: DeployedRound, state: FederationState) -> None:
        """Add up the updates of the buffer: those of older models weigh less."""
        sums, sizes = self.moves.path.aggregation, _sizes(state)
        sums.begin(Selected(outcome.number, outcome.cohort, [float(sizes[client]) for client in outcome.cohort]))
        for turn in outcome.turns:
            kept = self.store.read_update(outcome.number, turn.client)
            self._added(turn.client, kept["vectors"], kept["loss"], kept["examples"], state, _factor(turn, outcome))
        sums.combine(alone)

    def _close(self, work: CloseRound, state: FederationState) -> RoundClosed:
        sums, outcome = self.moves.path.aggregation, work.outcome
        self._combine(work, state)
        moved = sums.moves_always or not outcome.failed
        if moved:
            self.moves.move(*sums.mean(), examples=sum(_sizes(state).values()), number=outcome.number)
        self.moves.round_done()
        progress = RoundProgress(outcome.number, outcome.version + moved, self.seconds)
        self.model.go_on(progress, None)
        self.ledger.steps, self.ledger.samples = outcome.number, self.ledger.samples + sums.examples
        loss = sums.loss if sums.updates else math.nan
        score = self._score(outcome)
        reached = self._report(score, loss, outcome.number - (self._validation is None))
        self._keep(outcome.number)
        self._record(outcome, sums.updates)
        self.shown(RoundRecord(outcome, loss, score))
        return RoundClosed(moved, self.payload(), last=reached or bool(sums.exhausted))

    def final(self, scores: Iterable[tuple[float, int]]) -> None:
        """The last round is over: judge the final model by the clients' scores, and write it as a file."""
        score = _mean(scores)
        if self._validation is None and score is not None:
            self._report(score, math.nan, self.ledger.steps)
        write_tensors(self.moves.trained(), self.run / MODEL_FILE)

    def _score(self, outcome: DeployedRound) -> float | None:
        if self._validation is None:
            return _mean(outcome.scores)
        if outcome.number % self._evaluate_every:
            return None
        return self.moves.score(self._validation)

    def _report(self, score: float | None, loss: float, step: int) -> bool:
        """Judge the score of the model after some round, and write it down; returns whether the target is reached."""
        if score is None:
            return False
        reached = self.ledger.judge({SCORE: score}, self.seconds)
        line: dict[str, Any] = {"step": step, "samples": self.ledger.samples, "seconds": self.seconds}
        line |= {SCORE: score, **self.moves.path.aggregation.figures()}
        self._metrics.append(line if math.isnan(loss) else line | {"loss": loss})
        return reached

    def _keep(self, number: int) -> None:
        state = {"model": self.model.state_dict(), "ledger": self.ledger.state_dict(), "seconds": self.seconds}
        self.store.write_model(number, state)

    def _record(self, outcome: DeployedRound, updates: int) -> None:
        """Write the round down as a simulated one is."""
        never, arrived, lost, asked = math.inf, dict(outcome.arrived), dict(outcome.lost), dict(outcome.asked)
        times = tuple(
            ClientTimes(
                client,
                asked.get(client, outcome.started),
                never,
                never,
                arrived.get(client, never),
                lost.get(client, never),
            )
            for client in outcome.cohort
        )
        came = (Participant(client, outcome.version, 1.0) for client in outcome.participants)
        self._log.write(
            RoundOutcome(
                number=outcome.number,
                version=self.model.progress.version,
                cohort=outcome.cohort,
                participants=tuple(participant(turn, outcome.version) for turn in outcome.turns) or tuple(came),
                late=outcome.late,
                dropped=outcome.dropped,
                started=outcome.started,
                ended=outcome.ended,
                times=times,
                failed=outcome.failed,
                bytes_down=len(outcome.cohort) * self.moves.path.model_bytes,
                bytes_up=updates * self.moves.path.update_bytes,
                deadline=self.rules.deadline,
            ),
            updates,
            len(outcome.refused),
        )


def _closed_rounds(state: FederationState) -> int:
    """How many rounds are closed."""
    return state.number - (state.phase in ("gathering", "summing", "closing"))


def _factor(turn: ClientTurn, outcome: DeployedRound) -> float:
    return staleness_factor(outcome.version - turn.version)


def _sizes(state: FederationState) -> Mapping[int, int]:
    return {member.client: member.examples or 0 for member in state.members.values()}


def _mean(scores: Iterable[tuple[float, int]]) -> float | None:
    """The mean of clients' scores by examples; None without any."""
    known = list(scores)
    total = sum(count for _, count in known)
    return sum(score * count for score, count in known) / total if total else None
