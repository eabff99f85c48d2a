"""Events on their way between machines: whatever links do, each comes once and in order, or is known to be lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any

import pytest

from offbeat.protocols.causality.clock_stamps import Cause, ClockStamper, Occurrence
from offbeat.protocols.causality.delivery import ByVector, EventReport
from offbeat.protocols.causality.forwarder import (
    HOME,
    Collector,
    Continue,
    Forwarder,
    Greeting,
    LinkPace,
    Positions,
    ProcessPulse,
    ReadRecords,
    Records,
    RecordsRead,
    StackReply,
    StackRequest,
    WriteRecords,
)
from offbeat.protocols.machine import Done, Payload, Received, Send, Start, Timer
from offbeat.simulate.machines import Fault, Kill, LossyNetwork, Partition, Restart, Simulation

SECONDS = 12.0  # For which processes record.
RATE = 400  # Records per second of each process.
SIZE = 48


class Store:
    """The memory of a machine's processes: rings that outlive the forwarder, as files do."""

    def __init__(self, world: World, processes: Sequence[str], ring: int) -> None:
        self._world, self._processes, self._ring = world, processes, ring
        self.read = dict.fromkeys(processes, 0)

    def written(self) -> int:
        return int(min(self._world.simulation.now, SECONDS) * RATE)

    def do(self, work: Any) -> Any:
        written, room = self.written(), 0
        match work:
            case Continue(positions=positions):
                self.read = dict.fromkeys(self._processes, 0) | {where.process: where.number for where in positions}
                return None
            case StackRequest(processes=names):
                return StackReply(dict.fromkeys(names, "main"))
            case ReadRecords(most=most):
                room = most // SIZE
            case _:
                raise AssertionError(work)
        batches: list[tuple[Records, Payload]] = []
        for process in self._processes:
            first = max(self.read[process], written - self._ring) + 1
            last = min(written, first + min(room, 50) - 1)
            if last >= first:
                numbers = list(range(first, last + 1))
                batches.append((Records(0, 0, process, 7, first, len(numbers)), Payload(SIZE * len(numbers), numbers)))
                self.read[process], room = last, room - len(numbers)
        ended = self._world.simulation.now > SECONDS
        pulses = tuple(ProcessPulse(process, 7, written, ended) for process in self._processes)
        return RecordsRead(tuple(batches), pulses, sum(written - number for number in self.read.values()))


class World:
    """Two machines of two processes each, and a collector."""

    def __init__(
        self, seed: int, network: LossyNetwork, faults: Sequence[Fault] = (), ring: int = 100_000, window: int = 1 << 20
    ) -> None:
        self.pace = LinkPace(window=window)
        self.machines = {"m0": ("worker 0", "worker 1"), "m1": ("worker 2", "worker 3")}
        self.collector = Collector(list(self.machines))
        self.came: dict[str, list[int]] = {name: [] for names in self.machines.values() for name in names}
        self.lost = dict.fromkeys(self.came, 0)
        self.lives = 0
        self.simulation = Simulation(
            [self.collector, *map(self.forwarder, self.machines)],
            seed=seed,
            network=network,
            faults=[self._made(fault) for fault in faults],
            observer=HOME,
        )
        for machine, names in self.machines.items():
            self.simulation.performing(machine, Store(self, names, ring).do)
        self.simulation.performing(HOME, self._write)

    def forwarder(self, machine: str) -> Forwarder:
        self.lives += 1
        return Forwarder(machine, self.lives, "a clock", self.pace)

    def _made(self, fault: Fault) -> Fault:
        return (
            Restart(fault.name, fault.at, lambda: self.forwarder(fault.name)) if isinstance(fault, Restart) else fault
        )

    def _write(self, work: Any) -> None:
        assert isinstance(work, WriteRecords)
        numbers = work.payload.handle[work.skip :]
        came = self.came[work.batch.process]
        assert numbers[0] == (came[-1] if came else 0) + work.lost + 1, "in order, and what is missing was announced"
        self.lost[work.batch.process] += work.lost
        came += numbers

    def finished(self) -> bool:
        now = self.simulation.now
        return now > SECONDS and all(
            self.collector.is_complete(machine, name, now) for machine, names in self.machines.items() for name in names
        )


def again(name: str, at: float) -> Restart:
    return Restart(name, at, lambda: Forwarder(name, 0, ""))


FAULTS: dict[str, tuple[LossyNetwork, list[Fault]]] = {
    "delays": (LossyNetwork(delay=0.02, jitter=0.2), []),
    "losses": (LossyNetwork(delay=0.005, loss=0.2, duplicate=0.2), []),
    "a partition": (LossyNetwork(delay=0.005), [Partition(frozenset({"m0"}), 3.0, 5.0)]),
    "a restart": (LossyNetwork(delay=0.005, jitter=0.05), [again("m0", 3.0), again("m0", 6.1), again("m1", 7.0)]),
    "all of it": (
        LossyNetwork(delay=0.01, jitter=0.1, loss=0.1, duplicate=0.1),
        [Partition(frozenset({"m1"}), 2.0, 5.0), again("m1", 4.0), again("m0", 5.0)],
    ),
}


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("seed", range(4))
def test_every_record_comes_once_and_in_order(faults: str, seed: int) -> None:
    world = World(seed, *FAULTS[faults])
    assert world.simulation.run(120.0, until=world.finished)
    total = int(SECONDS * RATE)
    assert all(came == list(range(1, total + 1)) for came in world.came.values())
    assert {state.lost for state in world.collector.links()} == {0}
    assert [state.restarts for state in world.collector.links()] == [
        sum(isinstance(fault, Restart) and fault.name == machine for fault in FAULTS[faults][1])
        for machine in world.machines
    ]


@pytest.mark.parametrize("faults", ["a partition", "all of it"])
def test_what_was_overwritten_during_a_partition_is_announced_as_lost(faults: str) -> None:
    network, strikes = FAULTS[faults]
    world = World(1, network, strikes, ring=600, window=200 * SIZE)
    assert world.simulation.run(120.0, until=world.finished)
    total = int(SECONDS * RATE)
    assert sum(world.lost.values()) == sum(state.lost for state in world.collector.links()) > 0
    for name, came in world.came.items():
        assert len(set(came)) == len(came)
        assert len(came) + world.lost[name] == total


class Ordered(World):
    """Its k-th record of each worker is an effect of the k-th of the one before it, and all are put in order."""

    def _write(self, work: Any) -> None:
        before = len(self.came[work.batch.process])
        super()._write(work)
        name, now = work.batch.process, self.simulation.now
        for number in self.came[name][before:]:
            self.order.extend(self._delivered(self.stamper.add(name, self._event(name, number), now), now))
        self.order.extend(self._delivered(self.stamper.expire(now), now))

    def start(self) -> Ordered:
        names = list(self.came)
        self.stamper, self.machine, self.order = ClockStamper(names, 60.0), ByVector(names), list[tuple[str, int]]()
        return self

    def _event(self, name: str, number: int) -> Occurrence:
        rank = int(name[-1])
        causes = (Cause((rank - 1, number), f"worker {rank - 1}"),) if rank else ()
        return Occurrence(((rank, number),), causes, event=(name, number))

    def _delivered(self, reports: Iterable[tuple[str, EventReport]], now: float) -> Iterator[tuple[str, int]]:
        for name, report in reports:
            for effect in self.machine.on(Received(name, report), now):
                assert isinstance(effect, Start)
                yield effect.work.report.event.event


@pytest.mark.parametrize("faults", FAULTS)
def test_whatever_links_do_no_effect_is_delivered_before_its_cause(faults: str) -> None:
    world = Ordered(3, *FAULTS[faults]).start()
    assert world.simulation.run(120.0, until=world.finished)
    done = dict.fromkeys(world.came, 0)
    for name, number in world.order:
        assert number == done[name] + 1
        done[name] = number
        rank = int(name[-1])
        assert not rank or done[f"worker {rank - 1}"] >= number
    assert set(done.values()) == {int(SECONDS * RATE)}


def test_what_is_under_way_is_bounded() -> None:
    pace = LinkPace(window=10 * SIZE)
    machine = Forwarder("m", 1, "", pace)
    machine.begin(0.0)
    machine.on(Received(HOME, Positions(1, ())), 0.0)
    (start, _) = machine.on(Timer("look"), 0.1)
    assert isinstance(start, Start)
    assert start.work.most == 10 * SIZE
    batch = (Records(0, 0, "worker 0", 7, 1, 8), Payload(8 * SIZE))
    machine.on(Done("read", RecordsRead((batch,), left=5)), 0.1)
    assert machine.waiting == 13
    (start, _) = machine.on(Timer("look"), 0.2)
    assert isinstance(start, Start)
    assert start.work.most == 2 * SIZE


def test_a_machine_that_is_silent_for_long_holds_nobody_up() -> None:
    world = World(0, LossyNetwork(delay=0.005), [Kill("m0", 2.0)])
    assert world.simulation.run(120.0, until=world.finished)
    assert world.simulation.now - 2.0 > LinkPace().lost
    assert world.collector.is_broken("m0", world.simulation.now)
    assert not world.collector.is_broken("m1", world.simulation.now)


def test_until_when_a_process_is_known_is_never_later_than_what_has_come() -> None:
    world = World(2, LossyNetwork(delay=0.05, jitter=0.3, loss=0.1))
    random = Random(2)
    for _ in range(100):
        world.simulation.run(world.simulation.now + random.uniform(0.01, 0.2))
        until = world.collector.known_until("m0", "worker 0", world.simulation.now)
        came = world.came["worker 0"]
        assert until * RATE <= (came[-1] if came else 0) + 1


def test_stacks_are_asked_for_where_the_process_is() -> None:
    collector = Collector(["m0"])
    (request,) = collector.on(Done("m0", StackRequest(("worker 0",))), 0.0)
    assert isinstance(request, Send)
    (start,) = Forwarder("m0", 1, "").on(Received(HOME, request.message), 0.0)
    assert isinstance(start, Start)
    (reply,) = Forwarder("m0", 1, "").on(Done("stacks", StackReply({"worker 0": "main"})), 0.0)
    assert isinstance(reply, Send)
    (kept,) = collector.on(Received("m0", reply.message), 0.0)
    assert isinstance(kept, Start)
    assert kept.work.stacks == {"worker 0": "main"}


def test_strangers_and_former_forwarders_are_not_listened_to() -> None:
    collector = Collector(["m0"])
    assert not collector.on(Received("m1", Greeting(1, "")), 0.0)
    collector.on(Received("m0", Greeting(2, "")), 0.0)
    assert not collector.on(Received("m0", Records(1, 1, "worker 0", 7, 1, 1), Payload(SIZE, b"")), 0.0)
