"""How processes find each other: a store to meet at, and the variables that lead there."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import TYPE_CHECKING

from offbeat.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def threads_for(workers: int) -> int:
    """How many threads each of some workers should compute with, so that together they fill the cores."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago; where possible bind port 0 instead, which cannot be taken meanwhile."""
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]


def serve_store(port: int = 0, host: str = "127.0.0.1") -> TCPStore:
    """A store for workers to meet at, served by this process until it is dropped; port 0 takes a free one.

    It listens on `host` alone, while a TCPStore left to itself listens on every interface.
    """
    from torch.distributed import TCPStore

    try:
        listener = socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise UsageError(
            f"The store cannot listen on port {port} of {host}: {error.strerror}. Another run or program may be "
            "using it: choose another port, or 0 for any that is free."
        ) from error
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def worker_environment(rank: int, size: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """What torchrun would set for a worker on this machine, so that stock scripts join through `env://`."""
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # Makes every rank a client: the store is the launcher's, not rank 0's.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "offbeat",
    }
    if _is_loopback(host):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
