"""Which hosts a run wants, as a file says it or as Python does; checked here, before anything is made."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, cast

from offbeat import limits
from offbeat.errors import UsageError, did_you_mean
from offbeat.simulate.units import parse_rate

KINDS = ("namespace",)
"""What a host can be."""
SUBNET = "10.77.0.0/24"
"""Where hosts get their addresses from: a network of their own, so that it cannot clash with this machine's."""
MTU = 1500
"""Bytes of a packet on the links, as on most Ethernets."""
SLOWEST = 1000.0
"""Bytes per second below which a link would not even carry the signs of life."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_LARGEST = 2**20
"""Bytes of a file of hosts."""
_EXAMPLE = '[[host]]\nname = "a"\nworkers = 1\nrate = "100Mbit"'


@dataclass(frozen=True)
class Host:
    """One host of a run."""

    name: str
    """Its name: small letters, digits and hyphens."""
    workers: int = 1
    """Workers on it."""
    servers: int = 0
    """Its share of the server processes; if no host says any, all take turns."""
    rate: str | None = None
    """What its link carries each way, such as `100Mbit`; None: as much as the machine can."""
    kind: str = "namespace"
    """What it is: a network namespace of this machine."""

    def __post_init__(self) -> None:
        """Refuse what no host can be."""
        if not _NAME.fullmatch(str(self.name)):
            raise UsageError(
                f"{self.name!r} cannot be the name of a host: use small letters, digits and hyphens, at most 32, such "
                f"as a or node-1."
            )
        if self.kind not in KINDS:
            raise UsageError(
                f"host {self.name} has kind {self.kind!r}, which there is not.{_nearest(self.kind, KINDS)}"
            )
        for what in ("workers", "servers"):
            count = getattr(self, what)
            limits.whole(f"host {self.name}: {what} =", count, getattr(limits, what.upper()), least=0)
        if not self.workers and not self.servers:
            raise UsageError(
                f"host {self.name} has workers = 0 and no servers, so nothing would run there. Give it workers or "
                f"servers, or leave it out."
            )
        if self.rate is not None:
            _checked_rate(self.rate, f"host {self.name}")

    @property
    def bytes_per_second(self) -> float | None:
        """What its link carries each way; None if that is not limited."""
        return None if self.rate is None else parse_rate(self.rate)


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, in order: the first has worker 0."""

    hosts: tuple[Host, ...]
    """All of one kind, with different names."""
    subnet: str = SUBNET
    """Where their addresses are from."""
    mtu: int = MTU
    """Bytes of a packet on their links."""

    def __post_init__(self) -> None:
        """Refuse what cannot be a set of hosts."""
        names = [host.name for host in self.hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"{', '.join(twice)} is the name of more than one host: each needs one of its own.")
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
        """So many hosts that are all the same, named a, b, c ..."""
        limits.whole("the number of hosts,", count, limits.WORKERS)
        letters = "abcdefghijklmnopqrstuvwxyz"
        names = list(letters[:count]) if count <= len(letters) else [f"h{number}" for number in range(count)]
        return cls(tuple(Host(name, workers=workers, rate=rate) for name in names))

    @classmethod
    def read(cls, path: Path) -> Hosts:
        """From a file: TOML, with a `[[host]]` for each, and a `[network]` for what they have in common."""
        try:
            with path.open("rb") as file:
                found = tomllib.loads(file.read(_LARGEST).decode())
        except OSError as error:
            raise UsageError(
                f"the hosts cannot be read from {path}: {error.strerror}. Such a file has:\n{_EXAMPLE}"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path} is not TOML: {error}. A file of hosts has:\n{_EXAMPLE}") from error
        try:
            return cls.from_plain(found)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Hosts:
        """From what a file says, or `plain` gave."""
        _only(data, ("host", "network"), "the file")
        network, entries = data.get("network", {}), data.get("host", [])
        if not isinstance(network, dict) or not isinstance(entries, list):
            raise UsageError(f"[network] is one table, and hosts are a list of [[host]] tables, such as:\n{_EXAMPLE}")
        _only(cast("dict[str, Any]", network), ("rate", "subnet", "mtu"), "[network]")
        common: dict[str, Any] = dict(cast("dict[str, Any]", network))
        rate = common.pop("rate", None)
        if rate is not None:
            _checked_rate(rate, "[network]")
        return cls(tuple(_host(entry, rate) for entry in cast("list[Any]", entries)), **common)

    def plain(self) -> dict[str, Any]:
        """As JSON data, of the same form as a file."""
        hosts = [{k: v for k, v in dataclasses.asdict(host).items() if v is not None} for host in self.hosts]
        return {"network": {"subnet": self.subnet, "mtu": self.mtu}, "host": hosts}

    def text(self) -> str:
        """As a file."""
        tables = [("[network]", self.plain()["network"]), *(("[[host]]", host) for host in self.plain()["host"])]
        lines = (
            [head, *(f"{name} = {_literal(value)}" for name, value in entries.items()), ""] for head, entries in tables
        )
        return "\n".join(chain.from_iterable(lines))

    @property
    def kind(self) -> str:
        """What all of them are."""
        return self.hosts[0].kind

    @property
    def workers(self) -> int:
        """Workers on all of them."""
        return sum(host.workers for host in self.hosts)

    @property
    def network(self) -> ipaddress.IPv4Network:
        """The subnet, to count addresses in."""
        try:
            found = ipaddress.IPv4Network(str(self.subnet))
        except ValueError as error:
            raise UsageError(f"subnet {self.subnet!r} is none: {error}. Write it like {SUBNET}.") from error
        if not found.is_private:
            raise UsageError(f"subnet {self.subnet} belongs to somebody: take a private one, such as {SUBNET}.")
        return found

    @property
    def slowest(self) -> float | None:
        """Bytes per second of the slowest link; None if none is limited."""
        return min((host.bytes_per_second for host in self.hosts if host.bytes_per_second is not None), default=None)

    def of_workers(self) -> tuple[int, ...]:
        """Which host each worker lives on: host by host."""
        return tuple(number for number, host in enumerate(self.hosts) for _ in range(host.workers))

    def of_servers(self, count: int) -> tuple[int, ...]:
        """Which host each of so many server processes lives on.

        Hosts take turns, each as often as it has shares of servers, so that the copies of a shard, which follow each
        other, are on different hosts wherever there are enough.
        """
        shares = [host.servers for host in self.hosts]
        if not any(shares):
            shares = [1] * len(self.hosts)
        columns = zip_longest(*([number] * share for number, share in enumerate(shares)))
        turns = [number for column in columns for number in column if number is not None]
        return tuple(turns[index % len(turns)] for index in range(count))


def _host(entry: Any, rate: str | None) -> Host:
    if not isinstance(entry, dict):
        raise UsageError(f"a host is a table, such as:\n{_EXAMPLE}")
    told = cast("dict[str, Any]", entry)
    known = [field.name for field in dataclasses.fields(Host)]
    _only(told, known, f"host {told.get('name', '')}".rstrip())
    if "name" not in told:
        raise UsageError(f"a host has no name. Each needs one:\n{_EXAMPLE}")
    entries: dict[str, Any] = {"rate": rate} | told
    return Host(**entries)


def _checked_rate(rate: Any, where: str) -> None:
    if not isinstance(rate, str):
        raise UsageError(f'{where} has rate = {rate!r}: write it with its unit and in quotes, such as "100Mbit".')
    try:
        found = parse_rate(rate)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    if found < SLOWEST:
        raise UsageError(f"{where} has rate {rate}, on which not even signs of life get through: give 8kbit or more.")


def _only(told: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    names = list(known)
    for name in told:
        if name not in names:
            raise UsageError(f"{where} says {name!r}, which means nothing here.{_nearest(name, names)}")


def _nearest(name: str, valid: Iterable[str]) -> str:
    return did_you_mean(str(name), valid)


def _literal(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
