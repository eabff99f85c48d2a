"""An asynchronous federated server as a machine: equal to virtual steps, and right under faults."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from federated_worlds import SavedServer, ServerDisk, WorkingClient, deaths
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from offbeat.protocols.federated.buffered_turns import BufferedTurns, BufferState
from offbeat.protocols.federated.federation_state import HOPELESS
from offbeat.protocols.federated.messages import SERVER, Beat, Examine, Examined, MembershipRequest, Settled, UpdateSent
from offbeat.protocols.federated.plan import ClientSpeeds, RoundPlan
from offbeat.protocols.federated.round_server import RoundServer
from offbeat.protocols.machine import Done, Payload, Received, Send, Start
from offbeat.simulate.federated import VirtualRounds
from offbeat.simulate.machines import LossyNetwork, Partition, Restart, Simulation


def plan(**changes: Any) -> RoundPlan:
    return RoundPlan(**{"clients": 6, "fraction": 0.5, "buffer": 2, "beat": 1.0, "silence": 7.3, **changes})


@hypothesis_settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(3, 12),
    fraction=st.sampled_from([0.3, 0.5, 1.0]),
    buffer=st.integers(1, 3),
)
def test_virtual_steps_equal_the_machine_played_message_by_message(
    seed: int, clients: int, fraction: float, buffer: int
) -> None:
    # Without a deadline: a real client that was late is not drawn while it is still stopping.
    rules = plan(clients=clients, fraction=fraction, buffer=buffer, speeds=ClientSpeeds(6.0, 0.7))
    sizes = np.random.default_rng(seed).integers(1, 9, clients).tolist()
    rounds = VirtualRounds(rules, sizes, 8, 8, seed)
    takes = rounds._fleet.takes(np.arange(clients)).sum(axis=0).tolist()
    expected = [next(rounds) for _ in range(5)]
    parties = [
        WorkingClient(client, size, lambda _task, client=client: (takes[client], math.inf))
        for client, size in enumerate(sizes)
    ]
    disk = ServerDisk()
    server = SavedServer(rules, seed, 5, disk)
    simulation = Simulation([server, *parties], network=LossyNetwork(delay=0.0, ordered=True))
    assert simulation.run(1e6, until=lambda: server.inner.state.phase == "finished")
    assert disk.wrong == []
    for outcome in expected:
        real = disk.closed[outcome.number]
        assert [(turn.client, turn.version, turn.number) for turn in real.turns] == [
            (each.client, each.version, each.turn) for each in outcome.participants
        ]
        assert real.cohort == outcome.cohort
        assert real.ended - real.started == pytest.approx(outcome.ended - outcome.started, abs=1e-6)


@hypothesis_settings(max_examples=60)
@given(seed=st.integers(0, 10**9))
def test_every_step_has_its_updates_once_whoever_is_lost_or_hangs_and_whenever_the_server_dies(seed: int) -> None:
    random = Random(seed)
    count, steps, calm = random.randint(2, 6), random.randint(1, 5), 60.0
    rules = plan(
        clients=count, fraction=random.choice([0.4, 1.0]), buffer=random.randint(1, max(1, count - 1)), patience=10.0
    )
    hangs = {(0, random.randint(1, 4))} if count > 3 else set[tuple[int, int]]()

    def takes(client: int, number: int) -> tuple[float, float]:
        return (math.inf if (client, number) in hangs else random.uniform(0.1, 6.0)), math.inf

    parties = [
        WorkingClient(client, random.randint(1, 5), lambda task, client=client: takes(client, task.number))
        for client in range(count)
    ]
    disk, dies = ServerDisk(), deaths(random, random.choice([0.0, 0.02, 0.1]), most=15)

    def started() -> SavedServer:
        return SavedServer(rules, seed, steps, disk, dies)

    network = LossyNetwork(
        delay=random.uniform(0.0, 0.2), jitter=random.choice([0.0, 0.3]), loss=random.choice([0.0, 0.2]), until=calm
    )
    simulation = Simulation([started(), *parties], seed=seed, network=network)
    names = [SERVER, *(party.name for party in parties)]
    simulation.add([Partition(frozenset([random.choice(names)]), random.uniform(0, calm), 9.0)] * random.randint(0, 1))

    def over() -> bool:
        server: Any = simulation.machine(SERVER)
        if server.dead:
            simulation.add([Restart(SERVER, simulation.now, started)])
        return server.inner.state.phase == "finished"

    assert simulation.run(4000.0, until=over), simulation.machine(SERVER)
    assert disk.wrong == []
    assert sorted(disk.closed) == list(range(1, steps + 1))
    used = [turn.number for outcome in disk.closed.values() for turn in outcome.turns]
    assert len(used) == len(set(used)), "an update counted twice"
    for outcome in disk.closed.values():
        assert len(set(outcome.participants)) == len(outcome.participants) == rules.buffer
        assert all(0 <= turn.version <= outcome.version for turn in outcome.turns)


def test_turns_go_on_to_the_same_clients_after_a_restart() -> None:
    sizes, seed = np.ones(6, np.int64), 3

    def asked(restart: bool) -> list[int]:
        state, clients = BufferState(), list[int]()
        turns = BufferedTurns(plan(), state, seed)
        for _ in range(10):
            clients += [turn.client for turn in turns.begin(sizes, 0)]
            if turns.arrived(state.at_work[0]):
                turns.step()
            if restart:
                turns = BufferedTurns(plan(), state, seed)
        return clients

    assert asked(restart=False) == asked(restart=True)


# -- one message at a time --------------------------------------------------------------------------------------------


class Desk:
    """An asynchronous server of three clients, all of which are at work."""

    def __init__(self, **changes: Any) -> None:
        self.server = RoundServer(SERVER, plan(clients=3, fraction=1.0, **changes), 0, 9, Payload(8), 8)
        self.server.begin(0.0)
        for client in range(3):
            self.hear(client, MembershipRequest(f"party {client}", client))
            self.hear(client, Beat(0, "idle", 5))
        assert len(self.server.state.outstanding) == 3

    def hear(self, client: int, message: Any, nbytes: int = 0) -> list[Any]:
        todo, sent = list(self.server.on(Received(f"client {client}", message, Payload(nbytes)), 1.0)), list[Any]()
        while todo:
            effect = todo.pop(0)
            if isinstance(effect, Send):
                sent.append(effect.message)
            elif isinstance(effect, Start) and effect.token not in (None, "closed"):
                result = Examined() if isinstance(effect.work, Examine) else ""
                todo += self.server.on(Done(effect.token, result), 1.0)
        return sent

    def update(self, client: int, version: int = 0, nbytes: int = 8) -> list[Any]:
        return self.hear(client, UpdateSent(self.server.state.due(client), 0.5, 5, version=version), nbytes)


def test_a_second_copy_of_an_update_is_in_the_buffer_once() -> None:
    desk = Desk()
    number = desk.server.state.due(1)
    assert Settled(number, "accepted") in desk.update(1)
    assert Settled(number, "accepted") in desk.hear(1, UpdateSent(number, 0.5, 5), 8)
    assert desk.server.state.round.came == [1]
    assert desk.server.state.counts["duplicates"] == 1


def test_an_update_from_a_version_that_the_client_cannot_have_is_refused() -> None:
    desk = Desk()
    (settled,) = [message for message in desk.update(1, version=7) if isinstance(message, Settled)]
    assert settled.fate == "refused"
    assert "version 7" in settled.why


def test_a_buffer_that_nobody_is_left_to_fill_says_so() -> None:
    desk = Desk(buffer=3)
    for client in (0, 1):
        desk.update(client)
    desk.server.roster.stuck.add(2)
    desk.update(2, nbytes=9)
    assert desk.server.missing == "2 of the 3 updates of a step have come, and no further client is there"


def test_an_asynchronous_server_whose_clients_send_nothing_of_use_ends() -> None:
    desk = Desk(buffer=1)
    for _ in range(HOPELESS):
        desk.update(0, nbytes=9)
    assert desk.server.state.phase == "finishing"
    assert desk.server.state.fruitless == HOPELESS
