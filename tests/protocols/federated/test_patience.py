"""Clients that give signs of life and never finish: what they cost a round, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from federated_worlds import SavedServer, ServerDisk, WorkingClient, deaths
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.federated.messages import SERVER, RoundTask
from offbeat.protocols.federated.plan import LONGEST, Patience, RoundPlan
from offbeat.simulate.machines import LossyNetwork, Restart, Simulation

NEVER = math.inf
RULES = RoundPlan(clients=3, fraction=1.0, beat=1.0, silence=4.0, patience=10.0)

Takes = Callable[[int, RoundTask], float]
"""Seconds of training of a client for a task."""


def federation(takes: Takes, rules: RoundPlan, rounds: int, dies: Any = lambda: "", seed: int = 1) -> Any:
    """A finished federation: its server, what it did, and the seconds that it took."""
    clients = [
        WorkingClient(client, 5, lambda task, client=client: (takes(client, task), NEVER))
        for client in range(rules.clients)
    ]
    disk = ServerDisk()

    def started() -> SavedServer:
        return SavedServer(rules, seed, rounds, disk, dies)

    simulation = Simulation([started(), *clients], seed=seed, network=LossyNetwork(delay=0.01))

    def over() -> bool:
        server: Any = simulation.machine(SERVER)
        if server.dead:
            simulation.add([Restart(SERVER, simulation.now, started)])
        return server.inner.state.phase == "finished"

    assert simulation.run(2000.0, until=over), "the federation never ended"
    assert disk.wrong == []
    server: Any = simulation.machine(SERVER)
    return server.inner, disk.closed, simulation.now


# -- the rule ---------------------------------------------------------------------------------------------------------


def test_the_wait_is_a_multiple_of_the_slowest_time_that_is_known() -> None:
    rule = Patience(10.0, least=30.0)
    assert rule.wait([4.0, 7.0, 5.0], [], 3, 0) == 70.0
    assert rule.wait([4.0], [9.0, 8.0], 3, 0) == 90.0
    assert rule.wait([7.0, *[4.0] * 10], [], 3, 0) == 40.0, "only the last ten rounds count"
    assert rule.wait([0.1], [], 3, 0) == 30.0


def test_the_times_of_a_round_count_when_half_of_its_clients_are_done() -> None:
    rule = Patience(10.0, least=1.0)
    assert rule.wait([], [2.0] * 4, 10, 0) == LONGEST
    assert rule.wait([], [2.0] * 5, 10, 0) == 20.0
    assert rule.wait([], [2.0], 2, 0) == 20.0


def test_the_wait_is_bounded_by_a_day_and_doubles_with_every_round_without_an_update() -> None:
    rule = Patience(10.0, least=30.0)
    assert rule.wait([], [], 1, 0) == LONGEST
    assert rule.wait([80_000.0], [], 1, 0) == LONGEST
    assert [rule.wait([5.0], [], 1, fruitless) for fruitless in (0, 1, 2)] == [50.0, 100.0, 200.0]


@pytest.mark.parametrize("patience", [0.0, 0.5, -1.0, math.nan, 1001.0])
def test_a_patience_that_makes_no_sense_is_refused(patience: float) -> None:
    with pytest.raises(UsageError, match="makes no sense: a client may take"):
        RoundPlan(clients=3, patience=patience)


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_a_client_that_never_finishes_costs_a_round_only_itself() -> None:
    server, closed, seconds = federation(lambda client, _task: NEVER if client == 1 else 2.0, RULES, rounds=4)
    assert [closed[number].late for number in sorted(closed)] == [(1,), (), (), ()]
    assert [set(closed[number].participants) for number in sorted(closed)] == [{0, 2}] * 4
    assert 1 not in closed[2].cohort, "it is still at work, so it gets no new task"
    # One wait of ten times the others' 2 s; in the end it is known to be stuck, and not waited for.
    assert 20.0 < seconds < 40.0
    (trouble,) = [words for name, words in server.troubles if name == "client 1"]
    assert "still at work after 2" in trouble.error
    assert "10 times" in trouble.error


def test_a_client_that_stops_when_it_is_told_to_takes_part_again() -> None:
    _, closed, _ = federation(lambda client, task: 500.0 if client == 1 and task.number == 1 else 2.0, RULES, rounds=4)
    assert closed[1].late == (1,)
    assert 1 in closed[3].participants


def test_the_only_client_of_a_round_may_take_as_long_as_ten_times_those_of_earlier_rounds() -> None:
    rules = RoundPlan(clients=1, fraction=1.0, beat=1.0, silence=4.0, patience=10.0)
    _, closed, _ = federation(lambda _client, task: (3.0, 25.0, 900.0, 3.0)[task.number - 1], rules, rounds=4)
    assert [closed[number].late for number in sorted(closed)] == [(), (), (0,), ()]
    # Before anything is known the wait is long, and slow clients only raise it.
    assert closed[3].ended - closed[3].started == pytest.approx(250.0, rel=0.02)


def test_a_deadline_takes_the_place_of_the_patience() -> None:
    rules = RoundPlan(clients=3, fraction=1.0, beat=1.0, silence=4.0, patience=10.0, deadline=100.0)
    _, closed, _ = federation(lambda client, _task: 90.0 if client == 1 else 2.0, rules, rounds=2)
    assert all(len(outcome.participants) == 3 for outcome in closed.values())


@hypothesis_settings(max_examples=60)
@given(seed=st.integers(0, 10**9))
def test_rounds_end_whoever_hangs_whenever_the_server_is_killed(seed: int) -> None:
    random = Random(seed)
    count, rounds = random.randint(3, 6), random.randint(2, 4)
    hang = {(0, random.randint(1, rounds)), (random.randrange(2), random.randint(2, rounds))}
    rules = RoundPlan(clients=count, fraction=1.0, beat=1.0, silence=4.0, patience=10.0)
    _, closed, seconds = federation(
        lambda client, task: NEVER if (client, task.number) in hang else random.uniform(0.1, 4.0),
        rules,
        rounds,
        deaths(random, random.choice([0.0, 0.05]), most=10),
        seed,
    )
    assert seconds < 300.0
    assert len(closed) == rounds
    for number, outcome in closed.items():
        assert not {client for client, at in hang if at == number} & set(outcome.participants)
