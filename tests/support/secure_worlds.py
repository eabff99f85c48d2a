"""Federated servers and clients with secure sums in virtual time: a server that sees sums only, and checks them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
from federated_worlds import PATIENCE, SavedServer, ServerDisk, WorkingClient

from offbeat.protocols.federated.messages import (
    CloseRound,
    EncodeUpdate,
    MembershipRequest,
    RoundClosed,
    Trained,
    UpdateSent,
)
from offbeat.protocols.federated.peers import PeerList
from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.federated.round_client import RoundClient, SecureIdentity
from offbeat.protocols.federated.secure.client import MaskWork
from offbeat.protocols.federated.secure.fixed_point import FixedPoint
from offbeat.protocols.federated.secure.primitives import identity_public
from offbeat.protocols.federated.secure.recovery import Unmasking
from offbeat.protocols.federated.secure_sums import SecureTerms
from offbeat.protocols.machine import Done, Effect, Event, Payload, Start, Timer

LENGTH = 5


def update_of(client: int, number: int, encoding: FixedPoint) -> Any:
    """The encoded update of a client in a round."""
    values = np.random.default_rng([client, number]).normal(size=LENGTH)
    return encoding.encode(values, client + 1, seed=number)


class MaskingClient(WorkingClient):
    """A client that masks its updates; what it trains takes some virtual seconds."""

    def __init__(self, client: int, random: Random, peers: PeerList | None = None) -> None:
        super().__init__(client, client + 1, lambda _task: (random.uniform(0.1, 6.0), math.inf))
        private, self.client = bytes([client + 1]) * 32, client
        digest = b"" if peers is None else peers.digest
        request = MembershipRequest(self.name, client, identity_public(private), digest)
        identity = SecureIdentity(private, random.randbytes, None if peers is None else peers.known)
        self.inner = RoundClient(self.name, request, Payload(4, b"task"), PATIENCE, identity)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        match event:
            case Timer(("trained", number)):
                result = Trained(UpdateSent(number, 0.0, 0), Payload(0))
                return self._performed(self.inner.on(Done(("train", number), result), now), now)
            case _:
                return super().on(event, now)

    def _performed(self, effects: Sequence[Effect], now: float) -> list[Effect]:
        rest: list[Effect] = []
        for effect in effects:
            match effect:
                case Start(MaskWork() as work, token):
                    rest += self._performed(self.inner.on(Done(token, work()), now), now)
                case Start(EncodeUpdate(number, encoding, _)):
                    row = update_of(self.client, number, encoding)
                    rest += self._performed(self.inner.on(Done(("encode", number), row), now), now)
                case _:
                    rest += super()._performed([effect], now)
        return rest


def secure_terms(random: Random) -> SecureTerms:
    def encoding(clients: Sequence[int], weights: Sequence[float]) -> FixedPoint:
        return FixedPoint(length=LENGTH, clients=len(clients), examples=int(max(weights)))

    return SecureTerms(encoding, random.randbytes)


class SummingServer(SavedServer):
    """A server that gets sums only, and checks them against the updates that nobody has shown it."""

    def __init__(
        self,
        plan: RoundPlan,
        rounds: int,
        disk: ServerDisk,
        dies: Callable[[], str],
        random: Random,
        peers: PeerList | None = None,
    ) -> None:
        self.secure, self.peers = secure_terms(random), peers
        super().__init__(plan, 3, rounds, disk, dies)

    def _work(self, work: Any, now: float) -> Any:
        match work:
            case Unmasking():
                return work()
            case CloseRound(outcome, total):
                progress = self.inner.state.round.secure
                if not outcome.failed:
                    assert progress is not None
                    rows = [update_of(each, outcome.number, progress.plan.encoding) for each in outcome.participants]
                    if not np.array_equal(np.frombuffer(total, "<u4"), sum(rows)):
                        self._disk.wrong.append(f"the sum is wrong: {outcome}")
                    if len(rows) < 3:
                        self._disk.wrong.append(f"a sum of {len(rows)}")
                elif total:
                    self._disk.wrong.append(f"a sum of a round that failed: {outcome}")
                self._disk.closed[outcome.number] = outcome
                return RoundClosed(not outcome.failed, Payload(8), last=False)
            case _:
                return super()._work(work, now)
