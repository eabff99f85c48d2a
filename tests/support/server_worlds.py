"""A whole cluster of machines in virtual time, with numbers whose fate can be told exactly.

A gradient is named by who pushed it, for which step and shard; a replica's parameters are the list of what was used, in
order, and a sum. So a lost or doubled push is seen at once, and equal replicas are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from offbeat.protocols.machine import Effect, Event, Name, Payload, Received, Send, SetTimer, Start, Timer
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.coordinator import Changed, CoordinatorMachine
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    ClusterView,
    Lost,
    Met,
    PullReply,
    Push,
    PushReply,
    Timeouts,
    server_name,
)
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.replica.works import (
    AccumulateGradient,
    Discard,
    Inspect,
    ReadShard,
    ReduceGradients,
    Restore,
    Update,
)
from offbeat.protocols.servers.worker.client import ClientMachine
from offbeat.protocols.servers.worker.notices import (
    Arrived,
    Completed,
    Departed,
    Failed,
    Joined,
    MeetRequest,
    PullRequest,
    PushedRange,
    PushRequest,
    Refreshed,
)
from offbeat.simulate.machines import Fault, Kill, LossyNetwork, Partition, Restart, Simulation, Stop

CALM = 12.0
"""When faults cease."""
PATIENCE = 60.0
"""Virtual seconds in which everything must be over."""


@dataclass(frozen=True)
class Gradient:
    worker: int
    life: int
    process: int
    clock: int
    shard: int
    part: int
    fit: bool = True
    read: float | None = field(default=None, compare=False)
    """The value that it was computed from."""

    @property
    def value(self) -> float:
        """Differs by worker and step, and not by life, process or timing."""
        return float((self.worker + 2) * (self.clock + 3) + self.part)


@dataclass
class Store:
    """The numbers of one replica."""

    value: float = 0.0
    total: float = 0.0
    used: list[Gradient] = field(default_factory=list)
    discarded: list[Gradient] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: dict[int, float] = field(default_factory=dict)
    totals: list[tuple[float, ...]] = field(default_factory=list)
    """Sums over all shards, by update."""
    late: int = 0
    """Gradients that were computed from an earlier version, which was kept."""

    def remember(self, work: Update) -> None:
        """What a gradient was computed from must be known here, whoever has read it from whom."""
        self.kept[work.version - 1] = self.value
        self.kept = {version: value for version, value in self.kept.items() if version >= work.oldest}
        read, origin = work.payload.handle.read, work.version - 1 - work.missed
        assert read is None or self.kept[origin] == read, f"version {origin} was {read}, not {self.kept[origin]}"
        self.late += work.missed > 0

    def perform(self, work: Any) -> Any:
        match work:
            case Inspect():
                return "" if work.payload.nbytes == 0 or work.payload.handle.fit else "NaN"
            case AccumulateGradient():
                self.used.append(work.payload.handle)
                self.total += work.weight * work.payload.handle.value
            case ReduceGradients():
                self.total *= work.scale if work.level == 0 else 1.0
                # The second level depends on what the first one has given.
                return (self.total, self.total) if work.level == 0 else (self.total * work.totals[1],)
            case Update(payload=None) if work.refused:
                self.total = 0.0
                self.versions.append(work.version)
            case Update(payload=None):
                self.totals.append(work.totals)
                self.value += work.scale * self.total
                self.total = 0.0
                self.versions.append(work.version)
            case Update():
                if work.oldest is not None:
                    self.remember(work)
                self.used.append(work.payload.handle)
                self.value += work.scale * work.payload.handle.value
                self.versions.append(work.version)
            case Discard():
                self.discarded.append(work.payload.handle)
            case ReadShard(state=True):
                return Payload(1, deepcopy(self))
            case ReadShard():
                return Payload(1, (self.value, frozenset((g.worker, g.life, g.clock, g.part) for g in self.used)))
            case Restore(payload=Payload(handle=Store() as other)):
                self.__dict__.update(deepcopy(other).__dict__)
            case Restore():
                self.value = work.payload.handle
                self.versions.append(work.version)
        return None


@dataclass(frozen=True)
class Setting:
    """What a world is made of."""

    workers: int = 3
    shards: int = 1
    replicas: int = 1
    rule: Rule = field(default_factory=lambda: Rule(0))
    steps: int = 6
    parts: int = 1
    parts_of: tuple[int, ...] = ()  # The part of the model that each worker has.
    """Parts of the model: the workers of each have shards of their own."""
    pace: float = 0.2
    rejoin: bool = True
    together: bool = True
    """A pull goes along with each push."""
    renews: float | None = None
    """Seconds after which a new process takes the place of a dead server; none: it is not replaced."""


class Loop:
    """A worker that pulls, computes for a while, pushes, and so on; then meets the others and leaves."""

    def __init__(self, world: World, client: ClientMachine, process: int) -> None:
        self.world = world
        self.client = client
        self.name = client.name
        self.process = process
        self.clock = 0
        self.finished = False
        self.waiting = 0
        self.pushing = False
        self.values: dict[int, float] = {}
        self.random = Random(f"{world.seed} {client.worker} {process}")

    def begin(self, now: float) -> Sequence[Effect]:
        effects = [*self.client.begin(now)]
        effects += self.client.join() if self.process else self.pull(now)
        return self.handle(effects, now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        if isinstance(event, Received):
            self.world.heard(self, event)
        if event == Timer("computed"):
            return self.handle(self.push(now), now)
        return self.handle(self.client.on(event, now), now)

    def handle(self, effects: Iterable[Effect], now: float) -> list[Effect]:
        """Pass on what is for the network, and act on what the client has to say."""
        done: list[Effect] = []
        waiting = list(effects)
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, Start):
                waiting += self.notice(effect.work, now)
                continue
            if isinstance(effect, Send) and isinstance(effect.message, Push) and effect.payload.nbytes:
                push, gradient = effect.message, effect.payload.handle
                self.world.pushed[push.worker, push.life, self.process, gradient.shard, push.number] = gradient
            done.append(effect)
        return done

    def pull(self, now: float) -> Sequence[Effect]:
        self.pushing = False
        asked = self.client.ask(PullRequest(self.clock, anew=True), now)
        self.waiting = asked.token
        return asked.effects

    def push(self, now: float) -> Sequence[Effect]:
        if not self.client.member or self.waiting:
            return ()
        setting = self.world.setting
        mine = (self.client.worker, self.client.life, self.process, self.clock)
        fit = (self.client.worker, self.clock) not in self.world.unfit
        parts = [
            PushedRange(shard, Payload(1, Gradient(*mine, number, part, fit=fit, read=self.values.get(shard))))
            for shard, number in enumerate(self.client.view.shards_of(self.client.worker))
            for part in range(setting.parts)
        ]
        asked = self.client.ask(PushRequest(parts, self.clock, then_pull=setting.together), now)
        self.pushing = True
        self.waiting = asked.pull or asked.token
        return asked.effects

    def notice(self, work: Any, now: float) -> Sequence[Effect]:
        match work:
            case Departed():
                self.waiting = 0
                return self.client.join() if self.world.setting.rejoin else ()
            case Joined():
                self.world.starts[self.client.worker, self.client.life] = work.clock
                self.clock = work.clock
                return self.pull(now)
            case Failed() | Lost():
                self.world.complaints.append(work)
            case Arrived():
                self.take(work.shard, work.payload)
                self.world.read(self, work)
            case Completed() if work.token == self.waiting:
                return self.completed([reply for _, reply in work.replies], now)
            case Refreshed():
                self.client.took(work.shard, work.fresh)
                self.take(work.shard, work.payload)
                self.world.refreshed += 1
            case _:
                pass
        return ()

    def take(self, shard: int, payload: Payload) -> None:
        """Go on from these values, if they are some."""
        if payload.nbytes and isinstance(payload.handle, tuple):
            self.values[shard] = payload.handle[0]

    def completed(self, replies: list[Any], now: float) -> Sequence[Effect]:
        self.waiting = 0
        if isinstance(replies[0], Met):
            self.finished = True
            self.world.met.append(replies[0])
            return self.client.leave()
        self.clock += self.pushing
        if self.world.setting.rule.closes:
            self.clock = max(self.clock, *(reply.clock for reply in replies))
        needed = self.world.setting.rule.needed(self.clock)
        if isinstance(replies[0], PushReply) or any(reply.clock < needed for reply in replies):
            return self.pull(now)
        if self.clock < self.world.setting.steps:
            return [SetTimer(self.random.uniform(0.2, 1.8) * self.world.setting.pace, "computed")]
        asked = self.client.ask(MeetRequest("end", (float(self.clock),)), now)
        self.waiting = asked.token
        return asked.effects


class World:
    """Coordinator, servers and workers, and what must be true of them."""

    def __init__(
        self,
        setting: Setting,
        seed: int = 0,
        network: LossyNetwork | None = None,
        faults: Sequence[Fault] = (),
        server: type[ServerMachine] = ServerMachine,
        unfit: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.setting = setting
        self.seed = seed
        self.server = server
        self.view = ClusterView.of(setting.workers, setting.shards, setting.replicas, setting.parts_of)
        self.unfit = set(unfit)
        self.pushed: dict[tuple[int, int, int, int, int], Gradient] = {}
        self.acknowledged: set[Gradient] = set()
        self.statuses: Counter[str] = Counter()
        self.starts: dict[tuple[int, int], int] = {(worker, 0): 0 for worker in range(setting.workers)}
        self.complaints: list[Any] = []
        self.met: list[Met] = []
        self.refreshed = 0
        self.reads = 0
        self.coordinator = CoordinatorMachine(self.view, timing=Timeouts(startup=5.0))
        self.servers = [
            server(name, shard, setting.rule, self.view)
            for shard in range(setting.shards)
            for name in (self.view.primaries[shard], *self.view.backups[shard])
        ]
        self.stores = {machine.name: Store() for machine in self.servers}
        loops = [self.loop(worker) for worker in range(setting.workers)]
        self.simulation = Simulation(
            [self.coordinator, *self.servers, *loops],
            seed=seed,
            network=network,
            faults=faults,
            perform={name: store.perform for name, store in self.stores.items()} | {COORDINATOR: self.launched},
        )

    def launched(self, news: Any) -> None:
        """What whoever has started the processes does: for a server that has died it starts another."""
        if self.setting.renews is None or not isinstance(news, Changed):
            return
        for name in news.died:
            if not name.startswith("server"):
                continue
            shard = int(name.split()[1].split(".")[0])
            copies = sum(machine.number == shard for machine in self.servers)
            new = server_name(shard, copies)
            machine = self.server(new, shard, self.setting.rule, self.view, joins=True)
            self.servers.append(machine)
            self.stores[new] = Store()
            self.simulation.performing(new, self.stores[new].perform)
            at = self.simulation.now + self.setting.renews
            self.simulation.add([Restart(new, at, lambda machine=machine: machine)])

    def loop(self, worker: int, process: int = 0) -> Loop:
        return Loop(self, ClientMachine(worker, self.view, process=process), process)

    def loops(self) -> list[Loop]:
        """The workers that live."""
        names = [f"worker {worker}" for worker in range(self.setting.workers)]
        machines = [self.simulation.machine(name) for name in names if self.simulation.alive(name)]
        return [machine for machine in machines if isinstance(machine, Loop)]

    def heard(self, loop: Loop, event: Received) -> None:
        """Note what was acknowledged, also by one who is no longer asked."""
        reply = event.message.pushed if isinstance(event.message, PullReply) else event.message
        if not isinstance(reply, PushReply):
            return
        shard = int(event.sender.split()[1].split(".")[0])
        gradient = self.pushed.get((loop.client.worker, reply.life, loop.process, shard, reply.number))
        self.statuses[f"{reply.status} {reply.reason}".strip()] += 1
        known = reply.status == "duplicate" and gradient is not None and gradient.fit and not self.setting.rule.closes
        if gradient is not None and (reply.status == "applied" or known):
            self.acknowledged.add(gradient)

    def read(self, loop: Loop, work: Arrived) -> None:
        """Every read has all that the bound promises, of every worker that takes part."""
        self.reads += 1
        rule = self.setting.rule
        if rule.closes or rule.bound is None or work.reply.unchanged:
            return
        clock = loop.clock + loop.pushing
        _, seen = work.payload.handle
        view = self.coordinator.view
        for worker, life in view.members_of(view.shards_of(loop.client.worker)[work.shard]).items():
            start = self.starts.get((worker, life))
            for step in range(start, clock - rule.bound) if start is not None else ():
                if (worker, step) in self.unfit:
                    continue
                for part in range(self.setting.parts):
                    assert (worker, life, step, part) in seen, f"a read at clock {clock} lacks {worker}'s step {step}"

    def run(self, until: float = PATIENCE) -> World:
        """Let everything happen, and then be still for a while."""
        over = self.simulation.run(until, lambda: all(loop.finished for loop in self.loops()))
        waiting = {
            loop.name: (loop.clock, loop.client.outstanding.waited_for()) for loop in self.loops() if not loop.finished
        }
        assert over, f"still waiting: {waiting}"
        self.simulation.run(self.simulation.now + 5.0)
        return self

    def primary(self, shard: int) -> Store:
        return self.stores[self.coordinator.view.primaries[shard]]

    def check(self) -> World:
        """Nothing lost, nothing doubled, all replicas equal."""
        assert not self.complaints
        assert not self.coordinator.lost
        for shard in range(self.setting.shards):
            primary = self.primary(shard)
            for name in self.coordinator.view.backups[shard]:
                store = self.stores[name]
                assert (store.used, store.value, store.versions) == (primary.used, primary.value, primary.versions)
            lost = {g for g in self.acknowledged if g.shard == shard} - {*primary.used}
            assert not lost, f"acknowledged and lost: {lost}"
        for name, store in self.stores.items():
            doubled = [gradient for gradient, times in Counter(store.used).items() if times > 1]
            assert not doubled, f"{name} has used twice: {doubled}"
        return self

    def values(self) -> list[float]:
        return [self.primary(shard).value for shard in range(self.setting.shards)]


def random_world(seed: int, **changes: Any) -> World:
    """A world with a random setting, network and faults; never more of a shard's replicas fail than it has backups."""
    random = Random(seed)
    rules = [
        Rule(0),
        Rule(0),
        Rule(1),
        Rule(3),
        Rule(2, eager=True),
        Rule(None),
        Rule(0, drop=1),
        Rule(0, deadline=0.3),
    ]
    setting = Setting(
        workers=random.randint(1, 4),
        shards=random.randint(1, 2),
        replicas=random.randint(0, 2),
        rule=random.choice(rules),
        steps=random.randint(3, 8),
        parts=random.choice([1, 1, 2]),
        together=random.random() < 0.6,
        pace=random.choice([0.01, 0.05, 0.3]),
    )
    network = LossyNetwork(
        delay=random.choice([0.001, 0.02]),
        jitter=random.choice([0.0, 0.002, 0.02, 0.1]),
        loss=random.choice([0.0, 0.02, 0.05]),
        duplicate=random.choice([0.0, 0.1]),
        until=CALM,
    )
    world = World(setting, seed, network, **changes)
    add_faults(world, random)
    return world


def add_faults(world: World, random: Random) -> None:
    """Servers fail within what the replicas allow; workers fail as they like, but the first is never killed."""
    setting, faults = world.setting, list[Fault]()
    span = setting.steps * (setting.pace + 0.1)
    for shard in range(setting.shards):
        names = [machine.name for machine in world.servers if machine.number == shard]
        failing = random.randint(0, setting.replicas)
        for name in names[:failing] if random.random() < 0.5 else random.sample(names, failing):
            faults += server_fault(name, random.uniform(0, span), random)
    for worker in range(1, setting.workers):
        if random.random() < 0.4:
            faults += worker_fault(world, worker, random.uniform(0, span), random)
    if random.random() < 0.1:
        faults.append(Stop(COORDINATOR, random.uniform(0, span), random.uniform(0.1, 4)))
    world.simulation.add(faults)


def server_fault(name: Name, at: float, random: Random) -> list[Fault]:
    kind = random.choice(["kill", "ended", "stop", "cut", "cut with a worker"])
    if kind == "kill":
        return [Kill(name, at)]
    if kind == "ended":
        return [Kill(name, at, seen_after=0.01)]
    if kind == "stop":
        return [Stop(name, at, random.choice([0.2, 1.0, 2.0, 5.0]))]
    names = {name, "worker 0"} if kind == "cut with a worker" else {name}
    return [Partition(frozenset(names), at, random.uniform(0.2, 4))]


def worker_fault(world: World, worker: int, at: float, random: Random) -> list[Fault]:
    name = f"worker {worker}"
    kind = random.choice(["kill", "stop", "cut", "restart", "restart at once"])
    if kind == "kill":
        return [Kill(name, at, random.choice([None, 0.01]))]
    if kind == "stop":
        return [Stop(name, at, random.choice([0.2, 1.0, 2.0, 5.0]))]
    if kind == "cut":
        return [Partition(frozenset({name}), at, random.uniform(0.2, 4))]
    again = at + (0.001 if kind == "restart at once" else random.uniform(0.1, 4))
    make: Callable[[], Loop] = lambda: world.loop(worker, process=1)  # noqa: E731
    return [Kill(name, at), Restart(name, again, make)]
