"""The rounds of a federated deployment: whom to ask, which updates count, when a round is over, and what comes next."""

from __future__ import annotations

import math

import msgspec

from offbeat.protocols.federated.federation_state import RoundStatus, outcome_of
from offbeat.protocols.federated.keeper import FederationKeeper, missing_clients
from offbeat.protocols.federated.messages import AddUpdate, ClientFailure, CloseRound, Settled, UpdateSent
from offbeat.protocols.federated.plan import REMEMBERED
from offbeat.protocols.federated.sampling import cohort
from offbeat.protocols.machine import Effects, Payload


class RoundKeeper(FederationKeeper):
    """Keeps rounds going: all their clients start together. `SummingKeeper` is that of secure sums."""

    def next(self, effects: Effects, now: float) -> None:
        """Begin the next round, if nothing is under way and enough clients are there."""
        state = self._state
        if state.phase != "waiting":
            return
        need = self._terms.first if state.number == 0 else self._plan.fewest
        self.missing = missing_clients(self._roster, now, need, self._plan.fewest)
        if self.missing:
            effects.timer(self._plan.beat, "look")
            return
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
        self._check(effects, now)

    def _overdue(self, effects: Effects, now: float) -> None:
        """Close the round without those who are still at work."""
        if self._plan.deadline is None:
            self._leave_behind(self._state.outstanding, now - self._started)
        self.close(effects, now)

    def update(self, effects: Effects, now: float, client: int, update: UpdateSent, payload: Payload) -> None:
        """An update has come: add it, or refuse it."""
        state, to = self._state, self._roster.name_of(client)
        if client in state.outstanding and update.number == state.due(client):
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
        if client not in self._state.outstanding or number != self._state.due(client):
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
        self._let_go(client)
        self._check(effects, now)

    def drop(self, effects: Effects, now: float, client: int) -> None:
        """A client is gone: nothing more is expected of it in this round."""
        self._state.round.dropped.append(client)
        self._lost[client] = now
        self._state.counts["dropped"] += 1
        self._let_go(client)
        self._check(effects, now)

    def _let_go(self, client: int) -> None:
        """A client takes no further part in this round: its status says so."""

    def _check(self, effects: Effects, now: float) -> None:
        """Close the round if it has all it needs, or nobody is waited for."""
        state, status = self._state, self._state.round
        goal = len(status.cohort) if self._plan.poisson else min(self._plan.needed, len(status.cohort))
        if state.phase == "gathering" and (len(status.came) >= goal or not status.outstanding):
            self.close(effects, now)
        elif state.phase == "gathering" and self._limit < math.inf:
            effects.timer(max(0.0, self._started + self._limit - now), "overdue")

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
