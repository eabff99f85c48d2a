"""Sandblaster in virtual time under random faults: the same bits, whatever is killed, stopped, cut off or lost.

`offbeat check offbeat.testing.sandblaster_faults:SandblasterContract` tries more seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from offbeat.protocols.machine import Effect, Event, Machine, Name, Payload, Received, SetTimer, Start, Timer
from offbeat.protocols.partition import share
from offbeat.protocols.sandblaster.lbfgs import Lbfgs
from offbeat.protocols.sandblaster.messages import first_view
from offbeat.protocols.sandblaster.minimizer import Minimizer
from offbeat.protocols.sandblaster.replica import VectorShard
from offbeat.protocols.sandblaster.worker import Compute, Computed, PortionWorker, Ready, TakePart
from offbeat.protocols.servers.coordinator import Changed, CoordinatorMachine
from offbeat.protocols.servers.messages import COORDINATOR, Timeouts, Viewed, server_name, worker_name
from offbeat.protocols.servers.worker.client import ClientMachine
from offbeat.protocols.servers.worker.notices import Departed
from offbeat.runtime.sandblaster.registers import Registers
from offbeat.simulate.machine_contract import MachineContract
from offbeat.simulate.machines import Fault, Kill, LossyNetwork, Partition, Simulation, Stop

FEATURES, EXAMPLES, SHARDS = 6, 24, 2
TIMES = Timeouts(heartbeat=0.05, silence=0.4, startup=20.0, resend=0.1)
FOREVER = 5000.0
_NEXT, _LOOK = "next", 0.005

Row = NDArray[np.float64]


class SearchingWorker:
    """A worker of the run: its membership, its portions, and a loop of iterations with a barrier after each."""

    def __init__(self, world: SandblasterWorld, rank: int) -> None:
        view = first_view(world.workers, SHARDS, world.replicas)
        self.name = worker_name(rank)
        self.rank, self.ended, self.out = rank, 0, False
        self.stage = "waiting"  # Or loading, searching or reading.
        self.row: Row = np.zeros(FEATURES)
        self._client = ClientMachine(rank, view, timing=TIMES)
        self._machine = PortionWorker(rank, view)
        self._world = world

    def begin(self, now: float) -> Sequence[Effect]:
        """Join the run."""
        return [*self._client.begin(now), SetTimer(_LOOK, _NEXT)]

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle an event: membership is the client's."""
        if self.out:
            return ()
        match event:
            case Timer(token) if token == _NEXT:
                return self._next()
            case Received(sender) if sender == COORDINATOR:
                effects = list(self._client.on(event, now))
            case Timer(str()):
                effects = list(self._client.on(event, now))
            case _:
                effects = list(self._machine.on(event, now))
        for effect in tuple(effects):
            if isinstance(effect, Start):
                effects += self._noticed(effect.work, now)
        return effects

    @property
    def over(self) -> bool:
        """Whether its last iteration has ended, and it has read the parameters."""
        return self.ended >= self._world.iterations and self.stage == "waiting"

    def _next(self) -> Sequence[Effect]:
        """Begin what is next, if the others are there: the first of them loads the parameters."""
        if self.stage != "waiting" or self.over:
            return ()
        if not self._world.loaded:
            if self._world.present[:1] == [self]:
                self.stage = "loading"
                return self._machine.load("float64", parts_of(self.row))
        elif self._world.all_past(self.ended):
            self.stage = "searching"
            return self._machine.iterate()
        return [SetTimer(_LOOK, _NEXT)]

    def _noticed(self, work: Any, now: float) -> Sequence[Effect]:
        match work:
            case Changed(view):
                return self._machine.on(Received(COORDINATOR, Viewed(view)), now)
            case Departed():
                self.out = True
            case Ready(None):
                self.stage, self._world.loaded = "waiting", True
                return [SetTimer(_LOOK, _NEXT)]
            case Ready():
                self.stage, self.ended = "reading", self.ended + 1
                return self._machine.read()
            case _:
                pass
        return ()

    def do(self, work: Any) -> Any:
        """Its share of a least-squares problem."""
        match work:
            case TakePart(shard, part):
                self.row[slice(*share(FEATURES, shard, SHARDS))] = part.handle
            case Compute(_, portion):
                return self._world.computed(portion, self.row)
            case _:
                pass
        return None


def parts_of(row: Row) -> list[Payload]:
    """A vector as payloads for the shards."""
    parts = [row[slice(*share(FEATURES, shard, SHARDS))].copy() for shard in range(SHARDS)]
    return [Payload(part.nbytes, part) for part in parts]


@dataclass
class SandblasterWorld:
    """A small least-squares problem: workers, shards and coordinators with copies, and the run's membership."""

    workers: int = 3
    replicas: int = 1
    portions: int = 6
    iterations: int = 4

    def __post_init__(self) -> None:
        """Make the machines."""
        source = np.random.default_rng(1)
        self.inputs, self.wanted = source.normal(size=(EXAMPLES, FEATURES)), source.normal(size=EXAMPLES)
        view = first_view(self.workers, SHARDS, self.replicas)
        copies = range(self.replicas + 1)
        self.membership = CoordinatorMachine(view, timing=TIMES)
        self.shards = [VectorShard(n, view, copy, timing=TIMES) for n in range(SHARDS) for copy in copies]
        self.minimizers = [Minimizer(Lbfgs(5), self.portions, view, copy, timing=TIMES) for copy in copies]
        self.searching = [SearchingWorker(self, rank) for rank in range(self.workers)]
        self.loaded = False  # Whether the shards have the first parameters.
        self.registers = {shard.name: Registers() for shard in self.shards}

    @property
    def machines(self) -> list[Machine]:
        """All of them."""
        return [self.membership, *self.minimizers, *self.shards, *self.searching]

    def perform(self, name: Name, work: Any) -> Any:
        """The work of a machine."""
        if name in self.registers:
            result = self.registers[name].do(work)
            # A message on its way does not change with the register.
            return Payload(result.nbytes, result.handle.copy()) if isinstance(result, Payload) else result
        worker = next((worker for worker in self.searching if worker.name == name), None)
        return None if worker is None else worker.do(work)

    def computed(self, portion: int, row: Row) -> Computed:
        """Loss and gradient of a portion."""
        rows = slice(*share(EXAMPLES, portion, self.portions))
        error = self.inputs[rows] @ row - self.wanted[rows]
        return Computed(float(error @ error) / 2 / EXAMPLES, parts_of(self.inputs[rows].T @ error / EXAMPLES))

    @property
    def present(self) -> list[SearchingWorker]:
        """The workers that are members, as far as the run knows."""
        return [worker for worker in self.searching if worker.rank in self.membership.view.workers]

    def all_past(self, iterations: int) -> bool:
        """Whether all members have come to the barrier after so many iterations: a dead one has not, until seen."""
        return all(worker.ended >= iterations and worker.stage != "reading" for worker in self.present)

    @property
    def over(self) -> bool:
        """Whether all members have ended, or the run has, because a shard is lost."""
        return bool(self.membership.lost) or all(worker.over or worker.out for worker in self.present)

    def wrong(self) -> str | None:
        """What must never be: a worker that has read other parameters than it would have undisturbed."""
        expected = undisturbed(self.portions, self.iterations)
        for worker in self.searching:
            if worker.stage == "waiting" and worker.ended and worker.row.tobytes() != expected[worker.ended - 1]:
                return f"{worker.name} has other parameters after iteration {worker.ended} than undisturbed"
        return None

    def simulation(self, **settings: Any) -> Simulation:
        """The machines in virtual time."""
        work = {machine.name: partial(self.perform, machine.name) for machine in self.machines}
        return Simulation(self.machines, perform=work, observer=COORDINATOR, **settings)


@cache
def undisturbed(portions: int, iterations: int) -> tuple[bytes, ...]:
    """The parameters after each iteration, of one worker and no copies, with nothing going wrong."""
    rows: list[bytes] = []
    for count in range(1, iterations + 1):
        world = SandblasterWorld(workers=1, replicas=0, portions=portions, iterations=count)
        world.simulation().run(FOREVER, lambda world=world: world.over)
        rows.append(world.searching[0].row.tobytes())
    return tuple(rows)


@dataclass(frozen=True)
class FaultyPlay:
    """A run under random faults, after its end."""

    world: SandblasterWorld
    simulation: Simulation
    ended: bool


def play(seed: int, replicas: int = 1) -> FaultyPlay:
    """A run by its seed: one copy of each server may die or be stopped for long, and workers, and messages be lost."""
    chance = Random(seed)  # noqa: S311 - faults to be repeated, not secrets
    world = SandblasterWorld(replicas=replicas)
    network = LossyNetwork(
        jitter=chance.choice([0.0, 0.002, 0.05]),
        loss=chance.choice([0.0, 0.05, 0.2]),
        duplicate=chance.choice([0.0, 0.3]),
        until=20.0,
    )
    faults: list[Fault] = []
    struck = [worker_name(rank) for rank in chance.sample([1, 2], chance.choice([0, 0, 1, 2]))]
    for server in range(SHARDS + 1):  # One of its copies at most, so that the other is left.
        struck += [server_name(server, chance.randrange(replicas + 1))] if chance.random() < 0.6 and replicas else []
    for name in struck:
        at, kind = chance.uniform(0.01, 0.6), chance.choice(["kill", "kill", "stop", "partition"])
        if kind == "kill":
            faults.append(Kill(name, at, seen_after=chance.choice([None, chance.uniform(0.0, 0.5)])))
        elif kind == "stop":
            faults.append(Stop(name, at, chance.choice([0.1, 1.0, 5.0])))
        else:
            faults.append(Partition(frozenset([name]), at, chance.choice([0.1, 1.0, 5.0])))
    simulation = world.simulation(seed=seed, network=network, faults=faults)
    return FaultyPlay(world, simulation, simulation.run(FOREVER, lambda: world.over))


class SandblasterContract(MachineContract):
    """The same bits as undisturbed, whatever happens; and the end, unless all copies of a shard are gone."""

    sizes: ClassVar[Sequence[int]] = (2, 3, 4)  # Workers.
    patience: ClassVar[float] = FOREVER

    def machines(self, size: int, seed: int) -> Sequence[Machine]:
        """A run with a copy of everything."""
        del seed
        self._world = SandblasterWorld(workers=size)
        return self._world.machines

    def invariant(self, machines: Mapping[Name, Machine]) -> str | None:
        """Every worker that has read parameters has those of an undisturbed run."""
        del machines
        return self._world.wrong()

    def done(self, machines: Mapping[Name, Machine]) -> bool:
        """All live workers have made their iterations, or the run has ended because all copies of a shard are gone."""
        present = [worker for worker in self._world.present if worker.name in machines]
        return bool(self._world.membership.lost) or all(worker.over or worker.out for worker in present)

    def victims(self, names: Sequence[Name]) -> Sequence[Name]:
        """One copy of each server and all workers but the first; the run ends with its membership's coordinator."""
        copies = [server_name(server, server % 2) for server in range(SHARDS + 1)]
        return [name for name in names if name in copies or (name.startswith("worker") and name != worker_name(0))]

    def perform(self, name: Name, work: Any) -> Any:
        """Commands, gradients and sums."""
        return self._world.perform(name, work)
