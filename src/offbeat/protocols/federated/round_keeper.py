"""The rounds of a federated deployment: whom to ask, which updates count, when a round is over, and what comes next."""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec
from msgspec import Struct, field

from offbeat.protocols.federated.messages import (
    AddUpdate,
    ClientFailure,
    CloseRound,
    DeployedRound,
    Fate,
    Finish,
    Goodbye,
    RoundClosed,
    RoundTask,
    Settled,
    UpdateSent,
)
from offbeat.protocols.federated.patience import REMEMBERED, Patience
from offbeat.protocols.federated.plan import RoundPlan, round_failure
from offbeat.protocols.federated.roster import JoinedClient, Roster
from offbeat.protocols.federated.sampling import cohort
from offbeat.protocols.federated.secure_sums import SecureProgress
from offbeat.protocols.machine import Effects, Event, Name, Payload

TIMER_ROUNDING: Final = 1e-3  # Seconds by which timers are early.
HOPELESS: Final = 10
"""Rounds in a row without an update after which the server gives up."""
COUNTS: Final = ("updates", "late", "dropped", "refused", "failed_rounds", "duplicates", "stale", "rejected_joins")
"""What is counted over the rounds of a deployment."""


class RoundStatus(Struct):
    """Who takes part in a round, and whose update has come."""

    cohort: list[int] = []
    came: list[int] = []  # Clients whose update counts, in the order in which they came.
    dropped: list[int] = []
    refused: list[int] = []
    took: list[float] = []  # Seconds from the round's start to each update, without those of killed servers.
    scores: list[tuple[float, int]] = []  # Of the model that they got, each on so many examples.
    secure: SecureProgress | None = None  # The secure sum of their updates, once it has begun.
    failure: str = ""  # Why there is no secure sum.

    def score(self, message: UpdateSent | Goodbye) -> None:
        """Take in a client's score."""
        if message.score is not None and math.isfinite(message.score) and message.scored > 0:
            self.scores.append((message.score, message.scored))

    @property
    def outstanding(self) -> list[int]:
        """Clients of which nothing has come."""
        over = {*self.came, *self.dropped, *self.refused}
        return [client for client in self.cohort if client not in over]


class FederationState(Struct):
    """Everything that must outlive the server's process."""

    phase: Literal["waiting", "gathering", "summing", "closing", "finishing", "finished"] = "waiting"
    number: int = 0  # The round under way, or the last one.
    version: int = 0  # Of the model.
    members: dict[Name, JoinedClient] = {}
    round: RoundStatus = field(default_factory=RoundStatus)
    accepted: dict[int, int] = {}  # The last round in which each client's update was accepted.
    finished: list[int] = []  # Clients that have the final model.
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    fruitless: int = 0  # Rounds in a row without an update.
    slowest: list[float] = []  # Seconds that the slowest client took, in each of the last rounds.

    @property
    def outstanding(self) -> list[int]:
        """Clients whose update is waited for."""
        return self.round.outstanding if self.phase == "gathering" else []

    def awaits_sum(self, client: int) -> bool:
        """Whether a client has an update that is to be summed securely."""
        return (
            self.phase in ("gathering", "summing")
            and client in self.round.came
            and self.accepted.get(client) != self.number
        )


class RoundTerms(Struct, frozen=True):
    """What is fixed about the rounds of a deployment before the first one."""

    plan: RoundPlan
    rounds: int  # After how many it ends.
    selection: int  # Seed of the selection of clients.
    update_bytes: int
    first: int  # Clients that must be there before the first round.
    score_every: int | None  # Rounds between two scores by clients; None: they do not score.


class RoundKeeper:
    """Keeps the rounds of a deployment going; a part of `RoundServer`, whose state it changes.

    `SummingKeeper` is that of secure sums.
    """

    def __init__(self, terms: RoundTerms, state: FederationState, roster: Roster, model: Payload) -> None:
        self.troubles: list[tuple[Name, ClientFailure]] = []
        """Errors of clients that have not been shown yet; the driver empties it."""
        self.missing = ""
        """What the next round waits for, in words; empty if a round is under way."""
        self._terms, self._plan, self._model = terms, terms.plan, model
        self._state, self._roster = state, roster
        self._asked: dict[int, float] = {}
        self._started = 0.0
        self._ended = 0.0
        self._arrived: dict[int, float] = {}
        self._lost: dict[int, float] = {}
        self._whole = False  # Whether this process has seen the whole round.

    def resume(self, effects: Effects, now: float) -> None:
        """Go on where the state says."""
        state, self._ended = self._state, now
        self._started = now - max(state.round.took, default=0.0)
        if state.phase == "gathering":
            self._wait(effects, now)
        elif state.phase == "summing":
            self._sum(effects, now)
        elif state.phase == "closing":
            self._conclude(effects)
        elif state.phase == "finishing":
            self.finish(effects, now)
        else:
            self.next(effects, now)

    def next(self, effects: Effects, now: float) -> None:
        """Begin the next round, if nothing is under way and enough clients are there."""
        state = self._state
        if state.phase != "waiting":
            return
        here = self._roster.present(now)
        need = self._terms.first if state.number == 0 else self._plan.fewest
        stuck = sum(member.client in self._roster.stuck for member in here)
        able = sum(bool(member.examples) and member.client not in self._roster.stuck for member in here)
        if len(here) < need or able < self._plan.fewest:
            self.missing = f"{len(here):,} of {need:,} clients are there, {able:,} with examples"
            self.missing += f", {stuck:,} still at work for an earlier round" * bool(stuck)
            effects.timer(self._plan.beat, "look")
            return
        self.missing = ""
        state.number += 1
        state.phase = "gathering"
        chosen: list[int] = cohort(self._plan, self._roster.sizes(now), self._terms.selection, state.number).tolist()
        state.round = RoundStatus(chosen)
        self._started, self._whole = now, True
        self._arrived, self._lost = {}, {}
        for client in chosen:
            self._roster.hear(client, now)
            self._asked.pop(client, None)
            self.ask(effects, now, client)
        self._wait(effects, now)

    def _wait(self, effects: Effects, now: float) -> None:
        """Set the timers of a round."""
        for client in self._state.outstanding:
            effects.timer(self._roster.patience, ("silent", client))
        if self._plan.deadline is not None:
            effects.timer(self._plan.deadline, "deadline")
        self._check(effects, now)

    @property
    def _limit(self) -> float:
        """Seconds after which this round closes; infinite: it waits for everybody that is there."""
        plan, state = self._plan, self._state
        if plan.patience is None or (plan.deadline is not None and state.phase == "gathering"):
            return math.inf
        took = state.round.took if state.phase == "gathering" else []
        patience = Patience(plan.patience, self._roster.patience)
        return patience.wait(state.slowest, took, len(state.round.cohort), state.fruitless)

    def lose_patience(self, effects: Effects, now: float) -> None:
        """Close the round, or end, if those who are still at work have taken too long."""
        state = self._state
        if now - self._started < self._limit - TIMER_ROUNDING:
            return
        if state.phase == "gathering":
            self._leave_behind(state.outstanding, now)
            self.close(effects, now)
        elif state.phase == "finishing":
            self._leave_behind(self._without_final(now), now)
            self.finish(effects, now)

    def _leave_behind(self, clients: list[int], now: float) -> None:
        """These give signs of life, and are not waited for any more."""
        for client in clients:
            self._roster.stuck.add(client)
            words = (
                f"still at work after {now - self._started:.3g} s, {self._plan.patience or 0:g} times as long as the "
                f"slowest client so far took: not waited for any more (a deadline or --patience changes that)"
            )
            self.troubles.append((self._roster.name_of(client), ClientFailure(self._state.number, words, "")))

    def ask(self, effects: Effects, now: float, client: int) -> None:
        """Send a client its task, or the final model, unless it was sent just now."""
        if now - self._asked.get(client, -math.inf) < self._plan.beat:
            return
        self._asked[client] = now
        state, every, to = self._state, self._terms.score_every, self._roster.name_of(client)
        if state.phase == "finishing":
            effects.send(to, Finish(state.version, every is not None), self._model)
        else:
            score = every is not None and state.number > 1 and (state.number - 1) % every == 0
            accepted = state.accepted.get(client, 0)
            effects.send(to, RoundTask(state.number, state.version, score, accepted), self._model)

    def update(self, effects: Effects, now: float, client: int, update: UpdateSent, payload: Payload) -> None:
        """An update has come: add it, or refuse it."""
        state, to = self._state, self._roster.name_of(client)
        if update.number == state.number and client in state.outstanding:
            self._take(effects, now, client, update, payload)
        elif update.number == state.number and state.awaits_sum(client):
            state.counts["duplicates"] += 1
        elif state.accepted.get(client) == update.number:
            state.counts["duplicates"] += 1
            effects.send(to, Settled(update.number, "accepted"))
        else:
            state.counts["stale"] += 1
            effects.send(to, Settled(update.number, "late"))

    def _take(self, effects: Effects, now: float, client: int, update: UpdateSent, payload: Payload) -> None:
        """An update that is waited for: have it added, or refuse it."""
        number, due = update.number, self._terms.update_bytes
        if not payload.nbytes:  # What it has cannot be compressed.
            self.refuse(effects, now, client, "it has NaN, or numbers too large to average")
        elif payload.nbytes == due:
            effects.start(AddUpdate(client, update, payload), ("update", client, number))
            self._state.round.score(update)
        else:
            why = f"it has {payload.nbytes:,} bytes, and an update of this model has {due:,}"
            self.refuse(effects, now, client, why)

    def added(self, effects: Effects, now: float, client: int, number: int, why: str) -> None:
        """An update was added to the round's, or could not be."""
        if number != self._state.number or client not in self._state.outstanding:
            return
        if why:
            self.refuse(effects, now, client, why)
            return
        self._state.round.came.append(client)
        self._arrives(client, now)
        self._state.accepted[client] = number
        self._state.counts["updates"] += 1
        self._settle(effects, client, "accepted")
        self._check(effects, now)

    def _arrives(self, client: int, now: float) -> None:
        """Remember how long a client took."""
        self._arrived[client] = now
        self._state.round.took.append(now - self._started)

    def refuse(self, effects: Effects, now: float, client: int, why: str) -> None:
        """An update cannot be used: nothing more is expected of the client in this round."""
        self._state.round.refused.append(client)
        self._state.counts["refused"] += 1
        self.troubles.append(
            (self._roster.name_of(client), ClientFailure(self._state.number, f"update refused: {why}", ""))
        )
        self._settle(effects, client, "refused", why)
        self._check(effects, now)

    def drop(self, effects: Effects, now: float, client: int) -> None:
        """A client is gone: nothing more is expected of it in this round."""
        self._state.round.dropped.append(client)
        self._lost[client] = now
        self._state.counts["dropped"] += 1
        self._check(effects, now)

    def _check(self, effects: Effects, now: float) -> None:
        """Close the round if it has all it needs, or nobody is waited for."""
        state, status = self._state, self._state.round
        goal = len(status.cohort) if self._plan.poisson else min(self._plan.needed, len(status.cohort))
        if state.phase == "gathering" and (len(status.came) >= goal or not status.outstanding):
            self.close(effects, now)
        elif state.phase == "gathering" and self._limit < math.inf:
            effects.timer(max(0.0, self._started + self._limit - now), "patience")

    def close(self, effects: Effects, now: float) -> None:
        """The round is over."""
        state, late = self._state, self._state.outstanding
        self._ended = now  # What follows takes none of the clients' time but that of a secure sum.
        state.phase = "closing"
        if self._whole and state.round.took:
            state.slowest = [*state.slowest, max(state.round.took)][-REMEMBERED:]
        state.counts["late"] += len(late)
        for client in late:
            self._settle(effects, client, "late")
        self._over(effects, now)

    def _over(self, effects: Effects, now: float) -> None:  # noqa: ARG002
        """All that counts in this round has come."""
        self._conclude(effects)

    def on_sum(self, effects: Effects, now: float, event: Event) -> None:
        """An event of a secure sum, which rounds of plain updates do not have."""

    def lose(self, effects: Effects, now: float, client: int) -> None:
        """A client whose update is to be summed securely is gone, or has forgotten it."""

    def _sum(self, effects: Effects, now: float) -> None:
        """Begin a secure sum, or go on with it."""

    def _conclude(self, effects: Effects) -> None:
        """Have the model moved."""
        status = self._state.round
        total = b"" if status.secure is None or status.failure else status.secure.server.total
        outcome = msgspec.structs.replace(
            outcome_of(self._state, self._plan, self._started, self._ended),
            arrived=tuple(self._arrived.items()),
            lost=tuple(self._lost.items()),
        )
        effects.start(CloseRound(outcome, total), "closed")

    def closed(self, effects: Effects, now: float, result: RoundClosed) -> None:
        """The model has moved, or not: go on."""
        state = self._state
        self._model = result.model
        state.version += result.moved
        state.phase = "waiting"
        useful = (state.round.came and not state.round.failure) or not state.round.cohort
        state.fruitless = 0 if useful else state.fruitless + 1
        state.counts["failed_rounds"] += not result.moved
        if result.last or state.number >= self._terms.rounds or state.fruitless >= HOPELESS:
            state.phase = "finishing"
            state.round.scores = []
            self._started = now
            self._asked.clear()
            self.finish(effects, now)
        else:
            self.next(effects, now)

    def finish(self, effects: Effects, now: float) -> None:
        """Hand the final model to all that are there, and end when they have it."""
        missing = self._without_final(now)
        if not missing:
            self._state.phase = "finished"
        elif self._limit < math.inf:
            effects.timer(max(0.0, self._started + self._limit - now), "patience")
        for client in missing:
            if client not in self._asked:
                effects.timer(self._roster.patience, ("silent", client))
                self.ask(effects, now, client)

    def _without_final(self, now: float) -> list[int]:
        """Clients that are there, and have not confirmed the final model."""
        over = {*self._state.finished, *self._roster.stuck}
        return [member.client for member in self._roster.present(now) if member.client not in over]

    def _settle(self, effects: Effects, client: int, fate: Fate, why: str = "") -> None:
        effects.send(self._roster.name_of(client), Settled(self._state.number, fate, why))


def outcome_of(state: FederationState, plan: RoundPlan, started: float, ended: float) -> DeployedRound:
    """What came of a round that is over."""
    status = state.round
    failed = status.failure or round_failure(plan, len(status.cohort), len(status.came))
    return DeployedRound(
        number=state.number,
        version=state.version,
        cohort=tuple(status.cohort),
        participants=() if failed else tuple(status.came),
        late=tuple(status.outstanding),
        dropped=tuple(status.dropped),
        refused=tuple(status.refused),
        started=started,
        ended=ended,
        failed=failed,
        scores=tuple(status.scores),
    )
