"""Snapshots of servers and workers in virtual time: each is a consistent cut, with every push in it once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from server_worlds import CALM, Gradient, Loop, Setting, Store, World, add_faults

from offbeat.protocols.causality.cuts import violation
from offbeat.protocols.causality.histories import Computation, Event, EventKind, EventPosition, Join, computation
from offbeat.protocols.colouring import Keep, Record, Write
from offbeat.protocols.machine import Effect, Effects, Machine, Name, Payload, Received, Send, SetTimer, Start, Timer
from offbeat.protocols.machine import Event as Happening
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import (
    Fetch,
    Fetched,
    Fresh,
    MeetingArrival,
    Met,
    Pull,
    PullReply,
    Push,
    PushReply,
    Turned,
)
from offbeat.protocols.servers.snapshots import (
    GivenUp,
    ShardColour,
    Snapshot,
    WorkerColour,
    faults,
)
from offbeat.protocols.servers.worker.client import ClientMachine
from offbeat.protocols.servers.worker.notices import MeetRequest
from offbeat.protocols.servers.worker.requests import key_of
from offbeat.simulate.machines import LossyNetwork

REQUESTS = (Push, Pull, Fetch, Turned)
REPLIES = (PushReply, PullReply, Fetched)


class Marked(Struct, frozen=True):
    """A message with a name, so that its receipt can be joined to its sending."""

    mark: Any
    message: Any


class Witness:
    """A machine whose sendings and receipts are written down; messages among replicas and of control are not."""

    def __init__(self, world: Photographed, machine: Machine) -> None:
        self.world, self.machine, self.name = world, machine, machine.name
        self.history: list[Event] = []
        self.reddened: dict[int, int] = {}
        self._sent: set[Any] = set()
        self._marks: dict[int, list[Event]] = {}
        self._alive: list[Received] = []
        world.witnesses[machine.name].append(self)

    def begin(self, now: float) -> Sequence[Effect]:
        return self._noted(self.machine.begin(now))

    def on(self, event: Happening, now: float) -> Sequence[Effect]:
        before = len(self.history)
        if isinstance(event, Received) and isinstance(event.message, Marked):
            self._received(event.sender, event.message)
            self._marks[id(event := Received(event.sender, event.message.message, event.payload))] = self.history[-1:]
            self._alive.append(event)
        stashed = self._stashed()
        effects = self.machine.on(event, now)
        if id(event) in self._stashed():
            del self.history[before:]  # It waits, as if it were still under way.
        for opened in stashed - self._stashed():
            self.history += self._marks.get(opened, [])
        for effect in effects:
            if isinstance(effect, Start) and isinstance(effect.work, Record):
                self.world.cut_at[effect.work.colour, self.name] = (self, before)
        return self._noted(effects)

    def _stashed(self) -> set[int]:
        fence = getattr(self.machine, "fence", None)
        return set() if fence is None else {id(event) for event in fence.later}

    def _received(self, sender: Name, marked: Marked) -> None:
        message = marked.message
        if isinstance(self.machine, Loop):
            client = self.machine.client
            if isinstance(message, Fresh) and message.colour > client.colour.own:
                return
            if isinstance(message, REPLIES) and not self._awaits(sender, message):
                return
            if message.colour > client.colour.own:
                self.reddened.setdefault(message.colour, len(self.history))
        self.history.append(Event(EventKind.RECEIVE, type(message).__name__, message=marked.mark))

    def _awaits(self, sender: Name, reply: Any) -> bool:
        client = self.machine.client
        shard = client.view.primaries.index(sender) if sender in client.view.primaries else None
        if shard is None or reply.life != client.life:
            return False
        keys = [key_of(reply, shard)] + ([key_of(reply.pushed, shard)] if getattr(reply, "pushed", None) else [])
        return any(key in client.outstanding.open for key in keys)

    def met(self, message: Met) -> None:
        """A meeting is as if everybody who came had told this one."""
        client = self.machine.client
        if message.life == client.life and key_of(message, -1) in client.outstanding.open:
            if message.colour > client.colour.own:
                self.reddened.setdefault(message.colour, len(self.history))
            self.history.append(Event(EventKind.LOCAL, f"from {message.what}"))
            self.world.meetings[message.what][1].append((self, len(self.history)))

    def _noted(self, effects: Iterable[Effect]) -> list[Effect]:
        done: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, (*REQUESTS, *REPLIES, Fresh)):
                effect = Send(effect.to, Marked(self._mark(effect), effect.message), effect.payload)
            elif isinstance(effect, Send) and isinstance(effect.message, MeetingArrival):
                self.history.append(Event(EventKind.LOCAL, f"to {effect.message.what}"))
                self.world.meetings[effect.message.what][0].append((self, len(self.history)))
            done.append(effect)
        return done

    def _mark(self, effect: Send) -> Any:
        """What is sent again is the same message: it was sent when it was sent first."""
        message = effect.message
        mark: Any = next(self.world.marks)
        if isinstance(message, REQUESTS):
            shard = int(effect.to.split()[1].split(".")[0])
            pushed = "push" if isinstance(message, Push) else "ask"
            mark = (self.name, message.life, id(self), pushed, shard, message.number)
        if mark not in self._sent:
            self._sent.add(mark)
            self.history.append(Event(EventKind.SEND, type(message).__name__, message=mark))
        return mark


class Still(Store):
    """Numbers of a replica that can be kept."""

    def __init__(self, world: Photographed) -> None:
        super().__init__()
        self.world = world
        self.kept: dict[int, list[Gradient]] = {}
        self.under_way: dict[int, list[Gradient]] = defaultdict(list)

    def perform(self, work: Any) -> Any:
        match work:
            case Record(colour):
                self.kept[colour] = list(self.used)
            case Keep(colour, _, payload):
                if payload.nbytes:
                    self.under_way[colour].append(payload.handle)
            case Write(colour, cut):
                self.world.written[colour, cut.shard] = (self.kept[colour], self.under_way[colour])
                return True
            case _:
                return super().perform(work)
        return None


class Photographed(World):
    """A world that takes snapshots all the time."""

    def __init__(
        self, setting: Setting, seed: int = 0, every: float = 0.3, hasty: bool = False, **changes: Any
    ) -> None:
        self.witnesses: dict[Name, list[Witness]] = defaultdict(list)
        self.marks = count()
        self.meetings: dict[str, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
        self.cut_at: dict[tuple[int, Name], tuple[Witness, int]] = {}
        self.written: dict[tuple[int, int], tuple[list[Gradient], list[Gradient]]] = {}
        self.snapshots: list[Snapshot] = []
        self.given_up: list[GivenUp] = []
        self.every = every
        self.hasty = hasty and setting.rule.bound is None
        super().__init__(setting, seed, **changes)
        self.stores = {machine.name: Still(self) for machine in self.servers}
        simulation = self.simulation
        simulation._perform = {name: store.perform for name, store in self.stores.items()}
        simulation._perform[self.coordinator.name] = self.told
        for process in simulation._processes.values():
            if process.machine is not self.coordinator:
                process.machine = Witness(self, process.machine)
        self.wish()

    def wish(self) -> None:
        """Somebody wants a snapshot, now and again."""
        self.coordinator.snapshots.want()
        self.simulation._at(self.simulation.now + self.every, self.wish)

    def told(self, work: Any) -> None:
        if isinstance(work, Snapshot):
            self.snapshots.append(work)
        elif isinstance(work, GivenUp):
            self.given_up.append(work)

    def loop(self, worker: int, process: int = 0) -> Any:
        made = Recording(self, ClientMachine(worker, self.view, process=process), process)
        return Witness(self, made) if process else made

    def loops(self) -> list[Loop]:
        names = [f"worker {worker}" for worker in range(self.setting.workers)]
        machines = [self.simulation.machine(name) for name in names if self.simulation.alive(name)]
        return [machine.machine for machine in machines if isinstance(machine, Witness)]

    def judge(self) -> None:
        """Every snapshot that has come about is a state in which this world has been."""
        everyone = [witness for witnesses in self.witnesses.values() for witness in witnesses]
        place = {id(witness): number for number, witness in enumerate(everyone)}
        histories = {f"{witness.name} #{number}": witness.history for number, witness in enumerate(everyone)}
        joins = [
            Join(
                tuple(EventPosition(place[id(w)], at) for w, at in came),
                tuple(EventPosition(place[id(w)], at) for w, at in went),
            )
            for came, went in self.meetings.values()
            if went
        ]
        known = {event.message for history in histories.values() for event in history if event.kind is EventKind.SEND}
        assert all(e.message in known for h in histories.values() for e in h if e.kind is EventKind.RECEIVE)
        run = computation(histories, joins)
        for snapshot in self.snapshots:
            assert faults(snapshot.workers, snapshot.shards) == []
            cut = self._cut(snapshot, everyone, run)
            wrong = violation(run, cut)
            assert wrong is None, str(wrong)
            self._count(snapshot)

    def _cut(self, snapshot: Snapshot, everyone: list[Witness], run: Computation) -> list[int]:
        """Those who have no part in it are cut where the others have last heard of them."""
        cut = [0] * len(everyone)
        for number, witness in enumerate(everyone):
            found, at = self.cut_at.get((snapshot.colour, witness.name), (None, 0))
            cut[number] = at if found is witness else -1
        vectors = [run.clocks[j][at] for j, at in enumerate(cut) if at >= 0]
        return [at if at >= 0 else max(int(vector[i]) for vector in vectors) for i, at in enumerate(cut)]

    def _count(self, snapshot: Snapshot) -> None:
        for shard in snapshot.shards:
            used, under_way = self.written[snapshot.colour, shard.shard]
            there = [*used, *under_way]
            assert len(there) == len(set(there)), "a push is in it twice"
            for cut in snapshot.workers:
                sent = {
                    gradient
                    for (worker, life, _, where, number), gradient in self.pushed.items()
                    if (worker, life, where) == (cut.worker, cut.life, shard.shard) and number < cut.pushes[shard.shard]
                }
                of_worker = {g for g in there if (g.worker, g.life) == (cut.worker, cut.life)}
                assert {g for g in sent if g.fit} == {g for g in of_worker if g.fit}


class Recording(Loop):
    """A worker that records its state at the boundary before it computes.

    A hasty one does not wait for answers: it may hear of a snapshot while it computes.
    """

    def push(self, now: float) -> Sequence[Effect]:
        effects = super().push(now)
        if not (self.world.hasty and self.waiting):
            return effects
        self.waiting, self.pushing = 0, False
        self.clock += 1
        return [*effects, SetTimer(0.0, "boundary")]

    def go_on(self, now: float) -> Sequence[Effect]:
        if self.clock < self.world.setting.steps:
            return [*self.record(now), SetTimer(self.random.uniform(0.2, 1.8) * self.world.setting.pace, "computed")]
        asked = self.client.ask(MeetRequest("end", (float(self.clock),)), now)
        self.waiting = asked.token
        return asked.effects

    def completed(self, replies: list[Any], now: float) -> Sequence[Effect]:
        effects = list(super().completed(replies, now))
        computes = self.waiting == 0 and not self.finished and effects
        return [*self.record(now), *effects] if computes else effects

    def record(self, now: float) -> Sequence[Effect]:
        client, witness = self.client, self.world.witnesses[self.name][-1]
        if not client.colour.due:
            return ()
        cut, effects = client.snapshots.turn(now, clock=self.clock, meetings=0)
        colour = client.colour.own
        first = witness.reddened.get(colour, len(witness.history))
        if any(event.what == "Push" for event in witness.history[first:]):
            first = len(witness.history)  # What it has pushed is in what it writes down.
        self.world.cut_at[colour, self.name] = (witness, first)
        return [*effects, *client.snapshots.recorded(colour, cut, now)]

    def on(self, event: Happening, now: float) -> Sequence[Effect]:
        if isinstance(event, Received) and isinstance(event.message, Met):
            self.world.witnesses[self.name][-1].met(event.message)
        if event == Timer("boundary"):
            return self.handle(self.go_on(now), now)
        return super().on(event, now)


def photographed(seed: int, faulty: bool = True) -> Photographed:
    random = Random(seed)
    setting = Setting(
        workers=random.randint(1, 4),
        shards=random.randint(1, 3),
        replicas=random.randint(0, 1),
        rule=random.choice([Rule(1), Rule(3), Rule(2, eager=True), Rule(None), Rule(None)]),
        steps=random.randint(6, 14),
        parts=random.choice([1, 1, 2]),
        together=random.random() < 0.6,
        pace=random.choice([0.02, 0.1, 0.3]),
    )
    network = LossyNetwork(
        delay=random.choice([0.001, 0.02]),
        jitter=random.choice([0.0, 0.002, 0.02, 0.1]),
        loss=random.choice([0.0, 0.02, 0.05]),
        duplicate=random.choice([0.0, 0.1]),
        until=CALM,
    )
    world = Photographed(setting, seed, random.choice([0.05, 0.3, 1.0]), random.random() < 0.5, network=network)
    if faulty:
        add_faults(world, random)
    return world


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_every_snapshot_is_a_consistent_cut_with_every_push_once(seed: int) -> None:
    world = photographed(seed).run()
    world.check()
    world.judge()


@pytest.mark.slow
def test_snapshots_come_about_and_some_catch_pushes_under_way() -> None:
    worlds = [photographed(seed, faulty=seed % 2 == 0).run() for seed in range(10)]
    snapshots = [snapshot for world in worlds for snapshot in world.snapshots]
    assert len(snapshots) > 15
    assert any(shard.in_flight for snapshot in snapshots for shard in snapshot.shards)
    assert any(world.given_up for world in worlds)
    assert sum(bool(world.snapshots) for world in worlds) > 7


def _keeps_nothing(colour: ShardColour, push: Push, payload: Payload, out: Effects) -> None:
    """A shard that forgets what is under way."""


def _unmoved(colour: WorkerColour) -> int:
    """A worker that pushes, or asks, in the old colour when it has heard of a new one."""
    return colour.own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method", "mutant"),
    [
        (ShardColour, "applied", _keeps_nothing),
        (WorkerColour, "act", _unmoved),
        (WorkerColour, "ask", _unmoved),
    ],
)
def test_a_line_less_and_a_snapshot_is_found_out(
    owner: type, method: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mutant)
    setting = Setting(workers=3, shards=3, replicas=0, rule=Rule(None), steps=12, together=False, pace=0.05)
    network = LossyNetwork(delay=0.001, jitter=0.05)

    def found_out(seed: int) -> bool:
        try:
            Photographed(setting, seed, 0.05, hasty=method == "act", network=network).run().judge()
        except AssertionError:
            return True
        return False

    assert any(found_out(seed) for seed in range(20))
