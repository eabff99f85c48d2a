"""Client and server of secure aggregation, message by message: what goes well, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from secure_support import Table

from offbeat.protocols.federated.secure.client import GIVE_UP
from offbeat.protocols.federated.secure.fixed_point import FixedPoint
from offbeat.protocols.federated.secure.messages import (
    SERVER,
    AdvertisedKeys,
    DealtShares,
    DeliveredShares,
    KeyRoster,
    MaskedUpdate,
    ReleasedShares,
    SecureInvite,
    SecureLeave,
    SecureRefusal,
    SharePiece,
    SurvivorList,
    SurvivorSignature,
    SurvivorSignatures,
    SurvivorSigned,
)
from offbeat.protocols.federated.secure.plan import SecureRound
from offbeat.protocols.federated.secure.records import SecureServerState
from offbeat.protocols.federated.secure.recovery import SecretRecovery
from offbeat.protocols.federated.secure.server import SecureFailure, SecureServer, SecureSum, SecureTimes
from offbeat.protocols.federated.secure.shamir import ShamirSharing
from offbeat.protocols.federated.secure.traffic import client_traffic
from offbeat.protocols.machine import Done, Ended, Name, Payload, Received, Send
from offbeat.simulate.faults.secure_rounds import STAGES, Dropout, SecureWorld, fault_in, round_for, seeded


def without(*kinds: type, of: Name) -> Callable[[Name, Send], list[Send]]:
    """A hand that holds back some messages of a sender."""
    return lambda sender, send: [] if sender == of and isinstance(send.message, kinds) else [send]


def swap(kind: type, change: Callable[[Any, Name], Any], of: Name | None = None, to: Name | None = None) -> Any:
    """A hand that changes messages of a kind."""

    def hand(sender: Name, send: Send) -> list[Send]:
        if isinstance(send.message, kind) and of in (None, sender) and to in (None, send.to):
            return [structs.replace(send, message=change(send.message, send.to))]
        return [send]

    return hand


def failures(world: SecureWorld) -> dict[int, str]:
    return {number: each.client.failure for number, each in world.clients.items() if each.client.failure}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("clients", [3, 4, 7, 12])
def test_the_sum_of_all_clients_is_the_sum_of_their_updates_bit_for_bit(clients: int, signed: bool) -> None:
    world = SecureWorld(round_for(clients, 1, signed=signed), 1)
    outcome = Table(world).play()
    assert isinstance(outcome, SecureSum)
    assert outcome.clients == tuple(range(10, 10 + clients))
    assert np.array_equal(outcome.total, sum(world.updates.values()))
    assert not failures(world)
    assert not world.server.refused


@pytest.mark.parametrize("stage", range(len(STAGES)), ids=[stage.__name__ for stage in STAGES])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("degree", [None, 6])
def test_clients_drop_out_at_every_stage(stage: int, before: bool, degree: int | None) -> None:
    signed = degree is None
    plan = round_for(10, 2, degree=degree, signed=signed)
    # With 6 neighbours and a threshold of 5, the two dropouts may be near one client.
    world = SecureWorld(plan, 2, dict.fromkeys((12, 17), Dropout(stage, before)))
    outcome = Table(world).play()
    assert isinstance(outcome, SecureSum)
    masks = STAGES.index(MaskedUpdate)
    away = stage < masks or (stage == masks and before)
    if not signed and stage == STAGES.index(SurvivorSignature):
        away = False  # There are no signatures: nobody drops out.
    assert len(outcome.clients) == (8 if away else 10)
    assert not {number for number in failures(world) if number not in (12, 17)}


def test_too_few_survivors_end_the_round_before_any_share_is_released() -> None:
    world = SecureWorld(round_for(10, 3), 3, dict.fromkeys((10, 11, 12, 13), Dropout(2, before=True)))
    table = Table(world)
    outcome = table.play()
    assert isinstance(outcome, SecureFailure)
    assert "6 sent a masked update, and 7 are needed" in outcome.reason
    assert not any(isinstance(send.message, SurvivorList | ReleasedShares) for _, send in table.sent)
    assert set(failures(world).values()) == {outcome.reason}


def test_more_clients_can_be_demanded_than_the_threshold() -> None:
    plan = structs.replace(round_for(7, 3), fewest=7)
    outcome = Table(SecureWorld(plan, 3, {12: Dropout(2, before=True)})).play()
    assert outcome == SecureFailure("6 of 7 clients sent a masked update, and 7 are needed")


def test_the_server_only_ever_sees_masked_updates() -> None:
    world = SecureWorld(round_for(5, 4), 4)
    table = Table(world)
    table.play()
    encoding = world.server.encoding
    sent = [send.payload.handle for _, send in table.sent if isinstance(send.message, MaskedUpdate)]
    masked = [encoding.unpacked(payload) for payload in sent]
    assert len(masked) == 5
    for row in masked:
        assert all(np.count_nonzero(row == update) <= 1 for update in world.updates.values())
    # Even a server that knows the other four seeds and updates knows nothing of the fifth: its own mask remains.
    assert len({bytes(row) for row in masked}) == 5


def test_the_same_seed_gives_the_same_messages_and_another_seed_none_of_them() -> None:
    def sent(seed: int) -> list[bytes]:
        table = Table(SecureWorld(round_for(4, 5), seed))
        table.play()
        return [msgspec.msgpack.encode(send.message) for sender, send in table.sent if sender != SERVER]

    assert sent(5) == sent(5)
    kinds = {msgspec.msgpack.encode(message) for message in (MaskedUpdate(round_for(4, 5).digest),)}
    assert set(sent(5)) & set(sent(6)) == kinds


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("absent", [(), (12, 15)])
def test_traffic_is_what_the_messages_have(signed: bool, absent: tuple[int, ...]) -> None:
    plan = round_for(10, 6, signed=signed)
    once = SecureTimes(phase=5.0, masks=8.0, repeat=100.0)  # Nobody is asked twice.
    world = SecureWorld(plan, 6, dict.fromkeys(absent, Dropout(2, before=True)), once)
    table = Table(world)
    table.play()
    members = list(world.members)
    for client in set(members) - set(absent):
        others = [other for other in members if other != client]
        traffic = client_traffic(plan, client, others, set(others) - set(absent))
        name = f"client {client}"
        assert (traffic.down, traffic.up) == (table.bytes_down[name], table.bytes_up[name])


def test_a_large_update_costs_little_more_than_the_plain_one() -> None:
    encoding = FixedPoint(length=1_000_000, clients=100, examples=600)
    plan = SecureRound.of(bytes(32), encoding, 100, signed=True)
    traffic = client_traffic(plan, 0, range(1, 100))
    assert traffic.up + traffic.down < 1.05 * 4_000_000


# A client that lies.


def test_a_forged_share_in_transit_counts_for_nothing() -> None:
    """The server flips a bit of a box: the receiver cannot open it, and the round needs one share less."""

    def flip(message: DeliveredShares, _: Name) -> DeliveredShares:
        first, *rest = message.boxes
        forged = structs.replace(first, box=bytes([first.box[0] ^ 1]) + first.box[1:])
        return structs.replace(message, boxes=(forged, *rest))

    world = SecureWorld(round_for(7, 7), 7)
    outcome = Table(world, swap(DeliveredShares, flip, to="client 13")).play()
    assert isinstance(outcome, SecureSum)
    assert "shares of client 10" in world.clients[13].client.refusals[0]


def test_shares_that_are_replayed_from_an_earlier_round_cannot_be_opened() -> None:
    """The server delivers them as those of this round, to a client with the same keys."""
    earlier = Table(SecureWorld(round_for(7, 6), 7))
    earlier.play()
    old = next(s.message for _, s in earlier.sent if isinstance(s.message, DeliveredShares) and s.to == "client 13")
    assert isinstance(old, DeliveredShares)
    world = SecureWorld(round_for(7, 7), 7)
    replay = swap(DeliveredShares, lambda message, _: structs.replace(message, boxes=old.boxes), to="client 13")
    assert isinstance(Table(world, replay).play(), SecureFailure | SecureSum)
    assert sum("which are not what they should be" in each for each in world.clients[13].client.refusals) == 6
    assert not any(piece.client != 13 for message in world.clients[13].released for piece in message.seeds)


def test_a_share_that_is_released_twice_counts_once() -> None:
    def twice(_: Name, send: Send) -> list[Send]:
        return [send] * (2 if isinstance(send.message, ReleasedShares) else 1)

    world = SecureWorld(round_for(7, 8), 8)
    assert isinstance(Table(world, twice).play(), SecureSum)
    assert world.server.refused == []


def test_a_share_meant_for_another_client_cannot_be_opened() -> None:
    boxes: dict[Name, DeliveredShares] = {}

    def mixed_up(message: DeliveredShares, to: Name) -> DeliveredShares:
        boxes[to] = message
        if to != "client 13":
            return message
        # The box of client 11 for client 12, as that of client 11 for client 13.
        box = next(each for each in boxes["client 12"].boxes if each.client == 11)
        return structs.replace(message, boxes=tuple(box if each.client == 11 else each for each in message.boxes))

    world = SecureWorld(round_for(7, 7), 7)
    assert isinstance(Table(world, swap(DeliveredShares, mixed_up)).play(), SecureSum)
    assert "shares of client 11" in world.clients[13].client.refusals[0]


@pytest.mark.parametrize("kind", ["seeds", "keys"])
@pytest.mark.parametrize("liar", [10, 16])
def test_a_client_that_releases_wrong_shares_is_named_and_its_shares_are_not_used(kind: str, liar: int) -> None:
    def lie(message: ReleasedShares, _: Name) -> ReleasedShares:
        pieces = tuple(SharePiece(piece.client, bytes(32) + b"\0") for piece in getattr(message, kind))
        return structs.replace(message, **{kind: pieces})

    world = SecureWorld(round_for(10, 8), 8, {13: Dropout(2, before=True)})
    outcome = Table(world, swap(ReleasedShares, lie, of=f"client {liar}")).play()
    assert isinstance(outcome, SecureSum)
    assert outcome.liars == (liar,)
    assert [refused.sender for refused in world.server.refused] == [f"client {liar}"]


def test_liars_that_agree_on_their_shares_cannot_put_the_blame_on_others() -> None:
    """Two wrong shares whose errors cancel give the right secret, and a polynomial that no honest share is on."""
    sharing, secret = ShamirSharing(3), bytes(range(32))
    shares = sharing.split(secret, range(5), seeded(8))
    # The first three count 3, -3 and 1 times.
    for holder in (0, 1):
        shares[holder] = (int.from_bytes(shares[holder], "little") + 1).to_bytes(33, "little")
    assert sharing.combine(shares) == secret
    assert sharing.share_of(3, shares) != shares[3]
    for order in itertools.permutations(range(5)):
        recovery = SecretRecovery(sharing)
        assert recovery.secret({holder: shares[holder] for holder in order}, secret.__eq__) == secret
        assert recovery.liars <= {0, 1}


def test_a_client_whose_secret_cannot_be_recovered_ends_the_round_and_is_named() -> None:
    def other_seed(message: DealtShares, _: Name) -> DealtShares:
        return structs.replace(message, commitment=bytes(32))

    world = SecureWorld(round_for(7, 9), 9)
    outcome = Table(world, swap(DealtShares, other_seed, of="client 12")).play()
    assert isinstance(outcome, SecureFailure)
    assert outcome.culprits == (12,)
    assert "secrets of clients [12] could not be recovered" in outcome.reason


def garbage(world: SecureWorld, digest: bytes) -> dict[str, tuple[Any, Payload, str]]:
    other = SecureWorld(round_for(5, 99), 99)
    keys = AdvertisedKeys(digest, bytes(32), b"\1" * 32, bytes(64))
    return {
        "round": (structs.replace(keys, round=other.plan.digest), Payload(0), "is for another round"),
        "signature": (keys, Payload(0), "not signed with the long-term key"),
        "early": (MaskedUpdate(digest), Payload(4, bytes(4)), "it was not asked for MaskedUpdate"),
        "question": (SecureInvite(digest), Payload(0), "SecureInvite is not an answer of a client"),
        "nothing": (None, Payload(0), "NoneType is for another round"),
    }


@pytest.mark.parametrize("kind", ["round", "signature", "early", "question", "nothing"])
def test_garbage_is_refused_and_its_sender_named(kind: str) -> None:
    world = SecureWorld(round_for(5, 10), 10)
    message, payload, reason = garbage(world, world.plan.digest)[kind]
    world.server.begin(0.0)
    effects = world.server.on(Received("client 12", message, payload), 0.0)
    assert [(refused.sender, reason in refused.reason) for refused in world.server.refused] == [("client 12", True)]
    assert isinstance(effects[0], Send)
    assert isinstance(effects[0].message, SecureRefusal)
    assert world.server.waits_for == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("nbytes", [0, 4 * 21 - 1, 4 * 21 + 4, 400])
def test_an_update_of_the_wrong_length_is_refused(nbytes: int) -> None:
    def cut(sender: Name, send: Send) -> list[Send]:
        if isinstance(send.message, MaskedUpdate) and sender == "client 11":
            return [structs.replace(send, payload=Payload(nbytes, bytes(nbytes)))]
        return [send]

    world = SecureWorld(round_for(7, 11), 11)
    outcome = Table(world, cut).play()
    assert isinstance(outcome, SecureSum)
    assert 11 not in outcome.clients
    assert f"its update has {nbytes} bytes, and the round is for 84" in world.server.refused[0].reason


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (DealtShares, lambda m, _: structs.replace(m, boxes=m.boxes[1:]), "not one to each of its 6 neighbours"),
        (DealtShares, lambda m, _: structs.replace(m, boxes=(m.boxes[0],) * 6), "not one to each of its 6 neighbours"),
        (ReleasedShares, lambda m, _: structs.replace(m, seeds=m.seeds + m.seeds[:1]), "or one twice"),
        (ReleasedShares, lambda m, _: structs.replace(m, keys=m.seeds), "for which it was not asked"),
        (
            ReleasedShares,
            lambda m, _: structs.replace(m, seeds=(SharePiece(m.seeds[0].client, b"\xff" * 33),)),
            "a share is not a number",
        ),
        (SurvivorSignature, lambda m, _: structs.replace(m, signature=bytes(64)), "not for this list of survivors"),
    ],
)
def test_a_wrong_answer_costs_the_round_nothing_but_its_sender(kind: type, change: Any, reason: str) -> None:
    world = SecureWorld(round_for(7, 12, signed=True), 12)
    outcome = Table(world, swap(kind, change, of="client 14")).play()
    assert isinstance(outcome, SecureSum)
    assert {refused.sender for refused in world.server.refused} == {"client 14"}
    assert reason in world.server.refused[0].reason


def test_a_stranger_is_refused() -> None:
    world = SecureWorld(round_for(5, 13), 13)
    world.server.begin(0.0)
    world.server.on(Received("client 99", AdvertisedKeys(world.plan.digest, bytes(32), bytes(32), bytes(64))), 0.0)
    assert world.server.refused[0].reason == "it was not invited to this round"


def test_keys_of_another_client_are_refused() -> None:
    """A replay of another client's keys, in the same round."""
    kept: list[AdvertisedKeys] = []

    def replay(message: AdvertisedKeys, _: Name) -> AdvertisedKeys:
        kept.append(message)
        return kept[0]

    world = SecureWorld(round_for(3, 14), 14)
    outcome = Table(world, swap(AdvertisedKeys, replay)).play()
    assert isinstance(outcome, SecureFailure)
    assert "1 of 3 clients advertised keys" in outcome.reason
    assert {refused.sender for refused in world.server.refused} == {"client 11", "client 12"}


@pytest.mark.parametrize("kind", STAGES)
def test_answers_of_an_earlier_round_are_refused(kind: type) -> None:
    """The same clients and keys, and another round: whatever was said in the first is refused in the second."""
    first = Table(SecureWorld(round_for(5, 15, signed=True), 15))
    first.play()
    old = next(send for sender, send in first.sent if isinstance(send.message, kind) and sender == "client 12")

    def replay(sender: Name, send: Send) -> list[Send]:
        return [old] if sender == "client 12" and isinstance(send.message, kind) else [send]

    world = SecureWorld(structs.replace(round_for(5, 16, signed=True), threshold=4, fewest=4), 15)
    outcome = Table(world, replay).play()
    assert isinstance(outcome, SecureSum)
    assert any("is for another round" in refused.reason for refused in world.server.refused)


# A server that lies.


def leaves(world: SecureWorld, hand: Any, client: int) -> str:
    """Why a client leaves; it has released nothing after that."""
    table = Table(world, hand)
    table.play()
    assert not world.clients[client].released
    assert any(sender == f"client {client}" and isinstance(send.message, SecureLeave) for sender, send in table.sent)
    return failures(world)[client]


def test_a_client_accepts_one_list_of_survivors_only() -> None:
    """First the true list; then another one, to get the other kind of share."""
    asked: list[Send] = []

    def again(sender: Name, send: Send) -> list[Send]:
        if isinstance(send.message, SurvivorList) and send.to == "client 11" and not asked:
            asked.append(send)
            fewer = structs.replace(send.message, clients=send.message.clients[:-1])
            return [send, structs.replace(send, message=fewer)]
        return [send]

    world = SecureWorld(round_for(7, 17), 17)
    table = Table(world, again)
    table.play()
    assert "two different SurvivorList" in failures(world)[11]
    (released,) = world.clients[11].released
    assert {piece.client for piece in released.seeds}.isdisjoint(piece.client for piece in released.keys)


def test_a_list_with_fewer_survivors_than_were_agreed_is_refused_though_secrets_could_be_recovered() -> None:
    """Private clients share the noise of so many."""
    plan = structs.replace(round_for(7, 18), fewest=7)
    shorter = lambda m, _: structs.replace(m, clients=m.clients[:6])  # noqa: E731
    assert "6 survivors, and 7 are the fewest" in leaves(SecureWorld(plan, 18), swap(SurvivorList, shorter), 11)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, _: structs.replace(m, clients=m.clients[:4]), "4 survivors, and 5 are the fewest that were agreed"),
        (lambda m, _: structs.replace(m, clients=m.clients + m.clients[-1:]), "or twice"),
        (lambda m, _: structs.replace(m, clients=(*m.clients, 99)), "not neighbours"),
        (lambda m, _: structs.replace(m, clients=tuple(c for c in m.clients if c != 11)), "lacks this client"),
    ],
)
def test_a_wrong_list_of_survivors_is_refused(change: Any, reason: str) -> None:
    world = SecureWorld(round_for(7, 18), 18)
    assert reason in leaves(world, swap(SurvivorList, change, to="client 11"), 11)


def test_clients_with_different_lists_of_survivors_release_nothing() -> None:
    """Against a server that tells each half that others have survived: signed rounds only."""
    signed: dict[int, bytes] = {}

    def hand(sender: Name, send: Send) -> list[Send]:
        if isinstance(send.message, SurvivorList):
            gone = 19 if int(send.to.split()[1]) < 15 else 10
            rest = tuple(each for each in send.message.clients if each != gone)
            return [structs.replace(send, message=structs.replace(send.message, clients=rest))]
        if isinstance(send.message, SurvivorSignature):
            signed[int(sender.split()[1])] = send.message.signature
            if len(signed) < 10:
                return []
            all_signed = tuple(SurvivorSigned(client, signed[client]) for client in sorted(signed))
            for client in signed:
                message = SurvivorSignatures(send.message.round, all_signed)
                table.deliver(SERVER, Send(f"client {client}", message))
            return []
        return [send]

    world = SecureWorld(round_for(10, 19, signed=True), 19)
    table = Table(world, hand)
    assert isinstance(table.play(), SecureFailure)
    assert not any(each.released for each in world.clients.values())
    assert all("5 of 10 signatures are for the list" in failure for failure in failures(world).values())
    assert len(failures(world)) == 10


def test_signatures_for_another_list_are_refused() -> None:
    def forge(message: SurvivorSignatures, _: Name) -> SurvivorSignatures:
        first, *rest = message.signatures
        return structs.replace(message, signatures=(structs.replace(first, signature=bytes(64)), *rest))

    world = SecureWorld(round_for(7, 20, signed=True), 20)
    reason = leaves(world, swap(SurvivorSignatures, forge, to="client 11"), 11)
    assert "6 of 7 signatures are for the list of survivors that this client has" in reason


def test_a_server_cannot_invent_signatures() -> None:
    def few(message: SurvivorSignatures, _: Name) -> SurvivorSignatures:
        return structs.replace(message, signatures=message.signatures[:3] + message.signatures[:1])

    world = SecureWorld(round_for(7, 20, signed=True), 20)
    assert "5 are needed" in leaves(world, swap(SurvivorSignatures, few, to="client 11"), 11)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, _: structs.replace(m, peers=m.peers[:3]), "gave 3 neighbours, but between 4 and 6"),
        (lambda m, _: structs.replace(m, peers=m.peers[:5] + m.peers[:1]), "a client or a key twice"),
        (
            lambda m, _: structs.replace(m, peers=(structs.replace(m.peers[0], identity=b"\1" * 32), *m.peers[1:])),
            "the long-term key of client 10 is not the one that is known",
        ),
        (
            lambda m, _: structs.replace(m, peers=(structs.replace(m.peers[0], masking=b"\1" * 32), *m.peers[1:])),
            "the keys of client 10 are not signed by it",
        ),
        (
            lambda m, _: structs.replace(m, peers=(structs.replace(m.peers[0], client=77), *m.peers[1:])),
            "the long-term key of client 77",
        ),
    ],
)
def test_a_roster_that_the_server_has_made_up_is_refused(change: Any, reason: str) -> None:
    world = SecureWorld(round_for(7, 21), 21)
    assert reason in leaves(world, swap(KeyRoster, change, to="client 11"), 11)


def test_questions_out_of_order_and_of_strangers_are_not_answered() -> None:
    world = SecureWorld(round_for(5, 22), 22)
    client, digest = world.clients[11].client, world.plan.digest
    client.begin(0.0)
    assert not client.on(Received("client 12", SecureInvite(digest)), 0.0)
    assert not client.on(Received(SERVER, SecureInvite(bytes(32))), 0.0)
    assert "who is not the server" in client.refusals[0]
    assert "of another round" in client.refusals[1]
    client.on(Received(SERVER, SurvivorList(digest, (10, 11, 12, 13))), 0.0)
    assert client.ended
    assert "asked out of order: DeliveredShares" in client.failure


def test_a_client_that_has_ended_has_forgotten_its_secrets() -> None:
    world = SecureWorld(round_for(4, 23), 23)
    Table(world).play()
    for each in world.clients.values():
        assert each.client.ended
        assert each.client._secrets is None
        assert not each.client._answers


# Time, deaths and restarts.


def test_a_client_without_an_update_leaves_and_the_others_go_on() -> None:
    world = SecureWorld(round_for(7, 24), 24)
    table = Table(world)
    world.clients[13].begin = lambda now: world.clients[13].client.on(Done(GIVE_UP, "the loss is NaN"), now)
    outcome = table.play()
    assert isinstance(outcome, SecureSum)
    assert 13 not in outcome.clients
    assert "it has left: the loss is NaN" in world.server.refused[0].reason
    assert table.now < 5.0, "nobody waits for who has left"


def test_a_dead_client_is_not_waited_for() -> None:
    world = SecureWorld(round_for(7, 25), 25, {13: Dropout(0, before=True)})
    table = Table(world)
    table.machines["client 13"].on = lambda *_: []
    world.server.begin(0.0)
    world.server.on(Ended("client 13"), 0.0)
    assert isinstance(table.play(), SecureSum)
    assert table.now < 5.0


def test_a_silent_client_ends_a_phase_only_at_its_deadline() -> None:
    world = SecureWorld(round_for(7, 26), 26)
    table = Table(world, without(DealtShares, of="client 13"))
    outcome = table.play()
    assert isinstance(outcome, SecureSum)
    assert 13 not in outcome.clients
    assert table.now == pytest.approx(5.0)
    # Each second it was asked again.
    assert sum(send.to == "client 13" and isinstance(send.message, KeyRoster) for _, send in table.sent) >= 5


def test_a_client_that_has_answered_waits_as_long_as_others_train() -> None:
    """Others may take ten times as long as its patience with a silent server."""
    world = SecureWorld(round_for(5, 26), 26, times=SecureTimes(phase=5.0, masks=600.0, repeat=20.0))
    table = Table(world, without(MaskedUpdate, of="client 13"))
    outcome = table.play()
    assert isinstance(outcome, SecureSum)
    assert table.now >= 600
    assert outcome.clients == (10, 11, 12, 14)


def test_a_client_that_the_server_forgets_ends_by_itself() -> None:
    world = SecureWorld(round_for(3, 27), 27)
    table = Table(world)
    client = world.clients[11]
    table.machines = {client.name: client}
    table.carry_out(client.name, client.begin(0.0))
    table.step()
    assert client.client.failure == "the server was silent for 60 s"


@pytest.mark.parametrize("after", range(1, 45, 2))
def test_a_server_that_is_restarted_at_any_moment_goes_on(after: int) -> None:
    """From its saved state, as bytes; what came after that is asked again."""
    plan = round_for(5, 28, signed=True)
    world = SecureWorld(plan, 28, {12: Dropout(2, before=True)})
    heard: list[Name] = []
    table = Table(world)
    saved = msgspec.msgpack.encode(world.server.state())

    def hand(sender: Name, send: Send) -> list[Send]:
        nonlocal saved
        if send.to == SERVER:
            heard.append(sender)
        elif sender == SERVER:
            saved = msgspec.msgpack.encode(world.server.state())
        return [send]

    table.hand = hand
    for name, machine in table.machines.items():
        table.carry_out(name, machine.begin(0.0))
    while len(heard) < after and world.server.outcome is None:
        table.step()
    state = msgspec.msgpack.decode(saved, type=SecureServerState)
    table.machines[SERVER] = world.server = SecureServer(plan, world.members, SecureTimes(5.0, 8.0, 1.0), state)
    table._timers = {key: at for key, at in table._timers.items() if key[0] != SERVER}
    table.carry_out(SERVER, world.server.begin(table.now))
    while world.server.outcome is None:
        table.step()
    assert isinstance(world.server.outcome, SecureSum)
    assert world.server.outcome.clients == (10, 11, 13, 14)
    assert fault_in(world.machines) is None
