"""Secure sums of deployed rounds in virtual time: right or refused with the reason, whatever dies, is lost or late."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from federated_worlds import ServerDisk, deaths
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from secure_worlds import MaskingClient, SummingServer, secure_terms

from offbeat.errors import UsageError
from offbeat.protocols.federated.federation_state import HOPELESS
from offbeat.protocols.federated.messages import (
    SERVER,
    Beat,
    Examined,
    MembershipRequest,
    SecureStart,
)
from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.federated.roster import Roster
from offbeat.protocols.federated.round_server import RoundServer
from offbeat.protocols.federated.secure_sums import SecureProgress, SumKeeper, agreed
from offbeat.protocols.machine import Done, Payload, Received
from offbeat.simulate.machines import LossyNetwork, Restart, Simulation, Stop


@hypothesis_settings(max_examples=60)
@given(seed=st.integers(0, 10**9))
def test_every_sum_is_right_or_refused_with_a_reason_under_any_faults(seed: int) -> None:
    random = Random(seed)
    count, rounds, calm = random.randint(3, 7), random.randint(1, 3), 60.0
    rules = RoundPlan(clients=count, fraction=1.0, beat=1.0, silence=4.0, deadline=random.choice([None, 15.0]))
    clients = [MaskingClient(client, random) for client in range(count)]
    disk, dies = ServerDisk(), deaths(random, random.choice([0.0, 0.02, 0.1]), most=15)
    network = LossyNetwork(
        delay=random.uniform(0.0, 0.2),
        jitter=random.choice([0.0, 0.3]),
        loss=random.choice([0.0, 0.2]),
        duplicate=random.choice([0.0, 0.2]),
        until=calm,
    )

    def started() -> SummingServer:
        return SummingServer(rules, rounds, disk, dies, random)

    simulation = Simulation([started(), *clients], seed=seed, network=network)
    for _ in range(random.randint(0, 4)):
        lost = random.randrange(count)
        if random.random() < 0.5:
            simulation.add([Stop(clients[lost].name, random.uniform(0, calm), random.uniform(0.5, 8))])
        else:
            again = lambda lost=lost: MaskingClient(lost, random)  # noqa: E731
            simulation.add([Restart(clients[lost].name, random.uniform(0, calm), again)])

    def server() -> SummingServer:
        machine: Any = simulation.machine(SERVER)
        return machine

    def over() -> bool:
        if server().dead:
            simulation.add([Restart(SERVER, simulation.now, started)])
        return server().inner.state.phase == "finished"

    assert simulation.run(4000.0, until=over), server().inner.state
    assert disk.wrong == []
    state = server().inner.state
    assert state.number == rounds or state.fruitless >= HOPELESS
    assert all(outcome.failed or len(outcome.participants) >= 3 for outcome in disk.closed.values())


def test_rounds_without_faults_sum_the_updates_of_all() -> None:
    random, disk = Random(1), ServerDisk()
    rules = RoundPlan(clients=4, fraction=1.0, beat=1.0, silence=4.0)
    server = SummingServer(rules, 3, disk, lambda: "", random)
    simulation = Simulation([server, *(MaskingClient(client, random) for client in range(4))], seed=1)
    assert simulation.run(200.0, until=lambda: server.inner.state.phase == "finished")
    assert [sorted(outcome.participants) for outcome in disk.closed.values()] == [[0, 1, 2, 3]] * 3
    assert disk.wrong == []


@pytest.mark.parametrize(
    ("identity", "why"), [(b"", "needs the cryptography package"), (b"2" * 32, "not the one it joined with")]
)
def test_a_client_without_its_signing_key_may_not_join(identity: bytes, why: str) -> None:
    roster = Roster({}, 3, None, 4.0, signing=True)
    first = MembershipRequest("a", 0, b"1" * 32)
    assert roster.why_not("a", first) == ""
    roster.admit("a", first, 0.0)
    assert why in roster.why_not("a", MembershipRequest("a", 0, identity))


def test_a_private_sum_needs_two_thirds_of_all_that_were_selected() -> None:
    """Not only of those that have trained: as many share the noise."""
    roster = Roster({}, 10, None, 4.0, signing=True)
    for client in range(10):
        roster.admit(f"{client}", MembershipRequest(f"{client}", client, bytes([client]) * 32), 0.0)
        roster.members[f"{client}"].examples = 5
    terms = secure_terms(Random(1))
    keeper = SumKeeper(terms, roster, SERVER, 1.0)
    private = SumKeeper(replace(terms, two_thirds=True), roster, SERVER, 1.0)
    plans = [each.plan(range(10), range(8), 1) for each in (keeper, private)]
    assert all(isinstance(each, SecureProgress) for each in plans)
    assert [each.plan.fewest for each in plans if isinstance(each, SecureProgress)] == [6, 7]
    short = private.plan(range(10), range(6), 1)
    assert isinstance(short, str)
    assert "6 of 10 clients have trained, and the noise is shared by 7" in short


def test_a_plan_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(UsageError, match="plan of a secure sum cannot be read"):
        agreed(SecureStart(1, b"nonsense"))


def test_a_client_that_claims_more_examples_than_can_be_weighed_takes_no_part_and_others_go_on() -> None:
    """Its weight would leave no room in the sum of the others'."""
    rules = RoundPlan(clients=4, fraction=1.0, beat=1.0, silence=4.0)
    server = RoundServer(SERVER, rules, 0, 1, Payload(8), 8, first=3, secure=secure_terms(Random(1)))
    server.begin(0.0)
    for client in range(4):
        request = MembershipRequest(f"{client}", client, bytes([client]) * 32)
        server.on(Done(("join", f"{client}", request), Examined()), 0.0)
        for _ in range(2):
            server.on(Received(f"{client}", Beat(0, "idle", 2**31 if client == 0 else 5), Payload(0)), 0.0)
    assert server.state.phase == "gathering"
    assert sorted(server.state.round.cohort) == [1, 2, 3]
    ((name, trouble),) = server.troubles
    assert (name, trouble.error[:27]) == ("0", "it has 2,147,483,648 exampl")
    assert "by 1,073,741,823 at most" in trouble.error
