"""Existing hosts: their addresses, and how a process gets onto one."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import RunError
from offbeat.runtime.hosts._specification import Host, Hosts
from offbeat.runtime.hosts.network_namespace import inside


@dataclass(frozen=True)
class PlacedHost:
    """An existing host."""

    host: Host
    address: str  # The address of its processes.
    interface: str  # The network interface with this address.
    network: Path  # The namespace that a process enters to be on it (`network` of a role).
    port: str | None = None
    """The other end of its link, in the network of `Placed.inside`, where the kernel counts its bytes."""


@dataclass(frozen=True)
class Seat:
    """A worker's place on its host, numbered as by torchrun."""

    host: PlacedHost
    number: int  # The host's number.
    hosts: int  # Number of hosts.
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Placed:
    """The hosts of a run, while they exist."""

    wanted: Hosts  # Their specification.
    hosts: tuple[PlacedHost, ...]  # In the same order.
    address: str  # Where they reach sockets that the launching process opened `inside`.
    network: Path  # The namespace that `inside` enters.

    @contextmanager
    def inside(self) -> Generator[None]:
        """Sockets opened by this thread in the body are reachable from the hosts, at `address`, and nowhere else."""
        with inside(self.network):
            yield

    def seat(self, worker: int) -> Seat:
        """The place of a worker."""
        homes = self.wanted.of_workers()
        number = homes[worker]
        first = homes.index(number)
        return Seat(self.hosts[number], number, len(self.hosts), worker - first, homes.count(number))

    def plain(self, servers: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
        """The hosts with their addresses, workers and servers, as JSON data.

        `servers` maps server processes to hosts: `0.1` is copy 1 of shard 0.
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
        """Bytes, including headers, and packets counted by the kernel at the other end of each link."""
        try:
            with self.inside():
                lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        except (OSError, RunError):
            return {}
        named = (line.partition(":") for line in lines if ":" in line)
        counted = {name.strip(): counts.split() for name, _, counts in named}
        return {name: (int(columns[0]), int(columns[1])) for name, columns in counted.items()}
