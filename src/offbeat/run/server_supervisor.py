"""Supervises the parameter servers of a run from the launcher: their processes, failures and replacements."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import msgspec

from offbeat.errors import OffbeatError, RunError, WaitError, WorkerError
from offbeat.protocols.disturbances import DATA_SERVER
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import place_of, server_name, worker_name
from offbeat.run.job import Job, identity_of
from offbeat.runtime.hosts import Hosts, Placed, PlacedHost
from offbeat.runtime.launch import Role, RoleOutcome, obituary
from offbeat.runtime.run.folder import RunFolder
from offbeat.strategies import combined, parse
from offbeat.strategies.federated.strategy import Federated
from offbeat.strategies.sandblaster import Sandblaster
from offbeat.strategies.splitting.layouts import order_of
from offbeat.strategies.worker.exchange import Exchanging

if TYPE_CHECKING:
    from offbeat.protocols.servers.snapshots import GivenUp, Snapshot
    from offbeat.runtime.sandblaster.plan import SandblasterPlan
    from offbeat.runtime.servers.coordination import Coordination
    from offbeat.runtime.servers.plan import ServerPlan


def servers_of(job: Job) -> tuple[int, int, Rule] | None:
    """Shards, further copies of each and the rule, if the job's strategy has servers or a coordinator."""
    if job.goal.strategy is None:
        return None
    strategy = combined(parse(job.goal.strategy))
    needs = cast("Exchanging", strategy.exchange).servers(strategy.replicas(job.workers))
    # Each part of a model that is split has shards of its own.
    return None if needs is None else (needs[0] * strategy.replica_size, *needs[1:])


def role_counts(job: Job) -> dict[str, int]:
    """Number of processes of each role; of servers, the number of shards; of clients, the simulated ones."""
    needs = servers_of(job)
    counts = {"worker": job.workers} | ({"server": needs[0]} if needs and needs[0] else {})
    exchange = None if job.goal.strategy is None else combined(parse(job.goal.strategy)).exchange
    counts |= {DATA_SERVER: job.goal.data_servers} if job.goal.data_servers else {}
    if isinstance(exchange, Sandblaster):  # The last server commands the others.
        counts |= {"server": counts["server"] - 1, "coordinator": 1}
    return counts | ({"client": exchange.clients} if isinstance(exchange, Federated) else {})


SPARES = 16
"""Servers of a shard that are replaced; if more die, something is fundamentally wrong."""
GRACE = 2.0
"""Seconds in which the launcher may report how a worker of a split replica has ended."""
STARTUP = 120.0
"""Seconds until the first process can start: on a busy machine the fork server's imports take long."""
PATIENCE = 15.0
"""Seconds that a process declared dead has to notice and end by itself."""


class Serving:
    """The servers of one run, and their coordinator; most runs have none."""

    def __init__(
        self, plan: ServerPlan | None = None, coordination: Coordination | None = None, placed: Placed | None = None
    ) -> None:
        self.plan, self._coordination, self._placed = plan, coordination, placed
        self._declared: dict[str, float] = {}
        self._noticed: float | None = None  # When a worker was found dead on whose part of a replica others depend.
        self._working = 0 if plan is None else plan.workers
        self._replaced = 0
        self._finished: set[str] = set()
        self._signalled: list[str] = []
        """Workers ended by a signal; one that could still leave in order is not among the dead of any view."""
        self._replicas = {} if plan is None else dict(enumerate(_replicas(plan)))
        """Shard and replica of every server process, by its rank."""
        self._make: Callable[[int, PlacedHost | None], Role] | None = None
        self._succeeded: set[str] = set()
        self._ended: dict[str, str] = {}  # Servers that ended before the workers did, and how.
        self.lost_machines: Mapping[str, str] = {}
        """Machines that are gone, by name; nothing is started there."""

    def roles(self, job: Job, folder: RunFolder) -> list[Role]:
        """A process for every replica of every shard; under sandblaster its shards, and what commands them."""
        plan = self.plan
        if plan is None:
            return []
        exchange = combined(parse(job.goal.strategy or "")).exchange
        if isinstance(exchange, Sandblaster):
            return vector_roles(
                exchange.plan(plan), job, folder, [self._home(*place) for place in self._replicas.values()]
            )

        def role(rank: int, home: PlacedHost | None) -> Role:
            shard, replica = self._replicas[rank]
            return Role(
                kind="server",
                rank=rank,
                entry="offbeat.runtime.servers.process:serve",
                config={
                    "plan": plan.plain(),
                    "shard": shard,
                    "replica": replica,
                    "disturb": list(job.goal.disturb),
                    "checkpoints": str(folder.checkpoints.resolve()),
                    "seed": job.goal.seed or 0,
                    "events": str(folder.path.resolve()) if job.goal.watch else None,
                },
                environment={},
                log=folder.log("server", f"{shard}.{replica}"),
                threads=1,
                serves=True,
                expendable=True,
                network=None if home is None else home.network,
                machine="" if home is None else home.machine,
                name=server_name(shard, replica),
            )

        self._make = role
        return [role(rank, self._home(*place)) for rank, place in self._replicas.items()]

    def renewals(self) -> list[Role]:
        """New server processes, for shards that have lost a copy and have another one left.

        Each dead server is replaced once, and each shard only `SPARES` times.
        """
        plan = self.plan
        if plan is None or not plan.replicas or self._make is None or not self._working:
            return []
        lost = set() if self._coordination is None else set(self._coordination.machine.lost)
        names = {server_name(*place): place for place in self._replicas.values()}
        new: list[Role] = []
        # Servers that were declared dead, and those that ended before they were known.
        for name in [name for name in (*self.died, *self._ended) if place_of(name) is not None]:
            shard, dead = names.get(name, (-1, 0))
            if name in self._succeeded or shard < 0 or shard in lost:
                continue
            self._succeeded.add(name)
            replica = self._next_replica(shard, dead, plan)
            if replica is not None:
                rank = len(self._replicas)
                self._replicas[rank] = (shard, replica)
                new.append(self._make(rank, self._home(shard, replica)))
        return new

    def _next_replica(self, shard: int, dead: int, plan: ServerPlan) -> int | None:
        """The number of a new copy, on the host of the dead one, so that copies of a shard stay on different hosts.

        If that host is lost, on a host that has no living copy of the shard, if there is one.
        """
        taken = {replica for of, replica in self._replicas.values() if of == shard}
        free = [n for n in range(plan.replicas + 1, plan.replicas + 1 + SPARES) if n not in taken]
        if self._placed is None:
            return min(free, key=lambda n: ((n - dead) % (plan.replicas + 1) != 0, n), default=None)
        gone = {*self.died, *self._ended}
        home = homes_of(plan, self._placed)
        beside = {home[shard, n] for n in taken if server_name(shard, n) not in gone}
        living = [n for n in free if self._placed.hosts[home[shard, n]].machine not in self.lost_machines]
        return min(living, key=lambda n: (home[shard, n] in beside, home[shard, n] != home[shard, dead]), default=None)

    @property
    def places(self) -> dict[str, int]:
        """The host of each server process that was started, such as `0.1`; only where there are hosts."""
        if self.plan is None or self._placed is None:
            return {}
        homes = homes_of(self.plan, self._placed)
        return {f"{shard}.{copy}": homes[shard, copy] for shard, copy in self._replicas.values()}

    def _home(self, shard: int, replica: int) -> PlacedHost | None:
        """The host of a server; None if there are no hosts."""
        if self.plan is None or self._placed is None:
            return None
        return self._placed.hosts[homes_of(self.plan, self._placed)[shard, replica]]

    def tick(self, watcher: Callable[[], None]) -> None:
        """Ten times a second: call the watcher, and check whether the run can continue."""
        watcher()
        if self._coordination is not None and self._working:
            self._coordination.check()
            self._check_replicas()

    def _check_replicas(self) -> None:
        """End a run in which a worker has died on whose part of a replica others depend."""
        dead = [name for name in self.died if name.startswith("worker ")]
        if not dead or self.plan is None or not self.plan.parts:
            return
        # A process that has ended is reported by the launcher, with how it ended; this is for those that are silent.
        self._noticed = self._noticed or time.monotonic()
        if time.monotonic() - self._noticed > GRACE:
            error = WaitError(
                f"{dead[0]} was silent for {self.plan.timing.silence:g} s. It had a part of a replica, whose other "
                f"workers cannot go on without it, so the run ends. Resume from the last checkpoint with --resume; the "
                f"worker's log may say why."
            )
            vars(error).update(role="worker", rank=int(dead[0].removeprefix("worker ")))
            raise error

    def condemned(self, now: float) -> list[str]:
        """Roles that were declared dead long ago and have not ended, such as stopped processes."""
        for name in self.died:
            self._declared.setdefault(name, now)
        overdue = [name for name, since in self._declared.items() if now - since > PATIENCE]
        for name in overdue:
            self._declared[name] = float("inf")
        return overdue

    def ended(self, outcome: RoleOutcome) -> None:
        """A process of the run has ended."""
        plan = self.plan
        if plan is None or self._coordination is None:
            return
        role = outcome.role
        if role.kind == "worker":
            self._working -= 1
            name = worker_name(role.rank)
            self._declared[name] = float("inf")
            if outcome.exit_code == 0 and name not in self.died:
                self._finished.add(name)
            if outcome.signal is not None:
                self._signalled.append(name)
            self._coordination.ended(name)
        elif (
            role.kind == "server"
            and self._working
            and not (outcome.error and outcome.error.type_name == KeyboardInterrupt.__name__)
        ):
            self._ended[str(role)] = obituary(outcome)
            self._coordination.ended(str(role))

    def replacement(self, outcome: RoleOutcome, most: int) -> Role | None:
        """A new worker for a dead one, if fewer than `most` were replaced and others are left to admit it."""
        role = outcome.role
        gone = outcome.signal is not None or (outcome.exit_code == 0 and str(role) in self.died)
        plan = self.plan
        if plan is None or role.kind != "worker" or not gone or not self._working or self._replaced >= most:
            return None
        if plan.parts:
            return None  # Its replica ends, and the run with it.
        self._replaced += 1
        self._working += 1
        return dataclasses.replace(role, config={**role.config, "joins": True})

    @property
    def outlives_workers(self) -> bool:
        """Whether the run goes on when a worker dies."""
        return self.plan is not None and not self.plan.parts

    @property
    def joined(self) -> list[str]:
        """Workers and replacement servers that joined during the run, in order."""
        changes = () if self._coordination is None else self._coordination.changes
        return [name for change in changes for name in (*map(worker_name, change.joined), *change.copied)]

    @property
    def died(self) -> list[str]:
        """Processes that died during the run, in order."""
        if self._coordination is None:
            return []
        died = [name for change in self._coordination.changes for name in change.died]
        for name in dict.fromkeys(self._signalled):
            died += [name] * (self._signalled.count(name) - died.count(name))
        return [name for name in died if name not in self._finished]

    def conclude(self) -> None:
        """All workers have ended without a failure: check that at least one has finished the run."""
        if self.plan is not None and not self._finished:
            raise RunError(
                f"all workers have died or were silent for longer than {self.plan.timing.silence:g} s, so none was "
                f"left to finish the run. Resume from the last checkpoint with --resume; the workers' logs may say why."
            )

    def explained(self, error: OffbeatError) -> OffbeatError:
        """The error of a run, or its cause if that is lost parameters."""
        lost = None if self._coordination is None else self._coordination.loss()
        if lost is None:
            return error
        if isinstance(error, WorkerError):
            # Unless it failed by itself, with its own traceback.
            gone = error.role == "server" and not error.remote_traceback
            return RunError(f"{lost} {error}") if gone else error
        if type(error) is not RunError:
            return error  # Workers raise exactly RunError for the loss; subclasses have other causes.
        shards = set() if self._coordination is None else set(self._coordination.machine.lost)
        names = {server_name(*place) for place in self._replicas.values() if place[0] in shards}
        # How the last server of a lost shard has ended, if that is known.
        return RunError(" ".join([str(lost), *[how for name, how in self._ended.items() if name in names][-1:]]))


def vector_roles(plan: SandblasterPlan, job: Job, folder: RunFolder, homes: Sequence[PlacedHost | None]) -> list[Role]:
    """The shards of Sandblaster and its coordinator, which is the last server, with all their copies."""
    goal = job.goal
    config = {"plan": msgspec.to_builtins(plan), "disturb": list(goal.disturb), "seed": goal.seed or 0}
    return [
        Role(
            kind="server",
            rank=rank,
            entry="offbeat.runtime.sandblaster.process:" + ("hold" if shard < plan.shards else "minimize"),
            config={**config, "shard": shard, "replica": replica},
            environment={},
            log=folder.log("server", f"{shard}.{replica}"),
            threads=1,
            serves=True,
            expendable=True,
            network=None if home is None else home.network,
            machine="" if home is None else home.machine,
            name=server_name(shard, replica),
        )
        for rank, ((shard, replica), home) in enumerate(zip(_replicas(plan.servers), homes, strict=True))
    ]


def _replicas(plan: ServerPlan) -> list[tuple[int, int]]:
    return [(shard, replica) for shard in range(plan.shards) for replica in range(plan.replicas + 1)]


def homes_of(plan: ServerPlan, placed: Placed) -> dict[tuple[int, int], int]:
    """The number of the host of every server process, by shard and replica; also of ones that may replace others."""
    first = _replicas(plan)
    homes = first_homes(placed.wanted, plan.shards, plan.replicas)
    if not plan.replicas:
        return homes
    turns = sorted(set(homes.values()))
    for shard in range(plan.shards):
        # Namespaces cannot be lost, machines can: then replacements must be able to go anywhere.
        begin = turns.index(homes[shard, 0])
        for replica in range(plan.replicas + 1, plan.replicas + 1 + SPARES):
            stay = home_of(shard, replica, plan)
            far = turns[(begin + replica) % len(turns)]
            homes[shard, replica] = far if placed.wanted.are_machines else homes[first[stay]]
    return homes


def first_homes(hosts: Hosts, shards: int, replicas: int) -> dict[tuple[int, int], int]:
    """The number of the host of each server process that is started first, by shard and replica."""
    places = [(shard, replica) for shard in range(shards) for replica in range(replicas + 1)]
    if not hosts.are_machines:
        return dict(zip(places, hosts.of_servers(len(places)), strict=True))
    # Shards take turns, so that no machine has all primaries; the copies of a shard are on the machines after its own.
    own = hosts.of_servers(shards)
    turns = sorted(set(hosts.of_servers(10_000)))
    return {(shard, replica): turns[(turns.index(own[shard]) + replica) % len(turns)] for shard, replica in places}


def home_of(shard: int, replica: int, plan: ServerPlan) -> int:
    """The index of the original server process in whose place a replacement is, on its host."""
    return shard * (plan.replicas + 1) + replica % (plan.replicas + 1)


def _parts_of_workers(job: Job) -> tuple[int, ...]:
    """The part of the model that each worker has; empty if each has a whole one."""
    strategy = combined(parse(job.goal.strategy or ""))
    if not strategy.split:
        return ()
    order = order_of(strategy, job.goal.placement, job.host_of_workers)
    return tuple(order.index(worker) % strategy.replica_size for worker in range(job.workers))


@contextmanager
def serving(job: Job, folder: RunFolder, placed: Placed | None = None) -> Generator[Serving]:
    """The coordinator of the job's servers, if it has any, while the run lasts."""
    needs = servers_of(job)
    if needs is None:
        yield Serving()
        return
    from offbeat.protocols.servers.messages import COORDINATOR, Timeouts
    from offbeat.runtime.messages import private_directory
    from offbeat.runtime.servers.coordination import Coordination
    from offbeat.runtime.servers.plan import ServerPlan
    from offbeat.runtime.state.snapshots import discard

    shards, replicas, rule = needs
    with private_directory() as sockets:
        plan = ServerPlan(
            workers=job.workers,
            shards=shards,
            replicas=replicas,
            parts=_parts_of_workers(job),
            rule=rule,
            folder=str(sockets),
            vectors=isinstance(combined(parse(job.goal.strategy or "")).exchange, Sandblaster),
            # Processes that end are noticed at once; one that reads much data before it begins is not dead.
            timing=Timeouts(startup=STARTUP + job.goal.timeout),
        )
        plan = plan if placed is None else spread(plan, placed)
        with nullcontext() if placed is None else placed.inside():
            coordination = Coordination(plan, _publisher(job, folder))
        plan = msgspec.structs.replace(plan, addresses=plan.addresses | {COORDINATOR: coordination.address})
        with ExitStack() as stack, coordination:
            discard(folder.checkpoints)  # Drafts of incomplete snapshots, before and after.
            stack.callback(discard, folder.checkpoints)
            supervisor = Serving(plan, coordination, placed)
            try:
                yield supervisor
            except OffbeatError as error:
                explained = supervisor.explained(error)
                if explained is error:
                    raise
                raise explained from error
            supervisor.conclude()


def _publisher(job: Job, folder: RunFolder) -> Callable[[Snapshot | GivenUp], None]:
    """Publishes complete snapshots as checkpoints of this run."""
    from offbeat.protocols.servers.snapshots import GivenUp
    from offbeat.runtime.state.certificates import channel_file, shard_file
    from offbeat.runtime.state.checkpoint import file_of
    from offbeat.runtime.state.snapshots import discard, publish_snapshot

    identity = identity_of(job) | {"strategy": str(combined(parse(job.goal.strategy or ""))), "workers": job.workers}
    checkpoints = folder.checkpoints.resolve()

    def act(news: Snapshot | GivenUp) -> None:
        if isinstance(news, GivenUp):
            discard(checkpoints, news.colour)
            return
        files = [file_of(cut.worker) for cut in news.workers]
        files += [name(cut.shard) for cut in news.shards for name in (shard_file, channel_file)]
        publish_snapshot(checkpoints, news.colour, "servers", news.epoch, identity, files)

    return act


FIRST_PORT = 20_000
"""First port of servers: below the ephemeral ports, so that none is taken on a host of our own."""
SLACK = 2.0
"""Factor on the time that a link takes by its rate alone."""
SILENCE = 3.0
"""Seconds without a heartbeat between hosts: it may be queued behind payloads."""


def spread(plan: ServerPlan, placed: Placed) -> ServerPlan:
    """The plan for several hosts: addresses, keys of this run, and timeouts for slow links."""
    from offbeat.protocols.servers.messages import COORDINATOR
    from offbeat.runtime.messages import Keys

    replicas = homes_of(plan, placed)
    addresses = {COORDINATOR: f"tcp://{placed.address}:*"}
    for number, (replica, home) in enumerate(replicas.items()):
        addresses[server_name(*replica)] = f"tcp://{placed.hosts[home].address}:{_port(placed.hosts[home], number)}"
    for rank in range(plan.workers if not replicas else 0):  # Without servers, workers talk to each other.
        host = placed.seat(rank).host
        addresses[worker_name(rank)] = f"tcp://{host.address}:{_port(host, rank)}"
    rate = placed.wanted.slowest
    # A worker's link carries its part for every shard; a server's, all workers' parts and those for its copies.
    shared = plan.shards + plan.workers * (plan.replicas + 1)
    timing = msgspec.structs.replace(
        plan.timing, silence=SILENCE, per_byte=0.0 if rate is None else SLACK * shared / rate
    )
    keys = Keys.generate()
    return msgspec.structs.replace(plan, addresses=addresses, pair=(keys.public, keys.secret), timing=timing)


def _port(host: PlacedHost, number: int) -> int:
    """The port of this run's process of this number: of a machine, one that its agent found free."""
    return host.free_ports[number] if number < len(host.free_ports) else FIRST_PORT + number
