"""Hosts as network namespaces of this machine: real addresses, real links, and rates that the kernel keeps.

Each host is a namespace with one link, to a bridge that lies in a namespace of its own. Nothing is added to the
machine's own network, so nothing can clash with it, nor be reached from it. All that is made hangs on the namespaces:
when those are gone, so are links, addresses and rates.

A namespace outlives the process that made it. So its name says whose it is, and the next who makes some first removes
those whose makers are dead.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.errors import RunError, UsageError
from offbeat.runtime.hosts._placed import Placed, PlacedHost
from offbeat.runtime.hosts._wanted import Host, Hosts
from offbeat.runtime.run.procfs import seen

NAMED = Path("/run/netns")
"""Where Linux's `ip netns` keeps namespaces by name."""
INTERFACE = "eth0"
"""What a host's link is called there."""
BURST = 0.001
"""Seconds for which a link that was idle may go at full speed: little, so that small messages cost what they weigh."""
QUEUE = 0.05
"""Seconds that a packet may wait in a link's queue before it is dropped."""
_BURST_PACKETS, _QUEUE_PACKETS = 10, 50
"""And at least so many packets, or slow links would lose most of them."""
_FRAME = 14
"""Bytes that Ethernet adds to a packet."""
_DEADLINE = 30.0
_MINE = re.compile(r"offbeat-(?P<process>\d+)-(?P<began>\d+)-[0-9a-f]{8}[.-].+")


@contextmanager
def namespaces(hosts: Hosts) -> Generator[Placed]:
    """The hosts as namespaces, while it lasts; whatever happens, they are removed."""
    if (reason := _lacking()) is not None:
        raise UsageError(f"network namespaces cannot be made here: {reason}")
    sweep()
    prefix = f"{_owner()}-{secrets.token_hex(4)}"
    try:
        yield _made(hosts, prefix)
    finally:
        for name in existing():
            if name.startswith(prefix):
                _remove(name)


def why_not() -> str | None:
    """What hinders this process from making namespaces, in words; None if nothing does, which is tried."""
    return _lacking() or _failing()


def _lacking() -> str | None:
    if os.geteuid() != 0:
        return f"that needs root, and this is user {os.geteuid()}. Run as root, or without --hosts."
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"there is no command {' or '.join(missing)}. Install iproute2."
    return None


def _failing() -> str | None:
    trial = f"{_owner()}-{secrets.token_hex(4)}.trial"
    try:
        _run("ip", "netns", "add", trial)
        _run("ip", "-n", trial, "link", "add", "name", "h0", "type", "veth", "peer", "name", "h1")
        _run("tc", "-n", trial, "qdisc", "add", "dev", "h0", "root", *_shaped(1e6, 1500))
    except RunError as error:
        return f"{error} The kernel or the container that this runs in does not allow it."
    finally:
        if trial in existing():
            _remove(trial)
    return None


def existing() -> list[str]:
    """The names of all namespaces on this machine that runs have made."""
    return sorted(entry.name for entry in NAMED.iterdir() if _MINE.fullmatch(entry.name)) if NAMED.is_dir() else []


def made_here(name: str) -> bool:
    """Whether this process made the namespace."""
    return name.startswith(f"{_owner()}-")


def abandoned(name: str) -> bool:
    """Whether the process that made this namespace is gone."""
    found = _MINE.fullmatch(name)
    return found is not None and _began(int(found["process"])) != int(found["began"])


def sweep() -> None:
    """Remove what killed processes have left."""
    for name in existing():
        if abandoned(name):
            with suppress(RunError):  # Another run may be sweeping, too.
                _remove(name)


def _made(hosts: Hosts, prefix: str) -> Placed:
    free = hosts.network.hosts()
    length = hosts.network.prefixlen
    switch, own = f"{prefix}.switch", str(next(free))
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "name", "bridge", "type", "bridge", "mcast_snooping", "0")
    _run("ip", "-n", switch, "link", "set", "bridge", "addrgenmode", "none")
    _run("ip", "-n", switch, "link", "set", "bridge", "mtu", str(hosts.mtu), "up")
    _run("ip", "-n", switch, "link", "set", "lo", "up")
    _run("ip", "-n", switch, "address", "add", f"{own}/{length}", "dev", "bridge")
    made = tuple(
        _join(host, f"{prefix}-{host.name}", switch, f"h{number}", f"{next(free)}/{length}", hosts.mtu)
        for number, host in enumerate(hosts.hosts)
    )
    return Placed(hosts, made, own, NAMED / switch)


def _join(host: Host, name: str, switch: str, port: str, address: str, mtu: int) -> PlacedHost:
    """A namespace, its link to the switch, and the rate of both directions."""
    peer = ("peer", "name", INTERFACE, "mtu", str(mtu), "netns", name)
    _run("ip", "netns", "add", name)
    _run("ip", "-n", switch, "link", "add", "name", port, "mtu", str(mtu), "type", "veth", *peer)
    for space, device in ((switch, port), (name, INTERFACE)):
        _run("ip", "-n", space, "link", "set", device, "addrgenmode", "none")
        if host.bytes_per_second is not None:
            _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *_shaped(host.bytes_per_second, mtu))
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", name, "address", "add", address, "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", INTERFACE, "up")
    return PlacedHost(host, address.partition("/")[0], INTERFACE, NAMED / name, port)


def _shaped(rate: float, mtu: int) -> tuple[str, ...]:
    """A token bucket of so many bytes per second, as `tc` wants it."""
    packet = mtu + _FRAME
    burst = max(round(rate * BURST), _BURST_PACKETS * packet)
    limit = burst + max(round(rate * QUEUE), _QUEUE_PACKETS * packet)
    return ("tbf", "rate", f"{round(rate * 8)}bit", "burst", f"{burst}b", "limit", f"{limit}b")


def _remove(name: str) -> None:
    _run("ip", "netns", "delete", name)


def _run(*words: str) -> None:
    """Run a command that changes the network; what it says when it fails is raised."""
    try:
        # A group of its own: Ctrl-C is for the run, which then removes what was made.
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE,
            process_group=0,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"`{' '.join(words)}` did not end within {_DEADLINE:g} s.") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"code {done.returncode}"
        raise RunError(f"`{' '.join(words)}` failed: {said}.")


def _owner() -> str:
    """How the names of all namespaces begin that this process makes."""
    return f"offbeat-{os.getpid()}-{_began(os.getpid())}"


def _began(process: int) -> int | None:
    """When a process began, in ticks since the machine did; None if there is none. Numbers of processes come back."""
    found = seen(process)
    return None if found is None else found.began
