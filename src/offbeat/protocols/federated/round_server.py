"""The server of a federated deployment as a machine: who takes part, whose update counts, when a round is over.

Its whole state is one plain value, which the driver saves before the effects of an event are performed. So a server
that was killed goes on with the same round, and an update that was acknowledged is never lost or counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct, field

from offbeat.errors import UsageError
from offbeat.protocols.federated.messages import (
    AddUpdate,
    Again,
    Beat,
    CloseRound,
    DeployedRound,
    Examine,
    Failed,
    Farewell,
    Fate,
    Finish,
    Goodbye,
    Join,
    Leave,
    Noted,
    Refused,
    RoundClosed,
    RoundTask,
    Settled,
    Unknown,
    Update,
    Welcome,
    patience_for,
)
from offbeat.protocols.federated.plan import RoundPlan, round_failure
from offbeat.protocols.federated.roster import Member, Roster
from offbeat.protocols.federated.sampling import cohort
from offbeat.protocols.machine import Done, Effect, Effects, Event, Name, Payload, Received, Timer

HOPELESS: Final = 10
"""Rounds in a row without an update after which the server gives up."""
COUNTS: Final = ("updates", "late", "dropped", "refused", "failed_rounds", "duplicates", "stale", "rejected_joins")
"""What is counted over the rounds of a deployment."""


class RoundStatus(Struct):
    """Who takes part in a round, and what came of it so far."""

    cohort: list[int] = []
    came: list[int] = []  # Clients whose update counts, in the order in which they came.
    dropped: list[int] = []
    refused: list[int] = []
    scores: list[tuple[float, int]] = []  # Of the model that they got, each on so many examples.

    def score(self, message: Update | Goodbye) -> None:
        """Take in a client's score."""
        if message.score is not None and math.isfinite(message.score) and message.scored > 0:
            self.scores.append((message.score, message.scored))

    @property
    def outstanding(self) -> list[int]:
        """Clients of which nothing has come."""
        over = {*self.came, *self.dropped, *self.refused}
        return [client for client in self.cohort if client not in over]


class ServerState(Struct):
    """Everything that must outlive the server's process."""

    phase: Literal["waiting", "gathering", "closing", "finishing", "finished"] = "waiting"
    number: int = 0  # The round under way, or the last one.
    version: int = 0  # Of the model.
    members: dict[Name, Member] = {}
    round: RoundStatus = field(default_factory=RoundStatus)
    accepted: dict[int, int] = {}  # The last round in which each client's update was accepted.
    finished: list[int] = []  # Clients that have the final model.
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    fruitless: int = 0  # Rounds in a row without an update.

    @property
    def outstanding(self) -> list[int]:
        """Clients whose update is waited for."""
        return self.round.outstanding if self.phase == "gathering" else []


class RoundServer:
    """Runs rounds with the clients that are there.

    Args:
        name: Of this participant.
        plan: How rounds go. Clients are numbered from 0, below `plan.clients`.
        seed: Of clients' random numbers.
        rounds: After how many it ends.
        model: What clients get first.
        update_bytes: Size of an update.
        selection: Seed of the selection of clients, if clients must not know it; None: the same.
        strategy: What clients are told to do.
        federation: Names this federation among all that a client takes part in.
        enrolled: The names of the clients that may join, by number; None: anybody may, up to `plan.clients`.
        first: Clients that must be there before the first round; None: all.
        score_every: Rounds between two scores by clients; None: they do not score.
        state: That of an earlier process, which this one replaces.

    """

    def __init__(
        self,
        name: Name,
        plan: RoundPlan,
        seed: int,
        rounds: int,
        model: Payload,
        update_bytes: int,
        *,
        selection: int | None = None,
        strategy: str = "",
        federation: str = "",
        enrolled: Sequence[Name] | None = None,
        first: int | None = None,
        score_every: int | None = None,
        state: ServerState | None = None,
    ) -> None:
        if plan.buffer is not None:
            raise UsageError(
                "fedbuff has no rounds, and deployed clients work in rounds. Use another algorithm, or simulate."
            )
        self.name, self.plan, self.rounds, self.state = name, plan, rounds, state or ServerState()
        patience = patience_for(plan.silence, max(model.nbytes, update_bytes))
        self.roster = Roster(self.state.members, plan.clients, enrolled, patience)
        self.troubles: list[tuple[Name, Failed]] = []
        """Errors of clients that have not been shown yet; the driver empties it."""
        self.missing = ""
        """What the next round waits for, in words; empty if a round is under way."""
        self._seed, self._model, self._update_bytes = seed, model, update_bytes
        self._selection = seed if selection is None else selection
        self._strategy, self._federation = strategy, federation
        self._first = plan.clients if first is None else first
        self._score_every = score_every
        self._asked: dict[int, float] = {}
        self._started = 0.0

    def begin(self, now: float) -> Sequence[Effect]:
        """Go on where the state says."""
        effects, state = Effects(), self.state
        self.roster.hear_all(now)
        self._started = now
        if state.phase == "gathering":
            self._wait(effects, now)
        elif state.phase == "closing":
            effects.start(CloseRound(outcome_of(state, self.plan, self._started, now)), "closed")
        elif state.phase == "finishing":
            self._finish(effects, now)
        else:
            self._next(effects, now)
        return effects.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle an event."""
        effects = Effects()
        match event:
            case Received(sender, message, payload):
                self._received(effects, now, sender, message, payload)
            case Timer("deadline") if self.state.phase == "gathering":
                self._close(effects, now)
            case Timer(("silent", client)) if self.state.phase == "finishing":
                self._finish(effects, now)
            case Timer(("silent", client)) if client in self.state.outstanding:
                self._drop(effects, now, client)
            case Timer("look"):
                self._next(effects, now)
            case Done("closed", RoundClosed() as result) if self.state.phase == "closing":
                self._closed(effects, now, result)
            case Done(("join", sender, join), why):
                self._examined(effects, now, sender, join, why)
            case Done(("update", client, number), why):
                self._added(effects, now, client, number, why)
            case _:
                pass
        return effects.done

    def reject(self, name: Name, why: str, now: float) -> Sequence[Effect]:
        """A client has sent what is no message at all: its update, if there is one, is waited for no longer."""
        effects, member = Effects(), self.state.members.get(name)
        if member is not None and member.client in self.state.outstanding:
            self._refuse(effects, now, member.client, why)
        return effects.done

    def _received(self, effects: Effects, now: float, sender: Name, message: Struct, payload: Payload) -> None:
        if isinstance(message, Join):
            why = "the last round is over" if self.state.phase == "finished" else self.roster.why_not(sender, message)
            if why:
                self._examined(effects, now, sender, message, why)
            else:
                effects.start(Examine(sender, message, payload), ("join", sender, message))
            return
        member = self.state.members.get(sender)
        if member is None or (member.gone and isinstance(message, Beat | Update)):
            effects.send(sender, Unknown())
            return
        if isinstance(message, Leave | Goodbye | Failed):
            self._ends(effects, now, sender, member, message)
            return
        self.roster.hear(member.client, now)
        if member.client in self.state.outstanding or self.state.phase == "finishing":
            effects.timer(self.roster.patience, ("silent", member.client))
        if isinstance(message, Beat):
            self._answer(effects, now, sender, member.client, message)
        elif isinstance(message, Update):
            self._update(effects, now, member.client, message, payload)
        self._next(effects, now)

    def _examined(self, effects: Effects, now: float, sender: Name, join: Join, why: str) -> None:
        """Let a client join, or say why not."""
        state = self.state
        if why:
            state.counts["rejected_joins"] += 1
            self.troubles.append((sender, Failed(0, f"{join.label} may not join: {why}", "")))
            effects.send(sender, Refused(why))
            return
        client = self.roster.admit(sender, join, now)
        if client in state.finished:
            state.finished.remove(client)
        effects.send(sender, Welcome(client, self.plan.beat, self._seed, self._strategy, self._federation))
        self._next(effects, now)

    def _answer(self, effects: Effects, now: float, sender: Name, client: int, beat: Beat) -> None:
        """From what a client is doing follows what got lost."""
        state, member = self.state, self.state.members[sender]
        effects.send(sender, Noted())
        if beat.activity == "preparing":
            return
        if beat.examples >= 0 and client not in state.round.cohort:
            member.examples = beat.examples
        if client in state.outstanding:
            if beat.number == state.number and beat.activity == "sent":
                effects.send(sender, Again(state.number))
            elif beat.number != state.number or beat.activity == "idle":
                self._ask(effects, now, client)
        elif beat.activity != "idle":
            accepted = state.accepted.get(client) == beat.number
            effects.send(sender, Settled(beat.number, "accepted" if accepted else "late"))
        elif state.phase == "finishing" and client not in state.finished:
            self._ask(effects, now, client)

    def _ends(
        self, effects: Effects, now: float, sender: Name, member: Member, message: Leave | Goodbye | Failed
    ) -> None:
        """A client ends, for whatever reason."""
        client, state = member.client, self.state
        if isinstance(message, Failed):
            if not member.gone:
                self.troubles.append((sender, message))
            effects.send(sender, Settled(message.number, "failed"))
        else:
            effects.send(sender, Farewell())
        if isinstance(message, Goodbye) and client not in state.finished and state.phase == "finishing":
            state.finished.append(client)
            state.round.score(message)
        member.gone = True
        if client in state.outstanding:
            self._drop(effects, now, client)
        elif state.phase == "finishing":
            self._finish(effects, now)

    def _next(self, effects: Effects, now: float) -> None:
        """Begin the next round, if nothing is under way and enough clients are there."""
        state = self.state
        if state.phase != "waiting":
            return
        here = self.roster.present(now)
        need = self._first if state.number == 0 else self.plan.fewest
        able = sum(bool(member.examples) for member in here)
        if len(here) < need or able < self.plan.fewest:
            self.missing = f"{len(here):,} of {need:,} clients are there, {able:,} with examples"
            effects.timer(self.plan.beat, "look")
            return
        self.missing = ""
        state.number += 1
        state.phase = "gathering"
        chosen: list[int] = cohort(self.plan, self.roster.sizes(now), self._selection, state.number).tolist()
        state.round = RoundStatus(chosen)
        self._started = now
        for client in chosen:
            self.roster.hear(client, now)
            self._asked.pop(client, None)
            self._ask(effects, now, client)
        self._wait(effects, now)

    def _wait(self, effects: Effects, now: float) -> None:
        """Set the timers of a round."""
        for client in self.state.outstanding:
            effects.timer(self.roster.patience, ("silent", client))
        if self.plan.deadline is not None:
            effects.timer(self.plan.deadline, "deadline")
        self._check(effects, now)

    def _ask(self, effects: Effects, now: float, client: int) -> None:
        """Send a client its task, or the final model, unless it was sent just now."""
        if now - self._asked.get(client, -math.inf) < self.plan.beat:
            return
        self._asked[client] = now
        state, every, to = self.state, self._score_every, self.roster.name_of(client)
        if state.phase == "finishing":
            effects.send(to, Finish(state.version, every is not None), self._model)
        else:
            score = every is not None and state.number > 1 and (state.number - 1) % every == 0
            accepted = state.accepted.get(client, 0)
            effects.send(to, RoundTask(state.number, state.version, score, accepted), self._model)

    def _update(self, effects: Effects, now: float, client: int, update: Update, payload: Payload) -> None:
        state, to = self.state, self.roster.name_of(client)
        if update.number == state.number and client in state.outstanding:
            if payload.nbytes == self._update_bytes:
                effects.start(AddUpdate(client, update, payload), ("update", client, update.number))
                state.round.score(update)
            else:
                why = f"it has {payload.nbytes:,} bytes, and an update of this model has {self._update_bytes:,}"
                self._refuse(effects, now, client, why)
        elif state.accepted.get(client) == update.number:
            state.counts["duplicates"] += 1
            effects.send(to, Settled(update.number, "accepted"))
        else:
            state.counts["stale"] += 1
            effects.send(to, Settled(update.number, "late"))

    def _added(self, effects: Effects, now: float, client: int, number: int, why: str) -> None:
        """An update was added to the round's, or could not be."""
        if number != self.state.number or client not in self.state.outstanding:
            return
        if why:
            self._refuse(effects, now, client, why)
            return
        self.state.round.came.append(client)
        self.state.accepted[client] = number
        self.state.counts["updates"] += 1
        self._settle(effects, client, "accepted")
        self._check(effects, now)

    def _refuse(self, effects: Effects, now: float, client: int, why: str) -> None:
        self.state.round.refused.append(client)
        self.state.counts["refused"] += 1
        self.troubles.append((self.roster.name_of(client), Failed(self.state.number, f"update refused: {why}", "")))
        self._settle(effects, client, "refused", why)
        self._check(effects, now)

    def _drop(self, effects: Effects, now: float, client: int) -> None:
        self.state.round.dropped.append(client)
        self.state.counts["dropped"] += 1
        self._check(effects, now)

    def _check(self, effects: Effects, now: float) -> None:
        """Close the round if it has all it needs, or nobody is waited for."""
        state, status = self.state, self.state.round
        goal = len(status.cohort) if self.plan.poisson else min(self.plan.needed, len(status.cohort))
        if state.phase == "gathering" and (len(status.came) >= goal or not status.outstanding):
            self._close(effects, now)

    def _close(self, effects: Effects, now: float) -> None:
        state, late = self.state, self.state.outstanding
        state.phase = "closing"
        state.counts["late"] += len(late)
        for client in late:
            self._settle(effects, client, "late")
        effects.start(CloseRound(outcome_of(state, self.plan, self._started, now)), "closed")

    def _closed(self, effects: Effects, now: float, result: RoundClosed) -> None:
        """The model has moved, or not: go on."""
        state = self.state
        self._model = result.model
        state.version += result.moved
        state.phase = "waiting"
        state.fruitless = 0 if state.round.came or not state.round.cohort else state.fruitless + 1
        state.counts["failed_rounds"] += not result.moved
        if result.last or state.number >= self.rounds or state.fruitless >= HOPELESS:
            state.phase = "finishing"
            state.round.scores = []
            self._asked.clear()
            self._finish(effects, now)
        else:
            self._next(effects, now)

    def _finish(self, effects: Effects, now: float) -> None:
        """Hand the final model to all that are there, and end when they have it."""
        missing = [member.client for member in self.roster.present(now) if member.client not in self.state.finished]
        if not missing:
            self.state.phase = "finished"
        for client in missing:
            if client not in self._asked:
                effects.timer(self.roster.patience, ("silent", client))
                self._ask(effects, now, client)

    def _settle(self, effects: Effects, client: int, fate: Fate, why: str = "") -> None:
        effects.send(self.roster.name_of(client), Settled(self.state.number, fate, why))


def outcome_of(state: ServerState, plan: RoundPlan, started: float, ended: float) -> DeployedRound:
    """What came of a round that is over."""
    status = state.round
    failed = round_failure(plan, len(status.cohort), len(status.came))
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
