"""The interface of engines, and the run's machines: started, asked what they are, and ended with the run."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from offbeat.errors import UsageError
from offbeat.runtime.agents.facts import own_address
from offbeat.runtime.agents.fleet import Fleet, StartedAgent
from offbeat.runtime.hosts import Hosts, Placed, PlacedHost


class MachineEngine(Protocol):
    """Starts agents on machines."""

    def reach(self) -> str:
        """An address of one of the machines, to find this machine's own on the way to it."""
        ...

    def start(self, machine: str, settings: bytes) -> StartedAgent:
        """Start the agent of a machine; its settings reach its standard input by the engine's own channel."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...


@dataclass(frozen=True)
class Machines:
    """The machines of a run while it lasts: places as of any hosts, and the agents there."""

    placed: Placed
    fleet: Fleet


def engine_for(hosts: Hosts) -> MachineEngine:
    """The engine that starts agents on hosts of this kind."""
    if hosts.kind == "ssh":
        from offbeat.runtime.engines.ssh import SshEngine

        return SshEngine(hosts)
    if hosts.kind == "ray":
        from offbeat.runtime.engines.ray import RayEngine

        return RayEngine(hosts)
    if hosts.kind == "slurm":
        from offbeat.runtime.engines.slurm import SlurmEngine

        return SlurmEngine(hosts)
    raise UsageError(f"there is no engine for hosts of kind {hosts.kind!r}.")


@contextmanager
def machines_of(hosts: Hosts, preload: Sequence[str]) -> Generator[Machines]:
    """The machines of a run, each with an agent that has said hello; all of them end with the context."""
    engine = engine_for(hosts)
    try:
        address = hosts.address or own_address(engine.reach())
        fleet = Fleet(address, [host.name for host in hosts.hosts], engine.start, preload)
        try:
            facts = fleet.await_hellos()
            places = tuple(
                PlacedHost(
                    host, facts[host.name].address, facts[host.name].interface, None,
                    machine=host.name, free_ports=facts[host.name].ports, cores=facts[host.name].cores,
                )
                for host in hosts.hosts
            )  # fmt: skip
            yield Machines(Placed(hosts, places, address, None), fleet)
        finally:
            fleet.close()
    finally:
        engine.close()
