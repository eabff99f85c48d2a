"""Signed rounds of real clients: who has a list of all keys is not deceived by a server that lies."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from federated_worlds import ServerDisk
from msgspec import structs
from secure_worlds import MaskingClient, SummingServer

from offbeat.errors import UsageError
from offbeat.protocols.federated.messages import SERVER, MembershipRequest, SecureStart, Welcome
from offbeat.protocols.federated.peers import PeerList
from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.federated.roster import Roster
from offbeat.protocols.federated.secure.messages import (
    KeyRoster,
    PeerKeys,
    ReleasedShares,
    SurvivorList,
    SurvivorSignature,
    SurvivorSignatures,
    SurvivorSigned,
    keys_text,
)
from offbeat.protocols.federated.secure.plan import SecureRound
from offbeat.protocols.federated.secure.primitives import agreement_public, identity_public, sign
from offbeat.protocols.federated.secure_sums import agreed
from offbeat.protocols.machine import Effect, Effects, Event, Payload, Received, Send
from offbeat.simulate.machines import Happening, Sent, Simulation

CLIENTS = 7
PEERS = PeerList(tuple(identity_public(bytes([client + 1]) * 32) for client in range(CLIENTS)))
PLAN = RoundPlan(clients=CLIENTS, fraction=1.0, beat=1.0, silence=4.0)


class LyingServer(SummingServer):
    """A server that changes what it sends, or sends more."""

    def lie(self, send: Send) -> Send:
        return send

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        return [self.lie(effect) if isinstance(effect, Send) else effect for effect in super().on(event, now)]


class InventingServer(LyingServer):
    """Replaces client 5 by one whose secrets it knows."""

    def lie(self, send: Send) -> Send:
        message = send.message
        if not isinstance(message, KeyRoster):
            return send
        peers = tuple(_invented(message.round) if peer.client == 5 else peer for peer in message.peers)
        return structs.replace(send, message=structs.replace(message, peers=peers))


def _invented(digest: bytes) -> PeerKeys:
    private, sealing, masking = secrets.token_bytes(32), *(agreement_public(secrets.token_bytes(32)) for _ in range(2))
    signature = sign(private, keys_text(digest, 5, sealing, masking))
    return PeerKeys(5, identity_public(private), sealing, masking, signature)


class SplittingServer(LyingServer):
    """Tells half of the clients that client 6 has dropped out, to get both secrets of it."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.signatures: dict[int, bytes] = {}

    def lie(self, send: Send) -> Send:
        message = send.message
        if not isinstance(message, SurvivorList) or _number(send.to) > 3:
            return send
        without = tuple(client for client in message.clients if client != 6)
        return structs.replace(send, message=structs.replace(message, clients=without))

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        effects = Effects()
        match event:
            case Received(sender, SurvivorSignature(digest, signature)):
                self.signatures[_number(sender)] = signature
                signed = tuple(SurvivorSigned(*each) for each in sorted(self.signatures.items()))
                effects.send(sender, SurvivorSignatures(digest, signed))
            case _:
                pass
        return [*super().on(event, now), *effects.done]


class UnsignedServer(LyingServer):
    """Begins sums without signatures."""

    def lie(self, send: Send) -> Send:
        if not isinstance(send.message, SecureStart):
            return send
        plan = structs.replace(agreed(send.message), signed=False)
        return structs.replace(send, message=structs.replace(send.message, plan=_encoded(plan)))


def _encoded(plan: SecureRound) -> bytes:
    return msgspec.msgpack.encode(plan)


def _number(name: str) -> int:
    return int(name.split()[1])


def played(kind: type[SummingServer], peers: PeerList | None = PEERS) -> tuple[ServerDisk, list[Any], list[Any]]:
    """A round: what the server has closed, its clients, and every share that was released."""
    random, disk, released = Random(1), ServerDisk(), list[Any]()

    def log(happening: Happening) -> None:
        if isinstance(happening, Sent) and isinstance(happening.message, ReleasedShares):
            released.append(happening.message)

    server = kind(PLAN, 1, disk, lambda: "", random, peers)
    clients = [MaskingClient(client, random, peers) for client in range(CLIENTS)]
    simulation = Simulation([server, *clients], seed=1, log=log)
    assert simulation.run(300.0, until=lambda: server.inner.state.phase == "finished"), server.inner.state
    assert disk.wrong == []
    return disk, clients, released


def test_an_honest_server_gets_the_sum_of_a_signed_round() -> None:
    disk, clients, released = played(SummingServer)
    assert sorted(disk.closed[1].participants) == list(range(CLIENTS))
    assert not disk.closed[1].failed
    assert len(released) == CLIENTS
    assert not any(client.inner.failure for client in clients)


@pytest.mark.parametrize(
    ("kind", "why", "at_least"),
    [
        (InventingServer, "the long-term key of client 5 is not the one that is known", CLIENTS - 1),
        (SplittingServer, "signatures are for the list of survivors that this client has", CLIENTS),
        (UnsignedServer, "it is not signed, and this client has a list of peers", CLIENTS),
    ],
)
def test_a_server_that_lies_gets_no_share_and_no_sum_and_clients_say_why(
    kind: type[SummingServer], why: str, at_least: int
) -> None:
    disk, clients, released = played(kind)
    assert released == []
    assert disk.closed[1].failed
    failures = [client.inner.failure for client in clients if why in client.inner.failure]
    assert len(failures) >= at_least, [client.inner.failure for client in clients]
    assert all(each.startswith("this client releases nothing in the secure sum of round 1: ") for each in failures)


def test_without_a_list_of_keys_a_client_can_be_deceived_and_the_pages_say_so() -> None:
    """What the list is for: an invented client is not noticed by those who take keys from the server."""
    _, clients, _ = played(InventingServer, None)
    assert not any("is not the one that is known" in client.inner.failure for client in clients)


def test_a_client_with_another_number_than_in_its_list_ends() -> None:
    client = MaskingClient(2, Random(1), PEERS).inner
    client.begin(0.0)
    client.on(Received(SERVER, Welcome(3, 1.0, 0, "", "x"), Payload(0)), 0.0)
    assert "calls this client number 3, whose key in the list of peers is not this client's" in client.failure
    assert client.phase == "leaving"


def request(client: int, peers: bytes = PEERS.digest, wanted: int | None = None) -> MembershipRequest:
    return MembershipRequest("a", wanted, identity_public(bytes([client + 1]) * 32), peers)


@pytest.mark.parametrize(
    ("name", "asks", "why"),
    [
        ("a", request(4), ""),
        ("a", request(4, b"x" * 32), "its list of all clients' keys (787878787878) is not the server's"),
        ("a", request(4, b""), "keys (none) is not the server's"),
        ("a", request(40), "not in the list of peers"),
        ("a", request(4, wanted=2), "it is client 4, not 2"),
        ("b", request(3), "it is client 3 in the list of peers, and 1 among the server's keys"),
        ("c", request(0), "client 0 has joined already, under the name 'first'"),
    ],
)
def test_a_server_with_a_list_lets_in_those_who_are_in_it_and_have_the_same(
    name: str, asks: MembershipRequest, why: str
) -> None:
    enrolled = ["a", "b"] if name == "b" else None
    roster = Roster({}, CLIENTS, enrolled, 4.0, signing=True, peers=PEERS)
    if enrolled is None:
        roster.admit("d", structs.replace(request(0), label="first"), 0.0)
    assert why in roster.why_not(name, asks)
    if not why:
        assert roster.why_not(name, asks) == ""
        assert roster.admit(name, asks, 0.0) == 4


def test_a_server_without_a_list_refuses_clients_that_insist_on_one() -> None:
    assert "is not the server's (none)" in Roster({}, CLIENTS, None, 4.0, signing=True).why_not("a", request(4))


def test_a_list_of_peers_is_read_with_names_and_comments() -> None:
    lines = [f"{key.hex()}  clinic {number}" for number, key in enumerate(PEERS.keys)]
    assert PeerList.parse("# our clinics\n\n" + "\n".join(lines) + "  # the last\n") == PEERS
    assert PeerList.parse("\n".join(reversed(lines))).digest != PEERS.digest


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["12ab"], "line 1 of the list of peers begins with '12ab', which is not a key"),
        ([PEERS.keys[0].hex(), "", PEERS.keys[0].hex()], "line 3 .* has the key of client 0 once more"),
        ([key.hex() for key in PEERS.keys[:2]], "has 2 keys, and secure sums need 3 clients"),
        ([], "has 0 keys"),
    ],
)
def test_lists_that_cannot_be_are_refused(lines: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        PeerList.parse("\n".join(lines))
