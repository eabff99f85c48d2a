"""What a run on other machines needs beside their agents: its files there, its code, and what it cannot do there."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offbeat.errors import UsageError
from offbeat.protocols.data_servers.messages import data_server_name
from offbeat.protocols.servers.messages import server_name
from offbeat.run.data_supervisor import DataServing
from offbeat.run.job import Job, Script
from offbeat.run.server_supervisor import Serving, first_homes, servers_of
from offbeat.runtime.agents.code import packed
from offbeat.runtime.agents.fleet import AgentLink, Fleet
from offbeat.runtime.run.folder import RunFolder
from offbeat.strategies import combined, parse
from offbeat.strategies.splitting.layouts import place_in_words


def check_for_machines(job: Job) -> None:
    """Refuse what needs memory or files that machines do not share."""
    goal = job.goal
    if goal.watch and goal.delivery == "time":
        raise UsageError(
            "--delivery time compares times of events, and machines have clocks of their own, which can be seconds "
            "apart. Use --delivery vector, the default."
        )
    if goal.tensorboard:
        raise UsageError("--tensorboard writes on the machine of worker 0, where nobody would look. Omit it.")
    consistency = getattr(combined(parse(goal.strategy or "single")).exchange, "consistency", None)
    if goal.checkpoint_every and consistency is not None and str(consistency) != "bsp":
        raise UsageError(
            f"--checkpoint-every {goal.checkpoint_every} under {goal.strategy} takes snapshots, whose parts are "
            f"written to one folder, which machines do not share. Omit it: checkpoints at evaluations work."
        )
    needs, hosts = servers_of(job), job.hosts
    if needs is not None and hosts is not None and needs[1] >= (most := len(set(hosts.of_servers(10_000)))):
        raise UsageError(
            f"{goal.strategy} keeps {needs[1] + 1} copies of each shard, which must be on different machines, or one "
            f"that is lost takes all of them; there are {most} for servers. Add machines, or ask for fewer replicas."
        )
    if job.ship is not None and not job.ship.is_dir():
        raise UsageError(f"--ship {job.ship} is not a folder. Give the folder of your code, such as `.`.")


def placement(job: Job) -> list[str]:
    """Where every process of a run is, a line for each host; the copies of a shard are on different machines."""
    if job.hosts is None:
        return [f"this machine: {job.workers} workers"]
    needs, hosts = servers_of(job), job.hosts
    strategy, running = job.goal.strategy or "single", [list[str]() for _ in hosts.hosts]
    for rank, number in enumerate(hosts.of_workers()):
        part = place_in_words(strategy, rank, job.goal.placement, job.host_of_workers)
        running[number].append(f"worker {rank}" + (f" ({part})" if part else ""))
    if needs is not None and needs[0]:
        for (shard, replica), number in first_homes(hosts, needs[0], needs[1]).items():
            running[number].append(server_name(shard, replica))
    for number, home in enumerate(hosts.of_servers(job.goal.data_servers)):
        running[home].append(data_server_name(number))
    addresses = [f" ({host.address})" if host.kind == "ssh" else "" for host in hosts.hosts]
    return [
        f"{host.name}{address}: {', '.join(processes) or 'nothing'}"
        for host, address, processes in zip(hosts.hosts, addresses, running, strict=True)
    ]


@contextmanager
def settled(
    fleet: Fleet | None, job: Job, folder: RunFolder, servers: Serving, data: DataServing, events: Path | None = None
) -> Generator[Sequence[AgentLink]]:
    """The links to the agents, with everything there that the run needs; in the end all of its files are here.

    `events` is the folder that events are recorded in: forwarders send them, so that agents do not.
    """
    if fleet is None:
        yield ()
        return
    home = str(folder.path.resolve())
    moved = {home: "folder"}
    for plan in (servers.plan, data.plan):
        if plan is not None:
            moved[plan.folder] = "sockets"
    if events is not None:
        moved[str(events)] = "sockets"
    code = None
    if job.ship is not None:
        code = packed(job.ship)
        moved[str(job.ship.resolve())] = "code"
    paths = [] if (own := _own_file(job)) is None else [own]
    # Roles get the launcher's paths, which each link turns into its machine's.
    fleet.prepare(folder.path, moved, paths, code)
    hosts = job.hosts
    if hosts is not None:
        elastic = combined(parse(job.goal.strategy or "single")).traits.elastic
        fleet.expect_checkpoints((hosts.hosts[number].name for number in set(hosts.of_workers())), elastic)
    servers.lost_machines = fleet.lost
    try:
        yield list(fleet.links.values())
    finally:
        fleet.finish()


def _own_file(job: Job) -> str | None:
    """The file of the user's script or task, which every machine must have."""
    source = job.what.path if isinstance(job.what, Script) else job.what.source
    return str(Path(source).resolve()) if source.endswith(".py") else None
