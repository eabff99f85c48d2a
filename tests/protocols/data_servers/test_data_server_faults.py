"""Data servers and their workers in virtual time, under delays, losses, kills, pauses and partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest

from offbeat.errors import DataError
from offbeat.protocols.data_servers.messages import Order, Supply, data_server_name
from offbeat.protocols.data_servers.passes import LoaderPass
from offbeat.protocols.data_servers.reader import AGAIN, PROBES, BatchReader, SpoiledBatchError
from offbeat.protocols.data_servers.server import DataServer, PrepareBatch, ReleaseBatch
from offbeat.protocols.machine import Done, Effect, Event, Payload, Received, Timer
from offbeat.protocols.partition import mine
from offbeat.simulate.machines import Fault, Kill, LossyNetwork, Partition, Restart, Simulation, Stop

BATCHES, EPOCHS, GLOBAL = 20, 2, 12
Slice = tuple[int, ...]


class LoopingReader(BatchReader):
    """A worker whose loop computes for a while on each of its slices, and leaves before a batch if it is to die."""

    def __init__(self, rank: int, size: int, servers: Sequence[str], leaving: dict[int, tuple[int, int]]) -> None:
        super().__init__(f"worker {rank}", rank, servers)
        self._number, self._size, self._leaving = rank, size, leaving
        self.epoch, self.batch = 0, 0
        self.seen: list[tuple[int, int, Slice]] = []
        self.gone = False
        self._pass: LoaderPass[Slice] | None = None

    def members(self) -> tuple[int, ...]:
        at = (self.epoch, self.batch)
        return tuple(rank for rank in range(self._size) if at < self._leaving.get(rank, (EPOCHS, 0)))

    def begin(self, now: float) -> Sequence[Effect]:
        return self.advance()

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        return [*super().on(event, now), *self.advance()]

    def _pieces(self) -> Iterator[Callable[[], tuple[Payload, Slice]]]:
        for number in range(BATCHES):
            whole = [self.epoch * BATCHES * GLOBAL + number * GLOBAL + i for i in range(GLOBAL)]

            def piece(whole: list[int] = whole) -> tuple[Payload, Slice]:
                members = self.members()
                part = tuple(mine(whole, members.index(self._number), len(members)))
                return Payload(8 * len(part), part), part

            yield piece

    def advance(self) -> list[Effect]:
        effects: list[Effect] = []
        while self.epoch < EPOCHS and not self.gone:
            if self._pass is None:
                self._pass = LoaderPass(self, 0, 0, self._pieces(), self.members)
            if self._number not in self.members():
                self.gone = True
                return effects
            effects += self._pass.ordered()
            if self._pass.over:
                self.epoch, self.batch, self._pass = self.epoch + 1, 0, None
            elif not self.ready(0):
                return effects
            else:
                assert self.take(0).handle == ("prepared", self._pass.note)
                self.seen.append((self.epoch, self.batch, self._pass.note))
                effects += self._pass.use()
                self.batch += 1
        return effects


class Memory:
    """What a data server holds: counted, and never freed twice."""

    def __init__(self) -> None:
        self.held: list[Payload] = []
        self.most = 0

    def perform(self, work: Any) -> Any:
        if isinstance(work, PrepareBatch):
            made = Payload(work.payload.nbytes, ("prepared", work.payload.handle))
            self.held.append(made)
            self.most = max(self.most, len(self.held))
            return made
        assert isinstance(work, ReleaseBatch)
        index = next(i for i, payload in enumerate(self.held) if payload is work.payload)
        del self.held[index]
        return None


def played(seed: int, workers: int, servers: int, faults: Sequence[Fault], network: LossyNetwork, deaths: int = 0):
    chance = Random(seed)
    leaving = {rank: (chance.randrange(EPOCHS), chance.randrange(1, BATCHES)) for rank in range(workers)[:deaths]}
    names = [data_server_name(n) for n in range(servers)]
    readers = [LoopingReader(rank, workers, names, leaving) for rank in range(workers)]
    memories = {name: Memory() for name in names}
    simulation = Simulation(
        [*map(DataServer, names), *readers],
        seed=seed,
        network=network,
        faults=faults,
        perform={name: memory.perform for name, memory in memories.items()},
    )
    done = simulation.run(600.0, until=lambda: all(r.gone or r.epoch == EPOCHS for r in readers))
    return done, readers, leaving, memories


def faults_of(seed: int, servers: int, workers: int) -> tuple[list[Fault], LossyNetwork]:
    chance = Random(seed + 1000)
    faults: list[Fault] = []
    for n in range(servers):
        name = data_server_name(n)
        match chance.randrange(5):
            case 0:
                faults.append(Stop(name, chance.uniform(0, 1), chance.uniform(0.1, 5)))
            case 1:
                faults.append(Restart(name, chance.uniform(0, 1), lambda name=name: DataServer(name)))
            case 2 if n:  # Killed for good; the first one stays.
                faults.append(Kill(name, chance.uniform(0, 1)))
            case 3:
                faults.append(Partition(frozenset([name]), chance.uniform(0, 1), chance.uniform(0.1, 3)))
            case _:
                pass
    if chance.random() < 0.3:
        faults.append(Stop(f"worker {chance.randrange(workers)}", chance.uniform(0, 1), chance.uniform(0.1, 5)))
    network = LossyNetwork(
        delay=chance.choice([0.0005, 0.02]),
        jitter=chance.choice([0.0, 0.02, 0.3]),
        loss=chance.choice([0.0, 0.1, 0.3]),
        duplicate=chance.choice([0.0, 0.2]),
        until=10.0,
    )
    return faults, network


@pytest.mark.parametrize("seed", range(200))
def test_no_example_is_lost_or_doubled_whatever_fails(seed: int) -> None:
    chance = Random(seed)
    workers, servers = chance.randint(1, 4), chance.randint(1, 3)
    deaths = chance.randint(0, workers - 1)
    faults, network = faults_of(seed, servers, workers)

    done, readers, leaving, memories = played(seed, workers, servers, faults, network, deaths)

    assert done, [(r.name, r.epoch, r.batch) for r in readers]
    seen = Counter(example for reader in readers for _, _, part in reader.seen for example in part)
    assert seen == Counter(range(EPOCHS * BATCHES * GLOBAL))
    for reader in readers:
        last = leaving.get(reader._number, (EPOCHS, 0))  # pyright: ignore[reportPrivateUsage]
        order = [(epoch, number) for epoch, number, _ in reader.seen]
        assert order == [(e, b) for e in range(EPOCHS) for b in range(BATCHES) if (e, b) < last]
    for memory in memories.values():
        # Each worker's window, for a process and for its successor.
        assert memory.most <= 2 * (workers * (readers[0].window + 1) + 1)


def test_a_data_server_that_is_silent_loses_its_orders_to_others_and_gets_new_ones_when_it_is_back() -> None:
    names = ["data server 0", "data server 1"]
    reader = BatchReader("worker 0", 0, names)
    reader.open(0)
    effects = [*reader.order(0, 0, Payload(8)), *reader.order(0, 1, Payload(8))]
    assert [e.to for e in effects if isinstance(getattr(e, "message", None), Order)] == names  # pyright: ignore
    for _ in range(PROBES + 1):
        reader.on(Received("data server 1", Supply(0, 1, 1)), 0.0)
        effects = reader.on(Timer("again"), AGAIN)
    assert {e.to for e in effects if getattr(e, "message", None) is not None} == set(names)  # pyright: ignore
    assert reader.waits_for(0) == ["data server 1"]
    assert reader.moved == 1
    reader.on(Received("data server 0", Supply(0, 1, 0), Payload(8, "late but right")), 0.0)
    assert reader.ready(0)
    assert reader.take(0).handle == "late but right"


def test_the_batch_that_is_needed_first_is_prepared_first() -> None:
    server = DataServer("data server 0")
    first = server.on(Received("worker 0", Order(0, 1, 7, 5, 0)), 0.0)
    assert [e.work.order.number for e in first if hasattr(e, "work")] == [7]  # pyright: ignore
    server.on(Received("worker 0", Order(0, 1, 6, 5, 0)), 0.0)
    server.on(Received("worker 1", Order(0, 1, 3, 3, 0)), 0.0)
    after = server.on(Done("prepared", Payload(1)), 0.0)
    assert [(e.work.worker, e.work.order.number) for e in after if hasattr(e, "work")] == [("worker 1", 3)]  # pyright: ignore


def test_what_spoils_a_batch_is_raised_when_the_loop_comes_to_it() -> None:
    server, reader = DataServer("data server 0"), BatchReader("worker 0", 0, ["data server 0"])
    reader.open(0)
    reader.order(0, 0, Payload(8))
    server.on(Received("worker 0", Order(0, 1, 0, 0, 0), Payload(8)), 0.0)
    effects = server.on(Done("prepared", "ValueError: example 3 is broken"), 0.0)
    for effect in effects:
        reader.on(Received("data server 0", effect.message), 0.0)  # pyright: ignore
    with pytest.raises(SpoiledBatchError, match="example 3 is broken"):
        reader.take(0)


def test_a_pass_begun_while_another_goes_on_ends_the_first_with_the_reason() -> None:
    reader = BatchReader("worker 0", 0, ["data server 0"])
    pieces = iter([lambda: (Payload(8), ())] * 3)
    earlier: LoaderPass[tuple[()]] = LoaderPass(reader, 0, 0, pieces, lambda: 1)
    earlier.ordered()
    LoaderPass(reader, 0, 0, pieces, lambda: 1)
    with pytest.raises(DataError, match="iterated again"):
        earlier.ordered()


def test_a_pass_that_is_left_frees_what_was_prepared() -> None:
    server, reader = DataServer("data server 0"), BatchReader("worker 0", 0, ["data server 0"])
    reader.open(0)
    (order, _) = reader.order(0, 0, Payload(8))
    server.on(Received("worker 0", order.message, Payload(8)), 0.0)  # pyright: ignore
    server.on(Done("prepared", made := Payload(1)), 0.0)
    (close,) = reader.close(0)
    effects = server.on(Received("worker 0", close.message), 0.0)  # pyright: ignore
    assert [effect.work.payload for effect in effects if hasattr(effect, "work")] == [made]  # pyright: ignore
    assert not server.on(Received("worker 0", order.message, Payload(8)), 0.0)  # pyright: ignore
    (again,) = reader.on(Received("data server 0", Supply(0, 1, 0), made), 0.0)
    assert again == close
