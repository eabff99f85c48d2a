"""What this machine is: versions, cores, memory, the address at which others reach it, and free ports."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import socket
import struct
from contextlib import ExitStack
from pathlib import Path

from offbeat._version import __version__

PORTS = 96
"""Free ports that an agent offers for servers of the run."""
_SIOCGIFADDR = 0x8915


def versions() -> dict[str, str]:
    """Versions that must be equal on all machines of a run."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"offbeat": __version__, "torch": importlib.metadata.version("torch"), "Python": python}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Bytes of memory that are available."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def own_address(peer: str) -> str:
    """The address of this machine on its way to a peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # Sends nothing.
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """The network interface that has this address; the loopback one if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    return "lo"


def free_ports(address: str, count: int = PORTS) -> tuple[int, ...]:
    """Ports of this address that are free now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((address, 0))
        return tuple(each.getsockname()[1] for each in sockets)
