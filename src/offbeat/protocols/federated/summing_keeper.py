"""Rounds whose updates are summed securely: clients announce their updates, and a sum follows before the round ends."""

from __future__ import annotations

import math
from typing import Any

from offbeat.protocols.federated.messages import ClientFailure, UpdateSent
from offbeat.protocols.federated.plan import round_failure
from offbeat.protocols.federated.round_keeper import RoundKeeper
from offbeat.protocols.federated.secure.server import SecureFailure
from offbeat.protocols.federated.secure_sums import SumKeeper
from offbeat.protocols.machine import Effects, Event, Payload


class SummingKeeper(RoundKeeper):
    """Keeps rounds with secure sums going."""

    def __init__(self, *parts: Any, sums: SumKeeper) -> None:
        super().__init__(*parts)
        self._sums = sums

    def _take(self, effects: Effects, now: float, client: int, update: UpdateSent, payload: Payload) -> None:
        """A client has an update for a secure sum."""
        if payload.nbytes:
            self.refuse(effects, now, client, f"{payload.nbytes:,} bytes came without a mask")
        elif not math.isfinite(update.loss):
            self.refuse(effects, now, client, "it has NaN, or numbers too large to average")
        else:
            self._state.round.came.append(client)
            if client not in self._arrived:  # Else it was started again, and has said the same.
                self._state.round.score(update)
            self._arrives(client, now)
            self._check(effects, now)

    def _over(self, effects: Effects, now: float) -> None:
        """The round has the updates it needs, or never will: sum them."""
        state, status = self._state, self._state.round
        if round_failure(self._plan, len(status.cohort), len(status.came)):
            self._conclude(effects)
            return
        progress = self._sums.plan(status.cohort, status.came, self._plan.fewest)
        if isinstance(progress, str):
            self._failed(effects, progress)
        else:
            state.phase, status.secure = "summing", progress
            self._sum(effects, now)

    def _wait(self, effects: Effects, now: float) -> None:
        """Set the timers of a round, or continue with its sum."""
        if self._state.phase == "summing":
            self._sum(effects, now)
        else:
            super()._wait(effects, now)

    def _sum(self, effects: Effects, now: float) -> None:
        """Begin the secure sum, or go on with it."""
        status = self._state.round
        if status.secure is None:
            return
        for client in status.came:
            effects.timer(self._roster.patience, ("silent", client))
        self._sums.begin(effects, now, self._state.number, status.came, status.secure)
        self._summed(effects)

    def on_sum(self, effects: Effects, now: float, event: Event) -> None:
        """An event of the secure sum."""
        if self._state.phase == "summing":
            self._sums.on(effects, now, event)
            self._summed(effects)

    def lose(self, effects: Effects, now: float, client: int) -> None:
        """A client that has announced an update is gone, or has forgotten it."""
        if self._state.phase == "gathering":
            self._state.round.came.remove(client)
        elif self._state.phase == "summing":
            self._sums.lose(effects, now, client)
            self._summed(effects)

    def _summed(self, effects: Effects) -> None:
        """Go on if the secure sum has ended."""
        state, status, sums = self._state, self._state.round, self._sums
        for name, why in sums.refusals():
            self.troubles.append((name, ClientFailure(state.number, f"secure sum: {why}", "")))
        if sums.outcome is None:
            return
        if isinstance(sums.outcome, SecureFailure):
            self._failed(effects, sums.outcome.reason)
            return
        absent = [client for client in status.came if client not in sums.outcome.clients]
        status.came = list(sums.outcome.clients)
        status.dropped += absent
        state.counts["dropped"] += len(absent)
        state.counts["updates"] += len(status.came)
        for client in status.came:
            state.accepted[client] = state.number
            self._settle(effects, client, "accepted")
        state.phase = "closing"
        self._conclude(effects)

    def _failed(self, effects: Effects, why: str) -> None:
        """There is no secure sum: the model stays as it is."""
        status = self._state.round
        status.failure = why
        for client in status.came:
            self._settle(effects, client, "refused", why)
        self._state.phase = "closing"
        self._conclude(effects)
