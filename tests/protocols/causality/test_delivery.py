"""Delivery: whatever the links do, what is delivered is an order that the run can have had, and all of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest
from causal_support import computations, few, lines
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.causality.delivery import (
    Alive,
    ByLamport,
    ByNumber,
    ByTime,
    ByVector,
    Delivery,
    Dropped,
    EventReport,
    Probe,
)
from offbeat.protocols.causality.histories import Computation, EventPosition, lamport
from offbeat.protocols.machine import Ended, Event, Machine, Received, Send, SetTimer, Start, Timer
from offbeat.simulate.machines import Kill, LossyNetwork, Simulation

SEEDS = st.integers(0, 2**32)
SLOWEST = 8.0
"""Seconds that a message takes at most; events of a run are a second apart."""


class World:
    """Processes that live through a run and report it over bad links, and a machine that listens."""

    def __init__(
        self,
        run: Computation,
        machine: Machine,
        seed: int,
        dead: int | None = None,
        drops: frozenset[EventPosition] = frozenset(),
        slowest: float = SLOWEST,
    ) -> None:
        self.run, self.machine, self.random, self.dead, self.slowest = run, machine, Random(seed), dead, slowest
        self.now = 0.0
        self.delivered: list[EventPosition] = []
        self.late: list[EventPosition] = []
        self.lost: set[EventPosition] = set()
        self.probes = 0
        self._own = [0] * run.size
        self._done = [0] * run.size
        self._lamports: dict[EventPosition, int] = {}
        self._drops = drops
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._timers: dict[Any, int] = {}
        self._count = itertools.count()
        for place in run.order:
            self._at(run.event(place).time, partial(self._happen, place))
        if dead is not None:
            end = max((event.time for event in run.histories[dead]), default=0.0)
            self._at(end + 0.5, partial(self._tell, Ended(run.processes[dead])))

    def live(self) -> World:
        for _ in range(100_000):
            if not self._heap:
                return self
            self.now, _, act = heappop(self._heap)
            act()
        raise AssertionError("something is waited for that never comes")

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heappush(self._heap, (time, next(self._count), act))

    def _happen(self, place: EventPosition) -> None:
        process, number = place
        self._own[process] = lamport(self._own[process], *(self._lamports[c] for c in self.run.causes(place)))
        self._lamports[place], self._done[process] = self._own[process], number
        message: EventReport | Dropped = EventReport(
            number, self.now, self._own[process], self.run.vector(place), place
        )
        if place in self._drops:
            message = Dropped(number, number)
            self.lost.add(place)
        elif process == self.dead and self.random.random() < 0.4:
            self.lost.add(place)
            return
        for _ in range(1 + (self.random.random() < 0.2)):
            self._send(process, message)

    def _send(self, process: int, message: Any) -> None:
        event = Received(self.run.processes[process], message)
        self._at(self.now + self.random.uniform(0, self.slowest), partial(self._tell, event))

    def _tell(self, event: Event) -> None:
        for effect in self.machine.on(event, self.now):
            match effect:
                case Start(work=Delivery(report=report, late=False)):
                    self.delivered.append(report.event)
                case Start(work=Delivery(report=report)):
                    self.late.append(report.event)
                case SetTimer(after=after, token=token):
                    self._timers[token] = self._timers.get(token, 0) + 1
                    self._at(self.now + after, partial(self._ring, token, self._timers[token]))
                case Send(to=to, message=Probe(lamport=clock)):
                    self.probes += 1
                    self._at(self.now + self.random.uniform(0, 2), partial(self._probed, self.run.index(to), clock))
                case _:
                    raise AssertionError(effect)

    def _ring(self, token: Any, setting: int) -> None:
        if self._timers[token] == setting:
            self._tell(Timer(token))

    def _probed(self, process: int, clock: int) -> None:
        if process != self.dead:
            self._own[process] = lamport(self._own[process], clock)
            self._send(process, Alive(self._own[process], self._done[process]))


def is_linear_extension(run: Computation, order: list[EventPosition]) -> bool:
    return not any(run.happened_before(late, early) for early, late in itertools.combinations(order, 2))


def heard_of(world: World) -> Counter[EventPosition]:
    return Counter(place for place in world.run.order if place not in world.lost)


MACHINES: Mapping[str, Callable[[Computation, float], Machine]] = {
    "number": lambda run, grace: ByNumber(run.processes, grace),
    "time": lambda run, _: ByTime(run.processes, SLOWEST),
    "lamport": lambda run, grace: ByLamport(run.processes, 3.0, grace),
    "vector": lambda run, grace: ByVector(run.processes, grace),
}


def in_order(kind: str, world: World) -> bool:
    if kind != "number":
        return is_linear_extension(world.run, world.delivered)
    return all(
        [place for place in world.delivered if place.process == i]
        == sorted(p for p in world.delivered if p.process == i)
        for i in range(world.run.size)
    )


@pytest.mark.parametrize("kind", MACHINES)
@few
@given(computations(), SEEDS)
def test_everything_is_delivered_once_in_an_order_that_the_run_can_have_had(
    kind: str, run: Computation, seed: int
) -> None:
    world = World(run, MACHINES[kind](run, 1.0), seed).live()
    assert Counter(world.delivered) == heard_of(world) == Counter(run.order)
    assert world.late == []
    assert in_order(kind, world)


@pytest.mark.parametrize("kind", MACHINES)
@few
@given(computations(), SEEDS)
def test_a_dead_process_holds_nobody_up(kind: str, run: Computation, seed: int) -> None:
    world = World(run, MACHINES[kind](run, 2 * SLOWEST), seed, dead=seed % run.size).live()
    assert Counter(world.delivered) == heard_of(world)
    assert world.late == []
    assert in_order(kind, world)


@pytest.mark.parametrize("kind", MACHINES)
@few
@given(computations(), SEEDS)
def test_without_grace_what_comes_too_late_is_told_as_late(kind: str, run: Computation, seed: int) -> None:
    world = World(run, MACHINES[kind](run, 0.0), seed, dead=seed % run.size).live()
    assert Counter(world.delivered + world.late) == heard_of(world)
    assert all(place.process == world.dead for place in world.late)
    assert in_order(kind, world)


@pytest.mark.parametrize("kind", MACHINES)
@few
@given(computations(), SEEDS)
def test_dropped_events_are_not_waited_for(kind: str, run: Computation, seed: int) -> None:
    random = Random(seed)
    drops = frozenset(place for place in run.order if random.random() < 0.3)
    world = World(run, MACHINES[kind](run, 1.0), seed, drops=drops).live()
    assert Counter(world.delivered) == heard_of(world)
    assert len(world.delivered) == len(run.order) - len(drops)
    assert in_order(kind, world)


@few
@given(computations(), SEEDS)
def test_delays_above_the_bound_are_found_out(run: Computation, seed: int) -> None:
    world = World(run, ByTime(run.processes, 2.0), seed).live()
    times = [run.event(place).time for place in world.delivered]
    assert times == sorted(times)
    assert Counter(world.delivered + world.late) == Counter(run.order)


def delivered(machine: Machine, *events: tuple[str, Any] | Event) -> list[str]:
    """What comes of these: `a1` for the first report of a, `late a1` if it was late, `?b` for a probe of b."""
    told = []
    for event in events:
        for effect in machine.on(Received(*event) if isinstance(event, tuple) else event, 0.0):
            if isinstance(effect, Start):
                told.append(f"{'late ' * effect.work.late}{effect.work.process}{effect.work.report.number}")
            elif isinstance(effect, Send):
                told.append(f"?{effect.to}")
    return told


def test_arrival_order_is_not_trusted() -> None:
    assert delivered(
        ByNumber("ab"), ("a", EventReport(2)), ("b", EventReport(1)), ("a", EventReport(1)), ("a", EventReport(2))
    ) == [
        "b1",
        "a1",
        "a2",
    ]


def test_an_effect_is_held_until_its_cause_is_there() -> None:
    effect, cause = ("b", EventReport(1, vector=(1, 1))), ("a", EventReport(1, vector=(1, 0)))
    assert delivered(ByVector("ab"), effect) == []
    assert delivered(ByVector("ab"), effect, cause) == ["a1", "b1"]
    assert delivered(ByVector("ab"), effect, Ended("a"), Timer(Ended("a")), cause) == ["b1", "late a1"]
    assert delivered(ByVector("ab"), effect, ("a", Dropped(1, 1))) == ["b1"]


def deliverable(held: set[EventPosition], passed: list[int], run: Computation) -> set[EventPosition]:
    """What can be delivered of what is held back, by looking at all of it again and again."""
    ready: set[EventPosition] = set()
    while fresh := {
        place
        for place in held - ready
        if all(known <= passed[i] + (i == place.process) for i, known in enumerate(run.vector(place)))
    }:
        ready |= fresh
        for place in fresh:
            passed[place.process] = max(passed[place.process], place.number)
    return ready


@few
@given(computations(), SEEDS)
def test_vector_clocks_deliver_as_soon_as_a_search_through_everything_held_back_would(
    run: Computation, seed: int
) -> None:
    machine, held, passed = ByVector(run.processes), set[EventPosition](), [0] * run.size
    for place in Random(seed).sample(run.order, len(run.order)):
        report = EventReport(place.number, vector=run.clocks[place.process][place.number], event=place)
        effects = machine.on(Received(run.processes[place.process], report), 0.0)
        held.add(place)
        ready = deliverable(held, passed, run)
        held -= ready
        assert {effect.work.report.event for effect in effects if isinstance(effect, Start)} == ready


def test_a_silent_process_is_probed_and_its_answer_counts_once_its_reports_are_here() -> None:
    machine = ByLamport("ab")
    assert delivered(machine, ("a", EventReport(1, lamport=5))) == []
    assert delivered(machine, Timer(Probe(0))) == ["?b"]
    assert delivered(machine, ("b", Alive(6, reported=1))) == []
    assert delivered(machine, ("b", EventReport(1, lamport=2))) == ["b1", "a1"]


@pytest.mark.parametrize("make", [ByNumber, ByVector])
def test_a_process_that_joins_is_listened_to_from_then_on(make: Callable[..., ByVector | ByNumber]) -> None:
    machine, first = make("a"), EventReport(1, vector=(1, 1))
    assert delivered(machine, ("b", first)) == []
    machine.join("b")
    assert delivered(machine, ("a", EventReport(1, vector=(1,))), ("b", first)) == ["a1", "b1"]


def test_what_strangers_say_is_not_listened_to() -> None:
    assert delivered(ByNumber("ab"), ("c", EventReport(1)), Ended("c"), ("c", Alive(1, 1)), ("c", Dropped(1, 1))) == []


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ByNumber([]), "cannot be told apart"),
        (lambda: ByVector(["a", "a"]), "cannot be told apart"),
        (lambda: ByNumber("a", grace=-1), "a grace of -1"),
        (lambda: ByTime("a", delta=-1), "a bound of -1"),
        (lambda: ByLamport("a", patience=0), "a patience of 0"),
        (lambda: ByVector("ab").on(Received("b", EventReport(1, vector=(1,))), 0.0), "has the vector clock"),
        (
            lambda: ByVector("ab").on(Received("b", EventReport(1, vector=(1, 0))), 0.0),
            "its own must be the report's number",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make()


class Reporter:
    """A process of a run as a machine of its own: reports its events, and answers probes."""

    def __init__(self, run: Computation, process: int) -> None:
        self.name = run.processes[process]
        self._reports = [
            EventReport(
                k,
                float(k),
                int(run.lamports[process][k]),
                run.vector(EventPosition(process, k)),
                EventPosition(process, k),
            )
            for k in range(1, run.lengths[process] + 1)
        ]

    def begin(self, now: float) -> list[Send | SetTimer]:
        return [*(Send("monitor", report) for report in self._reports), SetTimer(1.0, "again")]

    def on(self, event: Event, now: float) -> list[Send | SetTimer]:
        if isinstance(event, Timer):
            return self.begin(now)
        return [Send("monitor", Alive(10**6, len(self._reports)))]


@pytest.mark.parametrize("make", [ByNumber, ByLamport, ByVector])
def test_the_machines_run_in_the_simulator_with_losses_and_a_kill(make: Callable[..., Machine]) -> None:
    run = lines(4, 4, 4, edges=[((0, 2), (1, 3)), ((1, 3), (2, 2)), ((2, 4), (0, 4))])
    machines = [make(run.processes), *(Reporter(run, i) for i in range(run.size))]
    faults = [Kill("worker 1", 0.01, seen_after=0.5)]
    network = LossyNetwork(jitter=0.2, loss=0.4, duplicate=0.2, until=20.0)
    world = Simulation(machines, seed=3, network=network, faults=faults, observer="monitor")
    order: list[EventPosition] = []
    world.performing("monitor", lambda work: order.append(work.report.event))
    rest = {EventPosition(i, k) for i in (0, 2) for k in range(1, 5)}
    assert world.run(60.0, until=lambda: rest <= set(order))
    assert len(set(order)) == len(order)
    if make is not ByNumber:
        assert is_linear_extension(run, order)
