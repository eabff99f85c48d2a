"""The specification of hosts, from a file or from Python; checked before anything is created."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from offbeat import limits
from offbeat.errors import UsageError, did_you_mean
from offbeat.simulate.units import parse_rate

NAMESPACE, SSH, RAY, SLURM = "namespace", "ssh", "ray", "slurm"
KINDS = (NAMESPACE, SSH, RAY, SLURM)
"""Kinds of hosts; those of a file are the first two, the others come from what places processes on them."""
SUBNET = "10.77.0.0/24"  # The addresses of hosts: an isolated network, which cannot clash with this machine's.
MTU = 1500  # Bytes per packet on the links, as on most Ethernets.
SLOWEST = 1000.0  # Bytes per second below which a link could not even carry heartbeats.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_LARGEST = 2**20  # Largest file of hosts, in bytes.
_EXAMPLE = '[[host]]\nname = "a"\nworkers = 1\nrate = "100Mbit"'


@dataclass(frozen=True)
class Host:
    """One host of a run."""

    name: str
    """Lower-case letters, digits and hyphens."""
    workers: int = 1
    """Number of workers on it."""
    servers: int = 0
    """Its share of the server processes; if no host has any, all take turns."""
    rate: str | None = None
    """Rate of its link in each direction, such as `100Mbit`; None: unlimited."""
    kind: str = NAMESPACE
    """A network namespace of this machine, or a machine where an agent is started: by ssh, Ray or Slurm."""
    address: str | None = None
    """Of a machine: where ssh finds it, or the name by which Ray or Slurm know it."""
    user: str | None = None
    """User of ssh; None: as ssh is configured."""
    port: int | None = None
    """Port of ssh."""
    identity: str | None = None
    """Key file of ssh."""
    known_hosts: str | None = None
    """File of ssh with the keys of hosts; None: the user's own."""
    python: str | None = None
    """The command that starts Python there, with offbeat; None: `python3` by ssh, otherwise this program's own path."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(str(self.name)):
            raise UsageError(
                f"{self.name!r} cannot be the name of a host: use at most 32 lower-case letters, digits and "
                f"hyphens, such as a or node-1."
            )
        if self.kind not in KINDS:
            raise UsageError(f"host {self.name} has unknown kind {self.kind!r}.{did_you_mean(str(self.kind), KINDS)}")
        self._check_machine()
        for what in ("workers", "servers"):
            count = getattr(self, what)
            limits.whole(f"host {self.name}: {what} =", count, getattr(limits, what.upper()), least=0)
        if not self.workers and not self.servers:
            raise UsageError(
                f"host {self.name} has workers = 0 and no servers, so nothing would run there. Give it workers or "
                f"servers, or omit it."
            )
        if self.rate is not None:
            _check_rate(self.rate, f"host {self.name}")

    def _check_machine(self) -> None:
        if self.kind == NAMESPACE:
            for name in ("address", "user", "port", "identity", "known_hosts", "python"):
                if getattr(self, name) is not None:
                    raise UsageError(f'host {self.name} has {name}, which is for machines: say kind = "ssh", too.')
            return
        for name in ("address", "user", "identity", "known_hosts", "python"):
            text = getattr(self, name)
            # A leading dash would be an option of ssh.
            if text is not None and not (isinstance(text, str) and text.isprintable() and not text.startswith("-")):
                raise UsageError(f"host {self.name} has {name} = {text!r}: write text that does not begin with a dash.")
        if not self.address:
            raise UsageError(
                f'host {self.name} of kind {self.kind} has no address. Say where it is: address = "10.0.0.7"'
            )
        if self.port is not None:
            limits.port(f"host {self.name}: port =", self.port)

    @property
    def bytes_per_second(self) -> float | None:
        """The rate of its link in each direction; None if unlimited."""
        return None if self.rate is None else parse_rate(self.rate)


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, in order; the first has worker 0."""

    hosts: tuple[Host, ...]
    """All of one kind, with different names."""
    subnet: str = SUBNET
    """Network of their addresses."""
    mtu: int = MTU
    """Bytes per packet on their links."""
    address: str | None = None
    """Where machines reach this one; None: its address on the way to the first of them."""
    cluster: str = ""
    """What placed them, if that is not a file: `ray`, `ray://ADDRESS` or `slurm`."""

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"{', '.join(duplicates)} is the name of more than one host: each needs its own.")
        limits.whole("the number of workers on all hosts,", self.workers, limits.WORKERS, least=0)
        if not self.workers:
            raise UsageError(f"no host has a worker, so nothing would be trained. Say where they are:\n{_EXAMPLE}")
        if len({host.kind for host in self.hosts}) > 1:
            raise UsageError("hosts of several kinds cannot reach each other: give all the same kind.")
        if type(self.mtu) is not int or not 576 <= self.mtu <= 65535:
            raise UsageError(f"mtu = {self.mtu!r} makes no sense: packets have 576 to 65535 bytes, most often 1500.")
        if self.network.num_addresses < len(self.hosts) + 3:
            raise UsageError(
                f"subnet {self.subnet} has too few addresses for {len(self.hosts)} hosts: give a larger one."
            )

    @classmethod
    def alike(cls, count: int, rate: str | None = None, workers: int = 1) -> Hosts:
        """Identical hosts, named a, b, c ..."""
        limits.whole("the number of hosts,", count, limits.WORKERS)
        letters = "abcdefghijklmnopqrstuvwxyz"
        names = list(letters[:count]) if count <= len(letters) else [f"h{number}" for number in range(count)]
        return cls(tuple(Host(name, workers=workers, rate=rate) for name in names))

    @classmethod
    def read(cls, path: Path) -> Hosts:
        """From a TOML file with a `[[host]]` table each, and a `[network]` table for common settings."""
        try:
            with path.open("rb") as file:
                data = tomllib.loads(file.read(_LARGEST).decode())
        except OSError as error:
            raise UsageError(
                f"the hosts cannot be read from {path}: {error.strerror}. Such a file has:\n{_EXAMPLE}"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path} is not TOML: {error}. A file of hosts has:\n{_EXAMPLE}") from error
        try:
            return cls.from_plain(data)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Hosts:
        """From the data of a file, or of `plain`."""
        _only(data, ("host", "network"), "the file")
        network, entries = data.get("network", {}), data.get("host", [])
        if not isinstance(network, dict) or not isinstance(entries, list):
            raise UsageError(f"[network] is one table, and hosts are a list of [[host]] tables, such as:\n{_EXAMPLE}")
        _only(cast("dict[str, Any]", network), ("rate", "subnet", "mtu", "address", "cluster"), "[network]")
        common: dict[str, Any] = dict(cast("dict[str, Any]", network))
        rate = common.pop("rate", None)
        if rate is not None:
            _check_rate(rate, "[network]")
        return cls(tuple(_host(entry, rate) for entry in cast("list[Any]", entries)), **common)

    def plain(self) -> dict[str, Any]:
        """As JSON data, in the form of a file."""
        hosts = [{k: v for k, v in dataclasses.asdict(host).items() if v is not None} for host in self.hosts]
        network: dict[str, Any] = {"subnet": self.subnet, "mtu": self.mtu}
        network |= {"address": self.address} if self.address else {}
        network |= {"cluster": self.cluster} if self.cluster else {}
        return {"network": network, "host": hosts}

    def text(self) -> str:
        """As the text of a file."""
        tables = [("[network]", self.plain()["network"]), *(("[[host]]", host) for host in self.plain()["host"])]
        lines: list[str] = []
        for head, entries in tables:
            lines += [head, *(f"{name} = {json.dumps(value)}" for name, value in entries.items()), ""]
        return "\n".join(lines)

    @property
    def kind(self) -> str:
        """The kind of all of them."""
        return self.hosts[0].kind

    @property
    def are_machines(self) -> bool:
        """Whether they are machines with an agent each, and not namespaces of this one."""
        return self.kind != NAMESPACE

    @property
    def workers(self) -> int:
        """Number of workers on all of them."""
        return sum(host.workers for host in self.hosts)

    @property
    def network(self) -> ipaddress.IPv4Network:
        """The subnet, parsed."""
        try:
            network = ipaddress.IPv4Network(str(self.subnet))
        except ValueError as error:
            raise UsageError(f"{self.subnet!r} is not a subnet: {error}. Write it like {SUBNET}.") from error
        if not network.is_private:
            raise UsageError(f"subnet {self.subnet} is a public network: use a private one, such as {SUBNET}.")
        return network

    @property
    def slowest(self) -> float | None:
        """Rate of the slowest link in bytes per second; None if none is limited."""
        return min((host.bytes_per_second for host in self.hosts if host.bytes_per_second is not None), default=None)

    def of_workers(self) -> tuple[int, ...]:
        """The host number of each worker, host by host."""
        return tuple(number for number, host in enumerate(self.hosts) for _ in range(host.workers))

    def of_servers(self, count: int) -> tuple[int, ...]:
        """The host number of each server process."""
        # Hosts take turns, each as often as its share of servers, so that the copies of a shard, which follow each
        # other, are on different hosts wherever there are enough.
        shares = [host.servers for host in self.hosts]
        if not any(shares):
            shares = [1] * len(self.hosts)
        columns = zip_longest(*([number] * share for number, share in enumerate(shares)))
        turns = [number for column in columns for number in column if number is not None]
        return tuple(turns[index % len(turns)] for index in range(count))


def _host(entry: Any, rate: str | None) -> Host:
    if not isinstance(entry, dict):
        raise UsageError(f"a host is a table, such as:\n{_EXAMPLE}")
    settings: dict[str, Any] = {"rate": rate} | cast("dict[str, Any]", entry)
    _only(settings, [field.name for field in dataclasses.fields(Host)], f"host {settings.get('name', '')}".rstrip())
    if "name" not in settings:
        raise UsageError(f"a host has no name. Each needs one:\n{_EXAMPLE}")
    return Host(**settings)


def _check_rate(rate: Any, where: str) -> None:
    if not isinstance(rate, str):
        raise UsageError(f'{where} has rate = {rate!r}: write it with its unit and in quotes, such as "100Mbit".')
    try:
        slow = parse_rate(rate) < SLOWEST
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    if slow:
        raise UsageError(f"{where} has rate {rate}, too slow even for heartbeats: give 8kbit or more.")


def _only(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in table:
        if name not in known:
            raise UsageError(f"{where} has an unknown entry {name!r}.{did_you_mean(name, known)}")
