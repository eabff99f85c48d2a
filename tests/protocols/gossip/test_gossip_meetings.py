"""Gossip and the meetings of those who take part, together in virtual time.

Workers step, mix in pairs, come to rest, and have all models summed by the coordinator, while others are killed,
stopped and cut off. Whoever hears of a mean hears of the same one, and those who live come to the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.protocols.gossip.machine import (
    GO_ON,
    PAUSE,
    STEPPED,
    Ask,
    CopyRow,
    Gossiper,
    Grant,
    Move,
    MoveHalfway,
    Refuse,
    Turn,
)
from offbeat.protocols.gossip.topology import GraphShape, mixing
from offbeat.protocols.machine import Done, Effect, Ended, Event, Payload, Received, Send, SetTimer, Start, Timer
from offbeat.protocols.servers.coordinator import Add, Changed, CoordinatorMachine, Total
from offbeat.protocols.servers.messages import COORDINATOR, Awaiting, Bring, ClusterView, Met, Timeouts
from offbeat.protocols.servers.messages import MeetingArrival as Come
from offbeat.protocols.servers.worker.client import ClientMachine
from offbeat.protocols.servers.worker.notices import Arrived, Completed, Departed, Failed, MeetRequest
from offbeat.simulate.machines import Fault, Kill, LossyNetwork, Partition, Simulation, Stop

CALM = 10.0
"""When faults cease."""
PATIENCE = 60.0
"""Virtual seconds in which everything must be over."""
ROUNDS = 4
STEPS = 3
TIMING = Timeouts(startup=5.0)

Outcome = tuple[tuple[int, ...], bytes]
"""Who came, and the sum of what they brought."""


class Member:
    """One worker: a machine of gossip, a client, a row, and a loop that steps and sometimes has all rows summed."""

    def __init__(self, world: World, rank: int, view: ClusterView, row: np.ndarray) -> None:
        self.world, self.rank, self.name = world, rank, f"worker {rank}"
        self.gossip = Gossiper(self.name, self.near(view.workers), world.seed + rank, 0.2)
        self.client = ClientMachine(rank, view, timing=TIMING)
        self.row, self.steps, self.round = row, 0, 0
        self.resting = self.meeting = self.fenced = self.finished = False
        self.total: Payload | None = None
        self.chance = Random(world.seed * 31 + rank)

    def near(self, members: Sequence[int]) -> list[str]:
        """The neighbours on a ring of these."""
        places = mixing(GraphShape.RING, len(members)).neighbours(members.index(self.rank))
        return [f"worker {members[place]}" for place in places]

    def begin(self, now: float) -> Sequence[Effect]:
        return self.passed_on([SetTimer(self.chance.random() * 0.1, "step"), *self.client.begin(now)], now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        if self.fenced or self.finished:
            return ()
        if event == Timer("step"):
            return self.passed_on(self.step(now), now)
        if isinstance(event, Received) and not isinstance(event.message, Ask | Grant | Refuse | Turn):
            return self.passed_on(self.client.on(event, now), now)
        if isinstance(event, Timer) and not isinstance(event.token, tuple):
            return self.passed_on(self.client.on(event, now), now)
        return self.passed_on(self.gossip.on(event, now), now)

    def step(self, now: float) -> list[Effect]:
        effects: list[Effect] = [SetTimer(0.02 + 0.1 * self.chance.random(), "step")]
        if self.resting:
            return effects
        self.steps += 1
        if self.steps % STEPS:
            return [*effects, *self.gossip.on(Done(STEPPED), now)]
        self.resting = True
        return [*effects, *self.gossip.on(Done(PAUSE), now)]

    def passed_on(self, effects: Iterable[Effect], now: float) -> list[Effect]:
        """What is for the network or for the row; what the client has to say is acted on."""
        done: list[Effect] = []
        waiting = list(effects)
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, Start) and isinstance(effect.work, Changed | Arrived | Completed | Departed | Failed):
                waiting += self.told(effect.work, now)
            else:
                done.append(effect)
        if self.resting and not self.meeting and self.gossip.at_rest and not self.fenced:
            self.meeting, self.total = True, None
            row = Payload(self.row.nbytes, self.row.copy())
            asked = self.client.ask(MeetRequest(f"mean ({self.round})", (1.0,), kind="float64", row=row), now)
            self.world.brought[self.round, self.rank] = self.row.copy()
            done += self.passed_on(asked.effects, now)
        return done

    def told(self, notice: Any, now: float) -> list[Effect]:
        match notice:
            case Changed(view):
                gone = [f"worker {rank}" for rank in range(self.world.size) if rank not in view.workers]
                news = [Ended(name) for name in gone]
                if self.rank in view.workers:
                    news += [Done(("near", name)) for name in self.near(view.workers)]
                return [effect for one in news for effect in self.gossip.on(one, now)]
            case Arrived(_, -1, _, payload):
                self.total = payload
            case Completed(_, ((_, Met() as met),)):
                assert self.total is not None
                self.world.outcomes[self.round][self.rank] = (met.ranks, self.total.handle.tobytes())
                self.round, self.resting, self.meeting = self.round + 1, False, False
                if self.round == ROUNDS:
                    self.finished = True
                    return list(self.client.leave())
                return list(self.gossip.on(Done(GO_ON), now))
            case Departed():
                self.fenced = True
            case _:
                raise AssertionError(f"{self.name} was told {notice}")
        return []

    def perform(self, work: Any) -> Payload | None:
        match work:
            case CopyRow():
                return Payload(self.row.nbytes, self.row.copy())
            case MoveHalfway(row):
                move = (row.handle - self.row) / 2
                self.row = self.row + move
                return Payload(move.nbytes, move)
            case Move(by):
                self.row = self.row - by.handle
            case _:
                pass
        return None


class Sums:
    """What the coordinator adds up."""

    def __init__(self) -> None:
        self.known: dict[str, np.ndarray] = {}
        self.most = 0

    def perform(self, work: Any) -> Payload | None:
        match work:
            case Add(what, _, row):
                self.known[what] = self.known.get(what, 0.0) + row.handle
                self.most = max(self.most, len(self.known))
            case Total(what):
                total = self.known.pop(what)
                return Payload(total.nbytes, total)
            case _:
                pass
        return None


class World:
    def __init__(
        self,
        size: int,
        seed: int,
        network: LossyNetwork | None = None,
        faults: Sequence[Fault] = (),
        coordinator: type[CoordinatorMachine] = CoordinatorMachine,
    ) -> None:
        self.size, self.seed = size, seed
        self.outcomes: dict[int, dict[int, Outcome]] = defaultdict(dict)
        self.brought: dict[tuple[int, int], np.ndarray] = {}
        self.rows = np.random.default_rng(seed).normal(size=(size, 4))
        view = ClusterView.of(size, 0)
        self.members = [Member(self, rank, view, self.rows[rank]) for rank in range(size)]
        self.sums = Sums()
        perform = {member.name: member.perform for member in self.members} | {COORDINATOR: self.sums.perform}
        machines = [*self.members, coordinator(view, timing=TIMING)]
        self.simulation = Simulation(machines, seed=seed, network=network, faults=faults, perform=perform)

    def run(self) -> World:
        living = [member for member in self.members if self.simulation.alive(member.name)]
        self.simulation.run(PATIENCE, until=lambda: all(m.finished or m.fenced for m in living))
        return self

    def judge(self) -> None:
        """Of each round one outcome, which is the sum of what those who are in it brought."""
        for number, heard in self.outcomes.items():
            assert len(set(heard.values())) == 1, f"round {number}: {heard}"
            ranks, total = next(iter(heard.values()))
            expected = sum(self.brought[number, rank] for rank in ranks)
            np.testing.assert_allclose(np.frombuffer(total), expected, atol=1e-9)
        stuck = [m.name for m in self.members if self.simulation.alive(m.name) and not (m.finished or m.fenced)]
        assert not stuck, f"{stuck} came to no end"
        assert not self.sums.known


def test_the_mean_of_all_is_that_of_the_run_where_nobody_dies() -> None:
    world = World(5, 1, LossyNetwork(jitter=0.02)).run()
    world.judge()
    for number in range(ROUNDS):
        ranks, total = world.outcomes[number][0]
        assert ranks == (0, 1, 2, 3, 4)
        np.testing.assert_allclose(np.frombuffer(total) / 5, world.rows.mean(axis=0), atol=1e-9)
    assert all(member.gossip.met for member in world.members)
    assert world.sums.most == 1, "one sum at a time"


NAMES = [f"worker {rank}" for rank in range(5)]
kills = st.builds(Kill, st.sampled_from(NAMES[:4]), st.floats(0, CALM), st.one_of(st.none(), st.floats(0, 0.5)))
others = st.one_of(
    st.builds(Stop, st.sampled_from(NAMES), st.floats(0, CALM), st.floats(0.1, 4)),
    st.builds(
        Partition, st.frozensets(st.sampled_from(NAMES), min_size=1, max_size=2), st.floats(0, CALM), st.floats(0.1, 2)
    ),
)
networks = st.builds(
    LossyNetwork,
    delay=st.floats(1e-4, 0.05),
    jitter=st.floats(0, 0.1),
    loss=st.floats(0, 0.2),
    duplicate=st.floats(0, 0.3),
    ordered=st.booleans(),
    until=st.just(CALM),
)


@settings(max_examples=60)
@given(st.integers(0, 10_000), networks, st.lists(kills, max_size=3), st.lists(others, max_size=3))
def test_whoever_hears_of_a_mean_hears_of_the_same_one(
    seed: int, network: LossyNetwork, deaths: list[Kill], more: list[Fault]
) -> None:
    world = World(5, seed, network, [*deaths, *more]).run()
    world.judge()
    killed = {death.name for death in deaths}
    touched = killed | {
        name for fault in more for name in (fault.names if isinstance(fault, Partition) else [fault.name])
    }
    if network.loss < 0.05 and not touched:
        assert all(member.finished for member in world.members)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("seed", range(12))
def test_one_that_dies_in_the_middle_of_a_mean_is_in_it_for_all_or_for_none(rank: int, seed: int) -> None:
    """The moment is that at which it has come, give or take a little."""
    plain = World(4, seed)
    plain.simulation.run(PATIENCE, until=lambda: (1, rank) in plain.brought)
    at = plain.simulation.now + 0.004 * (seed / 6 - 1)
    world = World(4, seed, faults=[Kill(f"worker {rank}", at, 0.001 * seed)]).run()
    world.judge()
    assert all(member.finished for member in world.members if member.rank != rank)
    assert len(world.outcomes[ROUNDS - 1]) == 3


def test_a_ring_that_was_torn_is_closed_again() -> None:
    """Of four on a ring two die that are not neighbours: the others meet no one, unless they meet each other."""
    world = World(4, 5, faults=[Kill("worker 0", 0.2, 0.01), Kill("worker 2", 0.25, 0.01)])
    world.simulation.run(0.4)
    met = [world.members[rank].gossip.met + world.members[rank].gossip.granted for rank in (1, 3)]
    world.run().judge()
    for rank, before in zip((1, 3), met, strict=True):
        assert world.members[rank].gossip.met + world.members[rank].gossip.granted > before
    assert world.members[1].finished
    assert world.members[3].finished


class Doubling(CoordinatorMachine):
    """Forgets who has brought a row already."""

    def _meet(self, message: Come, row: Payload) -> None:
        meeting = self.meetings._meetings.get(message.what)
        if meeting is not None and not meeting.over:
            meeting.values.pop(message.worker, None)
        super()._meet(message, row)


def test_a_coordinator_that_adds_a_row_twice_is_found_out() -> None:
    with pytest.raises(AssertionError):
        World(4, 3, LossyNetwork(duplicate=0.5), coordinator=Doubling).run().judge()


class Restless(Gossiper):
    """Says that it rests while its last move is still to be made."""

    @property
    def at_rest(self) -> bool:
        return self._paused and not self._open


def test_a_worker_that_rests_too_early_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_gossip_meetings.Gossiper", Restless)
    with pytest.raises(AssertionError):
        test_the_mean_of_all_is_that_of_the_run_where_nobody_dies()


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_a_row_that_was_lost_is_asked_for_and_is_not_sent_again_otherwise() -> None:
    view = ClusterView.of(2, 0)
    client, coordinator = ClientMachine(0, view, timing=TIMING), CoordinatorMachine(view, timing=TIMING)
    coordinator.begin(0.0)
    client.begin(0.0)
    row = Payload(8, "row")
    (first,) = client.ask(MeetRequest("mean", kind="float64", row=row), 0.0).effects
    assert isinstance(first, Send)
    assert first.payload == row
    again = [effect for effect in client.on(Timer("tick"), 1.0) if isinstance(effect, Send)]
    (repeated,) = [effect for effect in again if isinstance(effect.message, Come)]
    assert repeated.payload.nbytes == 0
    (bring,) = coordinator.on(Received("worker 0", repeated.message), 1.0)
    assert isinstance(bring, Send)
    assert isinstance(bring.message, Bring)
    (sent,) = client.on(Received(COORDINATOR, bring.message), 1.0)
    assert isinstance(sent, Send)
    assert (sent.message, sent.payload) == (first.message, row)
    (added,) = coordinator.on(Received("worker 0", sent.message, row), 1.1)
    assert added == Start(Add("mean", "float64", row))
    (waiting,) = coordinator.on(Received("worker 0", sent.message, row), 1.2)
    assert isinstance(waiting, Send), "not added twice"
    assert waiting.message == Awaiting(number=first.message.number, workers=(1,))
    client.on(Received(COORDINATOR, waiting.message), 1.3)
    (failed,) = [e.work for e in client.on(Timer("tick"), 1000.0) if isinstance(e, Start)]
    assert failed == Failed(1, ("worker 1",)), "who has not come is named"


def test_one_who_is_declared_dead_is_not_heard_and_its_place_can_be_taken() -> None:
    machine = Gossiper("worker 0", ["worker 1", "worker 2"], seed=0)
    machine.on(Received("worker 1", Ask(7), Payload(8, "row")), 0.0)
    machine.on(Done(("met", "worker 1", 7, 0), Payload(8, "move")), 0.0)
    machine.on(Ended("worker 1"), 0.0)
    assert machine.on(Received("worker 1", Ask(8), Payload(8, "row")), 0.1) == []
    assert machine.on(Received("worker 1", Ask(7), Payload(8, "row")), 0.1) == [], "nor is a decision repeated"
    assert machine.on(Ended("worker 1"), 0.2) == [], "it has died once"
    (found,) = machine.on(Done(("near", "worker 1")), 0.3)
    assert isinstance(found, Start)
    (met,) = machine.on(Received("worker 1", Ask(1), Payload(8, "row")), 0.4)
    assert isinstance(met, Start)
    assert met.work == MoveHalfway(Payload(8, "row")), "the new one counts its questions from the beginning"


def test_who_waits_for_one_that_dies_comes_to_rest() -> None:
    machine = Gossiper("worker 0", ["worker 1"], seed=0)
    (read,) = machine.on(Done(STEPPED), 0.0)
    assert isinstance(read, Start)
    machine.on(Done(read.token, Payload(8, "row")), 0.0)
    machine.on(Done(PAUSE), 0.1)
    assert (machine.at_rest, machine.asked) == (False, ["worker 1"])
    machine.on(Ended("worker 1"), 0.2)
    assert machine.at_rest
