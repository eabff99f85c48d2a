"""Snapshots of gossip in virtual time: each is a consistent cut, and the mean of its rows is that of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs
from test_gossip_machine import Stepping, World

from offbeat.protocols.causality.cuts import violation
from offbeat.protocols.causality.histories import Event as Noted
from offbeat.protocols.causality.histories import EventKind, computation
from offbeat.protocols.colouring import Keep, Record, Write
from offbeat.protocols.gossip.machine import PAUSE, Gossiper, Grant, Refuse
from offbeat.protocols.gossip.snapshots import GossipCut, gossip_faults
from offbeat.protocols.gossip.topology import GraphShape
from offbeat.protocols.machine import Done, Effect, Event, Payload, Received, Send, Start, Timer
from offbeat.simulate.machines import LossyNetwork, Partition, Stop


class Marked(Struct, frozen=True):
    mark: Any
    message: Any

    @property
    def colour(self) -> int:
        return self.message.colour


class Recording(Stepping):
    """A worker that is cut between two steps, whenever it has heard of a snapshot."""

    world: Photographed
    wants = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.history: list[Noted] = []
        self.marks: dict[int, Any] = {}

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        before = len(self.history)
        if isinstance(event, Received):
            self.marks[id(event.message.message)] = event.message.mark
            event = Received(event.sender, event.message.message, event.payload)
            self.world.alive.append(event.message)
        effects: list[Effect] = []
        if event == Timer("step") and (self.wants or self.inner.colour.heard > self.inner.colour.own):
            colour = self.inner.colour.own + 1 if self.wants else 0
            self.wants = False
            held = list(self.inner._held)
            opened = [message for _, message, _ in held]
            owed = {sender: question.number for sender, question in self.inner._open.items()}
            for sender, message, _ in held:
                if isinstance(message, Grant) and owed.get(sender) == message.number:
                    del owed[sender]
                    self.moves.pop((self.name, sender, message.number))
            effects += self.noted(self.inner.on(Done(("turn", colour, 0, 0)), now))
            self.world.cut_at[self.inner.colour.own, self.name] = before
            self.history[before:before] = [Noted(EventKind.RECEIVE, message=self.marks[id(m)]) for m in opened]
        came = super().on(event, now)
        if isinstance(event, Received) and not any(message is event.message for _, message, _ in self.inner._held):
            self.history.append(Noted(EventKind.RECEIVE, message=self.marks[id(event.message)]))
        return [*effects, *self.noted(came)]

    def noted(self, effects: Sequence[Effect]) -> list[Effect]:
        done: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Send):
                mark: Any = next(self.world.marks)
                if isinstance(effect.message, Grant | Refuse):
                    mark = (self.name, effect.to, effect.message.number)  # A decision is the same when it is repeated.
                if mark not in self.world.sent:
                    self.world.sent.add(mark)
                    self.history.append(Noted(EventKind.SEND, type(effect.message).__name__, message=mark))
                effect = Send(effect.to, Marked(mark, effect.message), effect.payload)
            done.append(effect)
        return done

    def perform(self, work: Any) -> Payload:
        match work:
            case Record(colour) if colour:
                self.world.rows[colour, self.name] = self.row.copy()
            case Keep(colour, _, move):
                self.world.kept[colour, self.name].append(move.handle)
            case Write(colour, cut):
                self.world.cuts[colour][self.name] = cut
            case _:
                return super().perform(work)
        return Payload(0)


class Photographed(World):
    def __init__(
        self, size: int, shape: GraphShape, seed: int, network: LossyNetwork, faults: Sequence[Any] = ()
    ) -> None:
        super().__init__(size, shape, seed, network, faults)
        self.marks = count()
        self.alive: list[Any] = []
        self.sent: set[Any] = set()
        self.rows: dict[tuple[int, str], np.ndarray] = {}
        self.kept: dict[tuple[int, str], list[np.ndarray]] = defaultdict(list)
        self.cuts: dict[int, dict[str, GossipCut]] = defaultdict(dict)
        self.cut_at: dict[tuple[int, str], int] = {}
        for worker in self.workers:
            worker.__class__ = Recording
            worker.world = self
            worker.history, worker.marks = [], {}
        self.simulation._perform = {worker.name: worker.perform for worker in self.workers}

    def complete(self) -> list[int]:
        return [colour for colour, cuts in self.cuts.items() if len(cuts) == len(self.workers)]

    def judge(self) -> int:
        run = computation({worker.name: worker.history for worker in self.workers})
        for colour in self.complete():
            assert gossip_faults(list(self.cuts[colour].values())) == []
            wrong = violation(run, [self.cut_at[colour, worker.name] for worker in self.workers])
            assert wrong is None, str(wrong)
            names = [worker.name for worker in self.workers]
            rows = [self.rows[colour, name] - sum(self.kept[colour, name]) for name in names]
            np.testing.assert_allclose(np.mean(rows, axis=0), self.mean, atol=1e-9)
        return len(self.complete())


def photographed(seed: int) -> Photographed:
    random = Random(seed)
    network = LossyNetwork(
        delay=random.choice([0.001, 0.05]),
        jitter=random.choice([0.0, 0.05, 0.2]),
        loss=random.choice([0.0, 0.1]),
        duplicate=random.choice([0.0, 0.2]),
        until=20.0,
    )
    faults = [
        Stop("worker 0", random.uniform(0, 8), 2.0),
        Partition(frozenset({"worker 1"}), random.uniform(0, 8), 1.0),
    ]
    size = random.randint(2, 5)
    shape = random.choice([GraphShape.RING, GraphShape.COMPLETE])
    world = Photographed(size, shape, seed, network, faults[: random.randint(0, 2)])
    for _ in range(8):
        world.simulation.run(world.simulation.now + random.uniform(0.3, 2.0))
        for worker in random.sample(world.workers, random.randint(1, 2)):
            worker.wants = True
    world.simulation.run(30.0)
    return world


@pytest.mark.slow
@settings(max_examples=12)
@given(st.integers(0, 2**32))
def test_every_snapshot_is_a_consistent_cut_that_keeps_the_mean(seed: int) -> None:
    assert photographed(seed).judge() > 0


@pytest.mark.slow
def test_some_grants_are_caught_under_way() -> None:
    worlds = [photographed(seed) for seed in range(6)]
    under_way = [cut.under_way for world in worlds for c in world.complete() for cut in world.cuts[c].values()]
    assert sum(map(len, under_way)) > 2


def test_a_worker_that_rests_before_its_boundary_misses_its_place_and_holds_nobody_up() -> None:
    machine = Gossiper("worker 0", ["worker 1"], 0)
    asked = machine.on(Done("stepped"), 0.0)
    assert isinstance(asked[0], Start)
    machine.on(Done(asked[0].token, Payload(8, "row")), 0.0)
    assert machine.on(Received("worker 1", Grant(1, 3), Payload(8, "move")), 0.1) == []
    moved = machine.on(Done(PAUSE), 0.2)
    assert [type(effect) for effect in moved] == [Start]
    assert not machine.at_rest, "the move is still to be made"
    machine.on(Done("moved"), 0.2)
    assert machine.at_rest
    (refused,) = machine.on(Done(("turn", 0, 5, 1)), 0.3)
    assert isinstance(refused, Start)
    assert refused.work == Record(0)


def test_moves_that_do_not_balance_are_named() -> None:
    one = GossipCut(worker=0, clock=3, granted=((1, 2),), moved=((1, 0),))
    other = GossipCut(worker=1, clock=4, granted=((0, 0),), moved=((0, 1),), under_way=(0,))
    assert gossip_faults([one, other]) == []
    assert (
        "granted worker 1 2 moves, of which 1 were made and 0"
        in gossip_faults([one, structs.replace(other, under_way=())])[0]
    )
    assert "different numbers of times" in gossip_faults([one, structs.replace(other, rests=1)])[0]
    doubled = structs.replace(other, moved=((0, 1), (2, 1)))
    assert "worker 1 made 1 moves that worker 2 had not granted" in gossip_faults([one, doubled])[0]
