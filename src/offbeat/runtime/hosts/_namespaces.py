"""Hosts as network namespaces of this machine: real addresses, real links, and rates enforced by the kernel.

Each host is a namespace with one link, to a bridge in a namespace of its own; the machine's own network is not touched.
A namespace outlives the process that made it. So its name identifies that process, and the next run first removes
namespaces whose makers are dead.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import RunError, UsageError
from offbeat.runtime.hosts._specification import Host, Hosts
from offbeat.runtime.launch import EVERYWHERE
from offbeat.runtime.run.procfs import seen

NAMED = Path("/run/netns")  # Where `ip netns` keeps namespaces by name.
INTERFACE = "eth0"  # The name of a host's link.
BURST = 0.001
"""Seconds for which an idle link may exceed its rate: short, so that small messages cost what they should."""
QUEUE = 0.05  # Seconds that a packet may wait in a link's queue before it is dropped.
_BURST_PACKETS, _QUEUE_PACKETS = 10, 50  # The minimum of each in packets, or slow links would lose most of them.
_FRAME = 14  # Bytes that Ethernet adds to a packet.
_DEADLINE = 30.0
_MINE = re.compile(r"offbeat-(?P<process>\d+)-(?P<began>\d+)-[0-9a-f]{8}[.-].+")
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter(network: Path) -> None:
    """Move this thread, and what it starts, into the network namespace of this file: its new sockets are in there."""
    with network.open("rb") as opened:
        _set_namespace(opened.fileno(), str(network))


def _set_namespace(descriptor: int, name: str) -> None:
    # os.setns exists only from Python 3.12 on.
    if _LIBC.setns(descriptor, _CLONE_NEWNET):
        problem = os.strerror(ctypes.get_errno())
        raise RunError(f"the network {name} could not be entered: {problem}. That needs root.")


@dataclass(frozen=True)
class PlacedHost:
    """An existing host."""

    host: Host
    address: str  # The address of its processes.
    interface: str  # The network interface with this address.
    network: Path | None  # The namespace that a process enters to be on it (`network` of a role); None: of a machine.
    port: str = ""  # The other end of its link, in the network of `Placed.inside`, where the kernel counts its bytes.
    machine: str = ""  # The machine whose agent starts its processes (`machine` of a role).
    free_ports: tuple[int, ...] = ()  # Ports of a machine that nobody uses.
    cores: int = 0  # Cores of a machine; 0: those of this one.


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
    network: Path | None  # The namespace that `inside` enters; None: machines reach this one's own network.

    @contextmanager
    def inside(self) -> Generator[None]:
        """Sockets opened by this thread in the body are reachable from the hosts, at `address`, and nowhere else."""
        if self.network is None:
            yield
            return
        with Path("/proc/thread-self/ns/net").open("rb") as before:
            enter(self.network)
            try:
                yield
            finally:
                _set_namespace(before.fileno(), "of this thread before")

    def seat(self, worker: int) -> Seat:
        """The place of a worker."""
        homes = self.wanted.of_workers()
        number = homes[worker]
        first = homes.index(number)
        return Seat(self.hosts[number], number, len(self.hosts), worker - first, homes.count(number))

    @property
    def listening(self) -> str:
        """Where the launching process listens for them: in a network of their own, everywhere."""
        return self.address if self.network is None else EVERYWHERE

    def plain(self, servers: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
        """The hosts as JSON data; `servers` maps server processes to hosts: `0.1` is copy 1 of shard 0."""
        workers, sent = self.wanted.of_workers(), self._sent()
        return [
            {
                "name": there.host.name,
                "kind": there.host.kind,
                "address": there.address,
                "rate": there.host.rate,
                "workers": [rank for rank, home in enumerate(workers) if home == number],
                "servers": [server for server, home in (servers or {}).items() if home == number],
                "sent_bytes": sent.get(there.port, (None, None))[0],
                "sent_packets": sent.get(there.port, (None, None))[1],
            }
            for number, there in enumerate(self.hosts)
        ]

    def _sent(self) -> dict[str, tuple[int, int]]:
        """Bytes, including headers, and packets counted by the kernel at the other end of each link."""
        if self.network is None:
            return {}
        try:
            with self.inside():
                lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        except (OSError, RunError):
            return {}
        named = (line.partition(":") for line in lines if ":" in line)
        counted = {name.strip(): counts.split() for name, _, counts in named}
        return {name: (int(columns[0]), int(columns[1])) for name, columns in counted.items()}


@contextmanager
def placed(hosts: Hosts) -> Generator[Placed]:
    """The hosts, ready for processes, during the context; afterwards they are removed, whatever happens."""
    if (reason := _lacking()) is not None:
        raise UsageError(f"network namespaces cannot be made here: {reason}")
    _sweep()
    prefix = f"{_owner()}-{secrets.token_hex(4)}"
    try:
        yield _create(hosts, prefix)
    finally:
        for name in existing():
            if name.startswith(prefix):
                _remove(name)


def why_not() -> str | None:
    """Why this process cannot make namespaces; None if a trial succeeds."""
    if (reason := _lacking()) is not None:
        return reason
    trial = f"{_owner()}-{secrets.token_hex(4)}.trial"
    try:
        _run("ip", "netns", "add", trial)
        _run("ip", "-n", trial, "link", "add", "name", "h0", "type", "veth", "peer", "name", "h1")
        _run("tc", "-n", trial, "qdisc", "add", "dev", "h0", "root", *_shaping(1e6, 1500))
    except RunError as error:
        return f"{error} The kernel or the container that this runs in does not allow it."
    finally:
        if trial in existing():
            _remove(trial)
    return None


def _lacking() -> str | None:
    if os.geteuid() != 0:
        return f"that needs root, and this is user {os.geteuid()}. Run as root, or without --hosts."
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"there is no command {' or '.join(missing)}. Install iproute2."
    return None


def existing() -> list[str]:
    """The names of all namespaces on this machine made by runs."""
    return sorted(entry.name for entry in NAMED.iterdir() if _MINE.fullmatch(entry.name)) if NAMED.is_dir() else []


def made_here(name: str) -> bool:
    """Whether this process made the namespace."""
    return name.startswith(f"{_owner()}-")


def abandoned(name: str) -> bool:
    """Whether the process that made this namespace is gone."""
    match = _MINE.fullmatch(name)
    return match is not None and _began(int(match["process"])) != int(match["began"])


def _sweep() -> None:
    """Remove namespaces left by killed processes."""
    for name in existing():
        if abandoned(name):
            with suppress(RunError):  # Another run may be sweeping, too.
                _remove(name)


def _create(hosts: Hosts, prefix: str) -> Placed:
    free = hosts.network.hosts()
    length = hosts.network.prefixlen
    switch, own = f"{prefix}.switch", str(next(free))
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "name", "bridge", "type", "bridge", "mcast_snooping", "0")
    _run("ip", "-n", switch, "link", "set", "bridge", "addrgenmode", "none")
    _run("ip", "-n", switch, "link", "set", "bridge", "mtu", str(hosts.mtu), "up")
    _run("ip", "-n", switch, "link", "set", "lo", "up")
    _run("ip", "-n", switch, "address", "add", f"{own}/{length}", "dev", "bridge")
    placed_hosts = tuple(
        _connect(host, f"{prefix}-{host.name}", switch, f"h{number}", f"{next(free)}/{length}", hosts.mtu)
        for number, host in enumerate(hosts.hosts)
    )
    return Placed(hosts, placed_hosts, own, NAMED / switch)


def _connect(host: Host, name: str, switch: str, port: str, address: str, mtu: int) -> PlacedHost:
    """Make a namespace, its link to the switch, and the rate in both directions."""
    peer = ("peer", "name", INTERFACE, "mtu", str(mtu), "netns", name)
    _run("ip", "netns", "add", name)
    _run("ip", "-n", switch, "link", "add", "name", port, "mtu", str(mtu), "type", "veth", *peer)
    for space, device in ((switch, port), (name, INTERFACE)):
        _run("ip", "-n", space, "link", "set", device, "addrgenmode", "none")
        if host.bytes_per_second is not None:
            _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *_shaping(host.bytes_per_second, mtu))
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", name, "address", "add", address, "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", INTERFACE, "up")
    return PlacedHost(host, address.partition("/")[0], INTERFACE, NAMED / name, port)


def _shaping(rate: float, mtu: int) -> tuple[str, ...]:
    """The `tc` arguments for a token bucket of this many bytes per second."""
    packet = mtu + _FRAME
    burst = max(round(rate * BURST), _BURST_PACKETS * packet)
    limit = burst + max(round(rate * QUEUE), _QUEUE_PACKETS * packet)
    return ("tbf", "rate", f"{round(rate * 8)}bit", "burst", f"{burst}b", "limit", f"{limit}b")


def _remove(name: str) -> None:
    _run("ip", "netns", "delete", name)


def _run(*words: str) -> None:
    """Run a command that changes the network; raises its output if it fails."""
    try:
        # Its own process group: Ctrl-C is for the run, which then cleans up.
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(words, **options, timeout=_DEADLINE, process_group=0, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"`{' '.join(words)}` did not end within {_DEADLINE:g} s.") from error
    if done.returncode:
        reason = (done.stderr or done.stdout).strip() or f"code {done.returncode}"
        raise RunError(f"`{' '.join(words)}` failed: {reason}.")


def _owner() -> str:
    """The prefix of all namespaces made by this process."""
    return f"offbeat-{os.getpid()}-{_began(os.getpid())}"


def _began(process: int) -> int | None:
    """The start time of a process, in ticks since boot; None if there is none. PIDs are reused."""
    state = seen(process)
    return None if state is None else state.began
