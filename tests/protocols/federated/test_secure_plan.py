"""What a secure round agrees on beforehand, and the bounds of its messages."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from secure_support import ANSWERS

from offbeat.errors import UsageError
from offbeat.protocols.federated.secure.client import SecureClient
from offbeat.protocols.federated.secure.fixed_point import FixedPoint
from offbeat.protocols.federated.secure.plan import SecureRound, lowest_threshold, neighbourhoods
from offbeat.protocols.federated.secure.server import SecureServer
from offbeat.protocols.machine import Done
from offbeat.simulate.faults.secure_rounds import SecureWorld, round_for, seeded


def test_every_client_gets_as_many_neighbours_as_agreed_and_each_is_one_in_turn() -> None:
    around = neighbourhoods(range(1000), 20, b"seed")
    assert all(len(set(others)) == 20 and client not in others for client, others in around.items())
    assert all(client in around[other] for client, others in around.items() for other in others)
    assert around != neighbourhoods(range(1000), 20, b"other")
    assert neighbourhoods([3, 5, 9], 20, b"")[5] == (3, 9)
    # The graph holds together: who is left can be reached from anyone.
    reached, edge = {0}, [0]
    while edge:
        edge = list({other for client in edge for other in around[client]} - reached)
        reached.update(edge)
    assert len(reached) == 1000


def test_thresholds_are_more_than_two_thirds() -> None:
    for holders in range(3, 300):
        least = lowest_threshold(holders)
        assert 3 * least > 2 * holders >= 3 * (least - 1)


ENCODING = FixedPoint(length=5, clients=1000)


@pytest.mark.parametrize(
    ("clients", "settings", "match"),
    [
        (2, {}, "clients 2 makes no sense"),
        (2000, {}, "clients 2000 is more than 1,000"),
        (10, {"threshold": 11}, "threshold 11 is more than 10"),
        (10, {"threshold": 6}, "not more than two thirds of 10 holders"),
        (10, {"degree": 5}, "degree 5 is odd"),
        (10, {"degree": 10}, "degree 10 is more than 9"),
        (1000, {"degree": 258}, "degree 258 is more than 256"),
        (10, {"fewest": 11}, "fewest 11 is more than 10"),
        (300, {"signed": True}, "what a client's neighbours sign would not bind the others"),
    ],
)
def test_rounds_that_cannot_be_safe_or_end_well_are_refused(clients: int, settings: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        SecureRound.of(bytes(32), ENCODING, clients, **settings)


def test_everything_that_is_agreed_is_in_the_digest() -> None:
    plan = SecureRound.of(bytes(32), ENCODING, 10)
    others = [
        structs.replace(plan, id=b"\1" * 32),
        structs.replace(plan, signed=True),
        structs.replace(plan, threshold=8, fewest=8),
        structs.replace(plan, encoding=structs.replace(ENCODING, bound=4.0)),
        SecureRound.of(bytes(32), ENCODING, 11),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 6


def test_a_signed_round_needs_keys_from_elsewhere() -> None:
    with pytest.raises(UsageError, match="source that the server cannot change"):
        SecureClient(round_for(3, 0, signed=True), 1, bytes(32), None, seeded(0))


def test_the_invited_must_be_as_many_as_agreed() -> None:
    with pytest.raises(UsageError, match="2 clients cannot be invited to a round that was agreed for 3"):
        SecureServer(round_for(3, 0), {1: bytes(32), 2: bytes(32)})


def test_an_update_that_was_not_encoded_is_refused() -> None:
    world = SecureWorld(round_for(3, 0), 0)
    client = world.clients[10].client
    for row in (np.zeros(21, np.float32), np.zeros(20, np.uint32), [1, 2]):
        with pytest.raises(UsageError, match="21 integers of 32 bits"):
            client.on(Done("secure update", row), 0.0)


KEYS = {"sealing": bytes(32), "masking": bytes(32), "signature": bytes(64)}


@pytest.mark.parametrize(
    "message",
    [
        {"type": "AdvertisedKeys", "round": bytes(31), **KEYS},
        {"type": "AdvertisedKeys", "round": bytes(32), **KEYS, "sealing": bytes(33)},
        {"type": "DealtShares", "round": bytes(32), "commitment": bytes(32), "boxes": [[1, bytes(81)]]},
        {"type": "DealtShares", "round": bytes(32), "commitment": bytes(32), "boxes": [[-1, bytes(82)]]},
        {"type": "DealtShares", "round": bytes(32), "commitment": bytes(32), "boxes": [[1, bytes(82)]] * 257},
        {"type": "ReleasedShares", "round": bytes(32), "seeds": [[1, bytes(32)]], "keys": []},
        {"type": "ReleasedShares", "round": bytes(32), "seeds": [[1, bytes(33)]] * 258, "keys": []},
        {"type": "SecureLeave", "round": bytes(32), "reason": "x" * 501},
    ],
)
def test_messages_out_of_bounds_are_not_decoded(message: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        ANSWERS.decode(msgspec.msgpack.encode(message))


def test_a_missing_cryptography_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.protocols.federated.secure.primitives.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'offbeat\[federated\]'"):
        SecureServer(round_for(3, 0), {1: bytes(32)})
