"""Secure aggregation in virtual time: clients drop out at every stage, and the sum is right or the round is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Final, cast

import numpy as np
from msgspec import Struct, structs

from offbeat.protocols.federated.secure.client import UPDATE, SecureClient
from offbeat.protocols.federated.secure.common_scale import CommonScale
from offbeat.protocols.federated.secure.fixed_point import FixedPoint
from offbeat.protocols.federated.secure.integers import Row
from offbeat.protocols.federated.secure.messages import (
    SERVER,
    AdvertisedKeys,
    DealtShares,
    MaskedUpdate,
    ReleasedShares,
    SharePiece,
    SurvivorSignature,
)
from offbeat.protocols.federated.secure.plan import SecureRound
from offbeat.protocols.federated.secure.primitives import identity_public
from offbeat.protocols.federated.secure.server import SecureServer, SecureTimes
from offbeat.protocols.federated.secure.shamir import SecretBytes
from offbeat.protocols.machine import Done, Effect, Event, Machine, Name, Send
from offbeat.simulate.machine_contract import MachineContract
from offbeat.simulate.machines import LossyNetwork, Simulation, Stop

STAGES: Final[tuple[type[Struct], ...]] = (
    AdvertisedKeys,
    DealtShares,
    MaskedUpdate,
    SurvivorSignature,
    ReleasedShares,
)
"""What a client sends, in order: it may drop out before each of these, or after it."""
TIMES: Final = SecureTimes(phase=5.0, masks=8.0, repeat=1.0)
LENGTH: Final = 20
FOREVER: Final = 1000.0
"""Virtual seconds after which whoever has not ended never will."""


def seeded(*numbers: int) -> SecretBytes:
    """Random bytes that follow from numbers: for simulations and tests, never for secrets."""
    random = Random(hashlib.sha256(repr(numbers).encode()).digest())  # noqa: S311
    return random.randbytes


class Dropout(Struct, frozen=True):
    """When a client disappears."""

    stage: int  # Of `STAGES`.
    before: bool  # Before it sends this; otherwise right after.


class DroppingClient:
    """A client that drops out at a given stage, or releases wrong shares."""

    def __init__(self, client: SecureClient, update: Row, dropout: Dropout | None, lies: bool = False) -> None:
        self.client, self.name = client, client.name
        self.update = update
        self.dropped = False
        self.lies = lies
        self.released: list[ReleasedShares] = []
        """What it has released, in every message that left it."""
        self.dropout = dropout

    def begin(self, now: float) -> Sequence[Effect]:
        """Begin, with an update that is ready."""
        return [*self._through(self.client.begin(now)), *self._through(self.client.on(Done(UPDATE, self.update), now))]

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle an event, unless it has dropped out."""
        return () if self.dropped else self._through(self.client.on(event, now))

    def _through(self, effects: Sequence[Effect]) -> list[Effect]:
        """The effects up to the dropout."""
        through: list[Effect] = []
        for effect in effects:
            message = effect.message if isinstance(effect, Send) else None
            if self.lies and isinstance(message, ReleasedShares):
                effect = structs.replace(cast("Send", effect), message=_wrong(message))
            strikes = self.dropout is not None and isinstance(message, STAGES[self.dropout.stage])
            if self.dropout is None or not (strikes and self.dropout.before):
                through.append(effect)
                if isinstance(message, ReleasedShares):
                    self.released.append(message)
            if strikes:
                self.dropped = True
                break
        return through


def _wrong(message: ReleasedShares) -> ReleasedShares:
    """The same with another number in each share."""
    seeds, keys = (
        tuple(SharePiece(piece.client, bytes([piece.share[0] ^ 1]) + piece.share[1:]) for piece in pieces)
        for pieces in (message.seeds, message.keys)
    )
    return structs.replace(message, seeds=seeds, keys=keys)


@dataclass
class SecureWorld:
    """A server and clients with updates that are known, so that the sum can be checked."""

    plan: SecureRound
    seed: int
    dropouts: Mapping[int, Dropout] = field(default_factory=dict[int, Dropout])
    times: SecureTimes = TIMES
    liars: Collection[int] = ()
    """Clients that release wrong shares."""

    def __post_init__(self) -> None:
        """Make the machines."""
        numbers = range(10, 10 + self.plan.clients)
        identities = {client: seeded(self.seed, client, 1)(32) for client in numbers}
        self.members = {client: identity_public(identity) for client, identity in identities.items()}
        self.server = SecureServer(self.plan, self.members, self.times)
        random = np.random.default_rng(self.seed)
        encoding = self.plan.encoding
        self.updates = {
            client: encoding.encode(
                random.normal(size=encoding.length), int(random.integers(encoding.examples)) + 1, client
            )
            for client in numbers
        }
        self.clients = {
            client: DroppingClient(
                SecureClient(self.plan, client, identities[client], self.members, seeded(self.seed, client, 2), 60.0),
                self.updates[client],
                self.dropouts.get(client),
                client in self.liars,
            )
            for client in numbers
        }

    @property
    def machines(self) -> list[Machine]:
        """All of them."""
        return [self.server, *self.clients.values()]

    @property
    def over(self) -> bool:
        """Whether the server and all clients that have not dropped out have ended."""
        return _all_ended(self.machines)


def fault_in(machines: Iterable[Machine]) -> str | None:
    """What must never be: a wrong sum, or a client that releases both kinds of share of another."""
    clients = {each.client.number: each for each in machines if isinstance(each, DroppingClient)}
    for server in machines:
        if isinstance(server, SecureServer) and (unmasked := server.unmasked) is not None:
            whole = np.sum([clients[client].update for client in unmasked.clients], axis=0, dtype=np.uint64)
            if not np.array_equal(unmasked.total, whole % 2**server.encoding.width):
                return f"the sum over clients {list(unmasked.clients)} is wrong"
    for each in clients.values():
        seeds = {piece.client for message in each.released for piece in message.seeds}
        keys = {piece.client for message in each.released for piece in message.keys}
        if seeds & keys:
            return f"{each.name} has released both kinds of share of clients {sorted(seeds & keys)}"
    return None


class SecureContract(MachineContract):
    """Secure aggregation under any fault, for `offbeat check offbeat.simulate.faults.secure_rounds:SecureContract`.

    The sum is right, or there is none; nobody releases both kinds of share of a client; and everybody ends.
    """

    sizes: ClassVar[Sequence[int]] = (4, 6, 9)
    patience: ClassVar[float] = FOREVER
    observer: ClassVar[Name] = SERVER

    def machines(self, size: int, seed: int) -> Sequence[Machine]:
        """A server, and clients that are only disturbed from without."""
        bits = (None, 8, 2)[seed % 3]
        return SecureWorld(round_for(size - 1, seed, signed=seed % 2 == 1, bits=bits), seed).machines

    def invariant(self, machines: Mapping[Name, Machine]) -> str | None:
        """What `fault_in` finds."""
        return fault_in(list(machines.values()))

    def done(self, machines: Mapping[Name, Machine]) -> bool:
        """Everybody has ended."""
        return _all_ended(machines.values())

    def perform(self, name: Name, work: Any) -> Any:  # noqa: ARG002
        """Masking and unmasking."""
        return work()


def _all_ended(machines: Iterable[Machine]) -> bool:
    return all(
        each.dropped or each.client.ended
        if isinstance(each, DroppingClient)
        else not isinstance(each, SecureServer) or each.outcome is not None
        for each in machines
    )


def round_for(
    clients: int, seed: int, *, degree: int | None = None, signed: bool = False, bits: int | None = None
) -> SecureRound:
    """A round over short updates, in integers of so many bits; None: 32."""
    encoding = FixedPoint(length=LENGTH, clients=clients, bound=8.0, examples=100)
    if bits is not None:
        encoding = CommonScale(length=LENGTH, clients=clients, bound=8.0, examples=100, bits=bits, fine=1)
    return SecureRound.of(seeded(seed, 0)(32), encoding, clients, degree=degree, signed=signed)


def random_dropouts(plan: SecureRound, seed: int) -> dict[int, Dropout]:
    """Which clients drop out, at any stage: none, some, or too many."""
    chance = Random(seed)  # noqa: S311
    most = chance.choice([1, plan.clients // 4, plan.clients // 3, plan.clients // 2, plan.clients])
    victims = chance.sample(range(10, 10 + plan.clients), chance.randint(0, most))
    return {client: Dropout(chance.randrange(len(STAGES)), chance.random() < 0.5) for client in victims}


def play_secure_round(seed: int) -> SecureWorld:
    """One round under random dropouts, lies, pauses, delays, losses and duplicates, all by a seed."""
    chance = Random(seed ^ 0x5EC)  # noqa: S311
    clients = chance.choice([3, 4, 7, 10, 16])
    degree = chance.choice([None, None, 6 if clients > 7 else None])
    signed = degree is None and chance.random() < 0.5
    # Not drawn, so that what else a seed means stays as it was.
    plan = round_for(clients, seed, degree=degree, signed=signed, bits=(None, 8, 4, 2)[seed % 4])
    liars = chance.sample(range(10, 10 + clients), chance.choice([0, 0, 1, clients // 4]))
    world = SecureWorld(plan, seed, random_dropouts(plan, seed), liars=liars)
    network = LossyNetwork(
        delay=chance.uniform(0.001, 0.1),
        jitter=chance.choice([0.0, 0.1, 1.0]),
        loss=chance.choice([0.0, 0.0, 0.1]),
        duplicate=chance.choice([0.0, 0.3]),
    )
    names = [machine.name for machine in world.machines]
    pauses = [
        Stop(chance.choice(names), chance.uniform(0, 5), chance.uniform(1, 20)) for _ in range(chance.randint(0, 2))
    ]
    simulation = Simulation(
        world.machines, seed=seed, network=network, faults=pauses, perform=dict.fromkeys(names, _perform)
    )
    simulation.run(FOREVER, lambda: world.over)
    return world


def _perform(work: Any) -> Any:
    return work()
