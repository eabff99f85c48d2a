"""Gossip without a beat, in virtual time: no move is made twice or by one side only, and the living come to agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
)
from offbeat.protocols.gossip.topology import GraphShape, mixing
from offbeat.protocols.machine import NOTHING, Done, Effect, Ended, Event, Payload, Received, Send, SetTimer, Timer
from offbeat.simulate.machines import Fault, Kill, LossyNetwork, Partition, Simulation, Stop

CALM = 20.0
"""Seconds after which nothing is lost or delayed for long any more."""


@dataclass
class Stepping:
    """A worker that steps now and then: the machine, a row of numbers, and an account of all moves."""

    name: str
    inner: Gossiper
    row: np.ndarray
    interval: float
    seed: int
    moves: dict[tuple[str, str, int], np.ndarray] = field(default_factory=dict)
    """By asker, neighbour and number: what was granted and not yet taken back; shared by all."""

    def __post_init__(self) -> None:
        self.chance = Random(self.seed)

    def begin(self, now: float) -> Sequence[Effect]:
        return [SetTimer(self.chance.random() * self.interval, "step")]

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        if event == Timer("step"):
            wait = self.interval * (0.5 + self.chance.random())
            return [SetTimer(wait, "step"), *self.inner.on(Done(STEPPED), now)]
        effects = self.inner.on(event, now)
        if isinstance(event, Received) and any(hasattr(e, "work") and isinstance(e.work, Move) for e in effects):
            assert isinstance(event.message, Grant)
            self.moves.pop((self.name, event.sender, event.message.number))
        if isinstance(event, Done) and isinstance(event.token, tuple) and event.token[0] == "met":
            asker, number = event.token[1:3]
            assert (asker, self.name, number) not in self.moves, "granted twice"
            self.moves[asker, self.name, number] = event.result.handle
        return effects

    def perform(self, work: Any) -> Payload:
        match work:
            case CopyRow():
                return Payload(self.row.nbytes, self.row.copy())
            case MoveHalfway(row):
                move = (row.handle - self.row) / 2
                self.row = self.row + move
                return Payload(move.nbytes, move)
            case Move(by):
                self.row = self.row - by.handle
        return NOTHING


class World:
    """Workers on a graph, with rows that lie apart."""

    def __init__(
        self,
        size: int,
        shape: GraphShape,
        seed: int = 0,
        network: LossyNetwork | None = None,
        faults: Sequence[Fault] = (),
        machine: Callable[..., Gossiper] = Gossiper,
    ) -> None:
        made = mixing(shape, size)
        moves: dict[tuple[str, str, int], np.ndarray] = {}
        rows = np.random.default_rng(seed).normal(size=(size, 3))
        self.workers = [
            Stepping(
                f"worker {rank}",
                machine(f"worker {rank}", [f"worker {k}" for k in made.neighbours(rank)], seed + rank, 0.2),
                rows[rank],
                0.1,
                seed * 31 + rank,
                moves,
            )
            for rank in range(size)
        ]
        self.moves = moves
        self.mean = rows.mean(axis=0)
        work = {worker.name: worker.perform for worker in self.workers}
        self.simulation = Simulation(self.workers, seed=seed, network=network, faults=faults, perform=work)

    def living(self) -> list[Stepping]:
        return [worker for worker in self.workers if self.simulation.alive(worker.name)]

    def conserved(self) -> None:
        """The mean of all rows, with what was granted and not yet taken back, is what it was."""
        total = sum(worker.row for worker in self.workers) - sum(self.moves.values())
        np.testing.assert_allclose(total / len(self.workers), self.mean, atol=1e-9)

    def apart(self) -> float:
        rows = np.array([worker.row for worker in self.living()])
        return float(np.linalg.norm(rows - rows.mean(axis=0)))

    def run(self, until: float, every: float = 1.0) -> None:
        while self.simulation.now < until:
            before = self.simulation.now
            self.simulation.run(min(until, before + every))
            if len(self.living()) == len(self.workers):
                self.conserved()
            if self.simulation.now == before:
                self.simulation.now = min(until, before + every)

    def tell(self, word: str) -> None:
        for worker in self.living():
            effects = worker.inner.on(Done(word), self.simulation.now)
            self.simulation.carry_out(worker.name, effects)


@pytest.mark.parametrize("shape", list(GraphShape))
@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_come_to_the_mean(shape: GraphShape, size: int) -> None:
    world = World(size, shape, network=LossyNetwork(jitter=0.01))
    apart = world.apart()
    world.run(30.0)
    assert world.apart() < 1e-4 * apart
    assert all(worker.inner.met > 20 for worker in world.workers)
    world.conserved()


faults = st.lists(
    st.one_of(
        st.builds(Stop, st.sampled_from([f"worker {k}" for k in range(5)]), st.floats(0, 15), st.floats(0.1, 5)),
        st.builds(
            Partition,
            st.frozensets(st.sampled_from([f"worker {k}" for k in range(5)]), min_size=1, max_size=3),
            st.floats(0, 15),
            st.floats(0.1, 5),
        ),
    ),
    max_size=4,
)
networks = st.builds(
    LossyNetwork,
    delay=st.floats(1e-4, 0.05),
    jitter=st.floats(0, 0.3),
    loss=st.floats(0, 0.3),
    duplicate=st.floats(0, 0.3),
    ordered=st.booleans(),
    until=st.just(CALM),
)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(0, 10_000), st.sampled_from(list(GraphShape)), networks, faults)
def test_losses_delays_stops_and_partitions_cost_only_time(
    seed: int, shape: GraphShape, network: LossyNetwork, faults: list[Fault]
) -> None:
    world = World(6, shape, seed, network, faults)
    world.run(CALM + 5)
    world.tell(PAUSE)
    world.run(CALM + 60)
    assert all(worker.inner.at_rest for worker in world.workers)
    assert not world.moves
    np.testing.assert_allclose(np.mean([w.row for w in world.workers], axis=0), world.mean, atol=1e-9)
    apart = world.apart()
    world.tell(GO_ON)
    world.run(CALM + 100)
    assert world.apart() < 0.1 * apart + 1e-9


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.integers(0, 10_000),
    networks,
    st.dictionaries(st.sampled_from(["worker 1", "worker 3"]), st.floats(0, 15), min_size=1),
    st.booleans(),
)
def test_the_living_agree_without_the_dead(
    seed: int, network: LossyNetwork, deaths: dict[str, float], told: bool
) -> None:
    world = World(5, GraphShape.COMPLETE, seed, network, [Kill(name, at) for name, at in deaths.items()])
    world.run(CALM)
    if told:
        for worker in world.living():
            for name in deaths:
                world.simulation.carry_out(worker.name, worker.inner.on(Ended(name), world.simulation.now))
    apart = world.apart()
    met = [worker.inner.met for worker in world.living()]
    world.run(CALM + 60)
    assert world.apart() < 0.05 * apart + 1e-9
    assert all(w.inner.met > before + 5 for w, before in zip(world.living(), met, strict=True))
    if told:
        world.tell(PAUSE)
        world.run(CALM + 70)
        assert all(worker.inner.at_rest for worker in world.living())


def test_a_slow_neighbour_holds_nobody_up_and_its_late_answer_counts() -> None:
    world = World(3, GraphShape.COMPLETE, faults=[Stop("worker 2", 1.0, 10.0)])
    world.run(1.5)
    met = world.workers[0].inner.met
    world.run(10.9)
    assert world.workers[0].inner.met > met + 20
    assert 1 <= world.workers[0].inner.overdue + world.workers[1].inner.overdue <= 4
    world.run(20.0)
    world.conserved()
    assert world.apart() < 1e-4


# --- by hand


class Hand:
    """One worker, whose messages a test writes."""

    def __init__(self, name: str = "b", neighbours: Sequence[str] = ("a", "c")) -> None:
        self.machine = Gossiper(name, neighbours, seed=1)

    def on(self, event: Event) -> list[Effect]:
        return list(self.machine.on(event, 0.0))

    def hears(self, sender: str, message: Any, payload: Payload = NOTHING) -> list[Effect]:
        return self.on(Received(sender, message, payload))

    def asks(self) -> tuple[str, int]:
        [start] = self.on(Done(STEPPED))
        token: Any = getattr(start, "token", None)
        send, timer = self.on(Done(token, Payload(8, "row")))
        assert isinstance(send, Send)
        assert isinstance(timer, SetTimer)
        assert send.message == Ask(token[2])
        return send.to, token[2]


def test_a_decision_is_final_and_is_repeated() -> None:
    hand = Hand()
    [meet] = hand.hears("a", Ask(1), Payload(8, "theirs"))
    assert getattr(meet, "work", None) == MoveHalfway(Payload(8, "theirs"))
    granted = hand.on(Done(("met", "a", 1, 0), Payload(8, "move")))
    assert granted == [Send("a", Grant(1), Payload(8, "move"))]
    assert hand.hears("a", Ask(1), Payload(8, "later")) == granted
    to, _ = hand.asks()
    other = "a" if to == "c" else "c"
    number = 2 if other == "a" else 1
    assert hand.hears(other, Ask(number)) == [Send(other, Refuse(number))]
    hand.hears(to, Refuse(1))
    assert hand.hears(other, Ask(number)) == [Send(other, Refuse(number))], "not granted after all"
    assert hand.hears("a", Ask(0)) == []


def test_of_two_that_ask_each_other_one_is_granted() -> None:
    low, high = Hand("a", ["b"]), Hand("b", ["a"])
    assert low.asks() == ("b", 1)
    assert high.asks() == ("a", 1)
    assert low.hears("b", Ask(1)) == [Send("b", Refuse(1))]
    assert getattr(high.hears("a", Ask(1), Payload(8, "row"))[0], "work", None) == MoveHalfway(Payload(8, "row"))


def test_an_answer_moves_once() -> None:
    hand = Hand()
    to, number = hand.asks()
    assert hand.on(Done(STEPPED)) == [], "one question at a time"
    [move] = hand.hears(to, Grant(number), Payload(8, "move"))
    assert getattr(move, "work", None) == Move(Payload(8, "move"))
    assert hand.hears(to, Grant(number), Payload(8, "move")) == []
    assert hand.hears(to, Refuse(number)) == []


def test_who_pauses_asks_nobody_and_refuses_all_but_repeats_what_it_granted() -> None:
    hand = Hand()
    hand.hears("a", Ask(1))
    granted = hand.on(Done(("met", "a", 1, 0), Payload(8, "move")))
    hand.on(Done(PAUSE))
    assert hand.on(Done(STEPPED)) == []
    assert hand.machine.at_rest
    assert hand.hears("c", Ask(1)) == [Send("c", Refuse(1))]
    assert hand.hears("a", Ask(1)) == granted
    hand.on(Done(GO_ON))
    assert hand.on(Done(STEPPED)) != []


def test_a_machine_that_forgets_what_it_granted_is_found_out() -> None:
    """The line that makes answers good when they are lost: without it, mass is lost or made."""

    class Forgetful(Gossiper):
        def _on_ask(self, sender: str, number: int, row: Payload, effects: Any) -> None:
            self._decided.pop(sender, None)
            super()._on_ask(sender, number, row, effects)

    world = World(4, GraphShape.RING, network=LossyNetwork(loss=0.3), machine=Forgetful)
    with pytest.raises(AssertionError):
        world.run(20.0)
