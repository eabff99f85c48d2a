"""Federated servers and clients in virtual time: machines without tensors, whose work takes as long as we like."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from offbeat.protocols.federated.federation_state import FederationState
from offbeat.protocols.federated.messages import (
    SERVER,
    Abandon,
    AddUpdate,
    CloseRound,
    Conclude,
    DeployedRound,
    Examine,
    Examined,
    Goodbye,
    KeepFinal,
    MembershipRequest,
    Prepare,
    RoundClosed,
    RoundTask,
    Train,
    Trained,
    UpdateSent,
)
from offbeat.protocols.federated.peers import PeerList
from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.federated.round_client import RoundClient
from offbeat.protocols.federated.round_server import RoundServer
from offbeat.protocols.federated.secure_sums import SecureTerms
from offbeat.protocols.machine import Done, Effect, Event, Payload, Received, Send, SetTimer, Start, Timer

MODEL_BYTES = 8
PATIENCE = 1e6


class WorkingClient:
    """A client whose training takes some virtual seconds, and which may be lost on the way."""

    def __init__(self, client: int, examples: int, seconds: Callable[[RoundTask], tuple[float, float]]) -> None:
        self.name = f"client {client}"
        self.inner = RoundClient(self.name, MembershipRequest(self.name, client), Payload(4, b"task"), PATIENCE)
        self.settled: dict[int, str] = {}
        self._examples, self._seconds = examples, seconds
        self._hangs: set[int] = set()
        self._version = 0
        self._mute = False

    def begin(self, now: float) -> Sequence[Effect]:
        return self._performed(self.inner.begin(now), now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        match event:
            case Received(_, RoundTask()):
                self._mute = False
            case Timer(("lost", number)):
                self._mute = self._mute or self.inner.number == number
                return []
            case Timer(("stopped", number)):
                event = Done(("train", number))
            case Timer(("trained", number)):
                if self._mute:
                    return []
                event = Done(
                    ("train", number),
                    Trained(UpdateSent(number, 0.5, self._examples, version=self._version), Payload(MODEL_BYTES)),
                )
            case _:
                pass
        return self._performed(self.inner.on(event, now), now)

    def _performed(self, effects: Sequence[Effect], now: float) -> list[Effect]:
        """The effects; work is done here, now or by timers."""
        rest: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Start):
                rest += self._work(effect.work, now)
            elif not (self._mute and isinstance(effect, Send)):
                rest.append(effect)
        return rest

    def _work(self, work: Any, now: float) -> list[Effect]:
        match work:
            case Prepare():
                return self._performed(self.inner.on(Done("ready", self._examples), now), now)
            case Train(task):
                takes, lost = self._seconds(task)
                self._version = task.version
                if math.isinf(takes):
                    self._hangs.add(task.number)
                    return []
                timers: list[Effect] = [SetTimer(takes, ("trained", task.number))]
                return [*timers, SetTimer(lost, ("lost", task.number))] if lost < takes else timers
            case Abandon(number):
                if number not in self._hangs:
                    return [SetTimer(0.0, ("stopped", number))]
            case Conclude(settled):
                self.settled[settled.number] = settled.fate
            case KeepFinal():
                return self._performed(self.inner.on(Done("final", Goodbye()), now), now)
            case _:
                raise AssertionError(work)
        return []


class ServerDisk:
    """What a server keeps on disk, and all that it ever did."""

    def __init__(self) -> None:
        self.state = b""
        self.pending: set[tuple[int, int]] = set()
        """Rounds and clients whose update is kept."""
        self.closed: dict[int, DeployedRound] = {}
        self.wrong: list[str] = []


class SavedServer:
    """A server that saves its state before its effects are performed, and may die in between."""

    secure: SecureTerms | None = None
    peers: PeerList | None = None

    def __init__(
        self, plan: RoundPlan, seed: int, rounds: int, disk: ServerDisk, dies: Callable[[], str] = lambda: ""
    ) -> None:
        state = msgspec.json.decode(disk.state, type=FederationState) if disk.state else None
        self.name = SERVER
        self.inner = RoundServer(
            SERVER,
            plan,
            seed,
            rounds,
            Payload(MODEL_BYTES),
            MODEL_BYTES,
            state=state,
            secure=self.secure,
            peers=self.peers,
        )
        self._disk, self._dies = disk, dies
        self._sum: set[int] = set()
        self._adding = 0
        self.dead = False

    def begin(self, now: float) -> Sequence[Effect]:
        return self._saved(self.inner.begin(now), now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        return [] if self.dead else self._saved(self.inner.on(event, now), now)

    def _saved(self, effects: Sequence[Effect], now: float) -> list[Effect]:
        dies = self._dies()
        if dies == "before it saves":
            self.dead = True
            return []
        self._disk.state = msgspec.json.encode(self.inner.state)
        if dies:
            self.dead = True
            return []
        rest: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Start):
                rest += [] if self.dead else self.on(Done(effect.token, self._work(effect.work, now)), now)
            elif not self.dead:
                rest.append(effect)
        return rest

    def _work(self, work: Any, now: float) -> Any:
        match work:
            case Examine():
                return Examined()
            case AddUpdate(client):
                number = self.inner.state.number
                self._begin(number)
                if client in self._sum:
                    self._disk.wrong.append(f"{client} was added twice in round {number}")
                self._sum.add(client)
                self._disk.pending.add((number, client))
                return ""
            case CloseRound(outcome):
                self._begin(outcome.number)
                if not outcome.failed and self._sum != set(outcome.participants):
                    self._disk.wrong.append(f"{self._sum} were added for {outcome}")
                self._disk.closed[outcome.number] = outcome
                for member in self.inner.state.members.values():
                    self.inner.roster.hear(member.client, now)  # Lost clients are back for the next round.
                return RoundClosed(not outcome.failed, Payload(MODEL_BYTES), last=False)
            case _:
                raise AssertionError(work)

    def _begin(self, number: int) -> None:
        """As the real server: what was accepted before a restart is added from the disk."""
        if self._adding != number:
            came = self.inner.state.round.came
            if not {(number, client) for client in came} <= self._disk.pending:
                self._disk.wrong.append(f"updates of {came} in round {number} are not on disk")
            self._adding, self._sum = number, set(came)


def deaths(random: Random, chance: float, most: int) -> Callable[[], str]:
    """When a server dies: after some events, before or after it has saved its state."""
    left = [most]

    def dies() -> str:
        if left[0] and random.random() < chance:
            left[0] -= 1
            return random.choice(["before it saves", "after it has saved"])
        return ""

    return dies
