"""An asynchronous federated server (FedBuff): clients are kept busy, and every k updates are applied together."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from offbeat.protocols.federated.buffered_turns import BufferedTurns, BufferState
from offbeat.protocols.federated.federation_state import HOPELESS, RoundStatus
from offbeat.protocols.federated.keeper import TIMER_ROUNDING, missing_clients
from offbeat.protocols.federated.messages import CloseRound, DeployedRound, RoundClosed, UpdateSent
from offbeat.protocols.federated.plan import REMEMBERED
from offbeat.protocols.federated.round_keeper import RoundKeeper
from offbeat.protocols.machine import Effects, Payload


class BufferKeeper(RoundKeeper):
    """Keeps clients busy; a round is a step of the server. Who is asked when is said by `BufferedTurns`."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._buffer = self._state.buffer = self._state.buffer or BufferState()
        self._turns = BufferedTurns(self._plan, self._buffer, self._terms.selection)
        self._since: dict[int, float] = {}  # When each client was asked, as far as this process knows.

    def next(self, effects: Effects, now: float) -> None:
        """Begin the next step, or have idle clients train for the one under way."""
        state = self._state
        if state.phase == "waiting":
            first = self._terms.first if state.number == 0 else 1
            self.missing = missing_clients(self._roster, now, first, 1)
            if self.missing:
                effects.timer(self._plan.beat, "look")
                return
            state.number += 1
            state.phase, state.round = "gathering", RoundStatus()
            self._started, self._whole = now, True
            self._arrived, self._lost = {}, {}
        if state.phase == "gathering":
            self._fill(effects, now)

    def _fill(self, effects: Effects, now: float) -> None:
        """Ask idle clients, as long as there are fewer at work than there should be."""
        for turn in self._turns.begin(self._roster.sizes(now), self._state.version):
            self._since[turn.client] = now
            self._roster.hear(turn.client, now)
            self._asked.pop(turn.client, None)
            self.ask(effects, now, turn.client)
            effects.timer(self._roster.patience, ("silent", turn.client))
        held = f"{len(self._buffer.came):,} of the {self._plan.buffer:,} updates of a step have come"
        self.missing = "" if self._buffer.at_work else f"{held}, and no further client is there"
        if self._buffer.at_work and self._limit < math.inf:
            first = min(self._since.get(client, now) for client in self._buffer.at_work)
            effects.timer(max(0.0, first + self._limit - now), "overdue")

    def _wait(self, effects: Effects, now: float) -> None:
        """Another process has asked these clients: wait for them, and ask others."""
        for client in self._buffer.at_work:
            self._since[client] = now
            effects.timer(self._roster.patience, ("silent", client))
        self._check(effects, now)

    def lose_patience(self, effects: Effects, now: float) -> None:
        """Go on without those who are still at work, if they have taken too long."""
        state = self._state
        if state.phase != "gathering":
            super().lose_patience(effects, now)
            return
        for client in self._buffer.at_work:
            seconds = now - self._since.get(client, now)
            if seconds < self._limit - TIMER_ROUNDING:
                continue
            if self._plan.deadline is None:
                self._leave_behind([client], seconds)
            state.round.late.append(client)
            state.counts["late"] += 1
            self._settle(effects, client, "late")
            self._let_go(client)
        self._check(effects, now)

    def _take(self, effects: Effects, now: float, client: int, update: UpdateSent, payload: Payload) -> None:
        """An update that is waited for; who was asked again may have a newer model than at first."""
        turn, latest = self._buffer.turns[client], self._state.version
        if turn.version <= update.version <= latest:
            self._buffer.turns[client] = msgspec.structs.replace(turn, version=update.version)
            super()._take(effects, now, client, update, payload)
        else:
            why = f"it says that it started from version {update.version} of the model, not {turn.version} to {latest}"
            self.refuse(effects, now, client, why)

    def _arrives(self, client: int, now: float) -> None:
        """Its update is in the buffer."""
        self._arrived[client] = now
        self._state.round.took.append(now - self._since.get(client, now))
        self._turns.arrived(client)

    def _let_go(self, client: int) -> None:
        """Its turn is over."""
        self._turns.given_up(client)

    def _check(self, effects: Effects, now: float) -> None:
        """Step if the buffer is full; end if what comes cannot be used; else ask others."""
        state, size = self._state, self._plan.buffer or 1
        if state.phase != "gathering":
            return
        if len(self._buffer.came) >= size:
            self.close(effects, now)
        elif len(state.round.refused) >= HOPELESS * size:
            state.fruitless = HOPELESS
            state.phase, self._started = "finishing", now
            self._asked.clear()
            self.finish(effects, now)
        else:
            self._fill(effects, now)

    def close(self, effects: Effects, now: float) -> None:
        """The buffer is full."""
        state, self._ended = self._state, now
        state.phase = "closing"
        if self._whole and state.round.took:
            state.slowest = [*state.slowest, max(state.round.took)][-REMEMBERED:]
        self._conclude(effects)

    def _conclude(self, effects: Effects) -> None:
        """Have the model moved."""
        state, status, came = self._state, self._state.round, self._buffer.came
        outcome = DeployedRound(
            number=state.number,
            version=state.version,
            cohort=(*came, *status.late, *status.dropped, *status.refused),
            participants=tuple(came),
            late=tuple(status.late),
            dropped=tuple(status.dropped),
            refused=tuple(status.refused),
            started=self._started,
            ended=self._ended,
            scores=tuple(status.scores),
            arrived=tuple(self._arrived.items()),
            lost=tuple(self._lost.items()),
            turns=tuple(self._buffer.turns[client] for client in came),
            asked=tuple(self._since.items()),
        )
        effects.start(CloseRound(outcome), "closed")

    def closed(self, effects: Effects, now: float, result: RoundClosed) -> None:
        """The model has moved: the clients whose updates were applied are free."""
        self._turns.step()
        super().closed(effects, now, result)

    def finish(self, effects: Effects, now: float) -> None:
        """Nobody needs to train any more: hand out the final model."""
        for client in self._buffer.at_work:
            self._settle(effects, client, "late")
            self._let_go(client)
        super().finish(effects, now)
