"""What keeps a federated deployment going, however its clients are asked: resuming, patience, and the final model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

from offbeat.protocols.federated.federation_state import HOPELESS, FederationState, RoundTerms
from offbeat.protocols.federated.messages import (
    ClientFailure,
    Fate,
    Finish,
    RoundClosed,
    RoundTask,
    Settled,
    UpdateSent,
)
from offbeat.protocols.federated.plan import Patience
from offbeat.protocols.federated.roster import Roster
from offbeat.protocols.machine import Effects, Event, Name, Payload

TIMER_ROUNDING: Final = 1e-3
"""Seconds by which timers are early."""


class FederationKeeper(ABC):
    """A part of `RoundServer`, whose state it changes: `RoundKeeper`, or one of those that go another way."""

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
        if state.phase in ("gathering", "summing"):
            self._wait(effects, now)
        elif state.phase == "closing":
            self._conclude(effects)
        elif state.phase == "finishing":
            self.finish(effects, now)
        else:
            self.next(effects, now)

    @property
    def _limit(self) -> float:
        """Seconds after which this round closes; infinite: it waits for everybody that is there."""
        plan, state = self._plan, self._state
        if plan.deadline is not None and state.phase == "gathering":
            return plan.deadline
        if plan.patience is None:
            return math.inf
        took = state.round.took if state.phase == "gathering" else []
        # Whoever has died meanwhile is silent for too long before that.
        patience = Patience(plan.patience, 2 * self._roster.patience)
        return patience.wait(state.slowest, took, len(state.round.cohort) or plan.needed, state.fruitless)

    def lose_patience(self, effects: Effects, now: float) -> None:
        """Go on without those who are still at work, if they have taken too long."""
        if now - self._started < self._limit - TIMER_ROUNDING:
            return
        if self._state.phase == "gathering":
            self._overdue(effects, now)
        elif self._state.phase == "finishing":
            self._leave_behind(self._without_final(now), now - self._started)
            self.finish(effects, now)

    def _leave_behind(self, clients: list[int], seconds: float) -> None:
        """These give signs of life, and are not waited for any more."""
        for client in clients:
            self._roster.stuck.add(client)
            words = (
                f"still at work after {seconds:.3g} s, {self._plan.patience or 0:g} times as long as the "
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
            effects.send(to, Finish(state.version, every is not None, state.number), self._model)
        else:
            score = every is not None and state.number > 1 and (state.number - 1) % every == 0
            accepted = state.accepted.get(client, 0)
            effects.send(to, RoundTask(state.due(client), state.version, score, accepted), self._model)

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
            effects.timer(max(0.0, self._started + self._limit - now), "overdue")
        for client in missing:
            if client not in self._asked:
                effects.timer(self._roster.patience, ("silent", client))
                self.ask(effects, now, client)

    def _without_final(self, now: float) -> list[int]:
        """Clients that are there, and have not confirmed the final model."""
        over = {*self._state.finished, *self._roster.stuck}
        return [member.client for member in self._roster.present(now) if member.client not in over]

    def _settle(self, effects: Effects, client: int, fate: Fate, why: str = "") -> None:
        effects.send(self._roster.name_of(client), Settled(self._state.due(client), fate, why))

    def on_sum(self, effects: Effects, now: float, event: Event) -> None:  # noqa: B027 - only secure sums have some
        """An event of a secure sum, which rounds of plain updates do not have."""

    def lose(self, effects: Effects, now: float, client: int) -> None:  # noqa: B027
        """A client whose update is to be summed securely is gone, or has forgotten it."""

    @abstractmethod
    def next(self, effects: Effects, now: float) -> None:
        """Go on, if nothing is under way and enough clients are there."""

    @abstractmethod
    def update(self, effects: Effects, now: float, client: int, update: UpdateSent, payload: Payload) -> None:
        """An update has come: add it, or refuse it."""

    @abstractmethod
    def added(self, effects: Effects, now: float, client: int, number: int, why: str) -> None:
        """An update was added to the others, or could not be."""

    @abstractmethod
    def refuse(self, effects: Effects, now: float, client: int, why: str) -> None:
        """An update cannot be used: nothing more is expected of the client."""

    @abstractmethod
    def drop(self, effects: Effects, now: float, client: int) -> None:
        """A client is gone: nothing more is expected of it."""

    @abstractmethod
    def _wait(self, effects: Effects, now: float) -> None:
        """Set the timers of what is under way."""

    @abstractmethod
    def _overdue(self, effects: Effects, now: float) -> None:
        """Those who are still at work have taken too long."""

    @abstractmethod
    def _conclude(self, effects: Effects) -> None:
        """Have the model moved."""


def missing_clients(roster: Roster, now: float, need: int, fewest: int) -> str:
    """What is missing for a round that needs so many clients, and so many with examples; empty if nothing is."""
    here = roster.present(now)
    stuck = sum(member.client in roster.stuck for member in here)
    able = sum(bool(member.examples) and member.client not in roster.stuck for member in here)
    if len(here) >= need and able >= fewest:
        return ""
    words = f"{len(here):,} of {need:,} clients are there, {able:,} with examples"
    return words + f", {stuck:,} still at work for an earlier round" * bool(stuck)
