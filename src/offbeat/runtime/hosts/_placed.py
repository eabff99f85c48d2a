"""Hosts that are there: where each is found, and how a process comes to be on it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import RunError
from offbeat.runtime.hosts._wanted import Host, Hosts
from offbeat.runtime.hosts.network_namespace import inside


@dataclass(frozen=True)
class PlacedHost:
    """A host that is there."""

    host: Host
    """What was wanted."""
    address: str
    """Where its processes are reached by the others."""
    interface: str
    """The network interface that has this address there."""
    network: Path
    """What a process enters to be on it: the `network` of a role, or `runtime.hosts.network_namespace.enter`."""
    port: str | None = None
    """The other end of its link, in the network that `Placed.inside` enters, where the kernel counts its bytes."""


@dataclass(frozen=True)
class Seat:
    """A process's place on its host, as torchrun would count it."""

    host: PlacedHost
    """The host."""
    number: int
    """The host's number."""
    hosts: int
    """How many hosts there are."""
    local_rank: int
    """This worker's number on its host."""
    local_size: int
    """Workers on its host."""


@dataclass(frozen=True)
class Placed:
    """The hosts of a run, while they are there."""

    wanted: Hosts
    """What was asked for."""
    hosts: tuple[PlacedHost, ...]
    """The hosts, in the same order."""
    address: str
    """Where the process that made them is reached from them, by what it has opened `inside`."""
    network: Path
    """What `inside` enters."""

    @contextmanager
    def inside(self) -> Generator[None]:
        """What this thread opens in the body is reachable from the hosts, at `address`, and from nowhere else."""
        with inside(self.network):
            yield

    def seat(self, worker: int) -> Seat:
        """Where a worker sits."""
        homes = self.wanted.of_workers()
        number = homes[worker]
        first = homes.index(number)
        return Seat(self.hosts[number], number, len(self.hosts), worker - first, homes.count(number))

    def plain(self, servers: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
        """The hosts with their addresses, and the workers and servers on each, as JSON data.

        `servers` says which host each server process was on: `0.1` is copy 1 of shard 0.
        """
        workers = self.wanted.of_workers()
        sent = self._sent()
        return [
            {
                "name": there.host.name,
                "kind": there.host.kind,
                "address": there.address,
                "rate": there.host.rate,
                "workers": [rank for rank, home in enumerate(workers) if home == number],
                "servers": [server for server, home in (servers or {}).items() if home == number],
                "sent_bytes": None if there.port is None else sent.get(there.port, (None, None))[0],
                "sent_packets": None if there.port is None else sent.get(there.port, (None, None))[1],
            }
            for number, there in enumerate(self.hosts)
        ]

    def _sent(self) -> dict[str, tuple[int, int]]:
        """Bytes, headers and all, and packets that the kernel has counted at the other end of each link."""
        try:
            with self.inside():
                lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        except (OSError, RunError):
            return {}
        named = (line.partition(":") for line in lines if ":" in line)
        counted = {name.strip(): counts.split() for name, _, counts in named}
        return {name: (int(columns[0]), int(columns[1])) for name, columns in counted.items()}
