"""Rendezvous: the store where processes meet, and the environment variables that lead to it."""

from __future__ import annotations

import importlib
import ipaddress
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from offbeat.errors import UsageError
from offbeat.runtime.run.rank_environment import STORE, where

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from offbeat.runtime.hosts import Seat


EVERYWHERE = "0.0.0.0"  # noqa: S104 (of a network that only this run is in)
"""Every address of this process in the network where it listens."""


def threads_for(workers: int) -> int:
    """Compute threads per worker, so that together they fill the cores."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago; where possible bind port 0 instead, which nobody else can take."""
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]


@dataclass(frozen=True)
class PrivateStore:
    """A store for workers on this machine that other users cannot reach."""

    path: str  # The file that `torch.distributed.FileStore` opens.
    port: int  # A reserved loopback port on which nobody listens: stock scripts expect MASTER_PORT to be set.


@contextmanager
def private_store(port: int = 0) -> Generator[PrivateStore]:
    """A rendezvous store for workers on this machine; port 0 picks a free one."""
    # A TCPStore accepts every process that reaches its port, of any user. This store is a memory file opened through
    # this process, which Linux allows only to processes of the same user; it vanishes with this process.
    with socket.socket() as reserved:
        try:
            reserved.bind(("127.0.0.1", port))
        except OSError as error:
            raise _taken(port, "127.0.0.1", error) from error
        descriptor = os.memfd_create("offbeat-store", os.MFD_CLOEXEC)
        try:
            yield PrivateStore(f"/proc/{os.getpid()}/fd/{descriptor}", reserved.getsockname()[1])
        finally:
            os.close(descriptor)


def use_private_store() -> None:
    """Make this worker use its launcher's private store, even when a stock script says `env://`."""
    from torch.distributed import FileStore

    # By full name: the function `torch.distributed.rendezvous` hides the module.
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    stock = module._create_c10d_store

    def create(hostname: str, port: int, rank: int, size: int, timeout: timedelta, *more: Any, **named: Any) -> Any:
        place = where()
        if place.store is None or (hostname, port) != (place.address, place.port):
            return stock(hostname, port, rank, size, timeout, *more, **named)
        store = FileStore(place.store, -1)
        store.set_timeout(timeout)
        return store

    module._create_c10d_store = create


def _taken(port: int, host: str, error: OSError) -> UsageError:
    return UsageError(
        f"The store cannot listen on port {port} of {host}: {error.strerror}. Another run or program may be "
        "using it: choose another port, or 0 for any that is free."
    )


def serve_store(port: int = 0, host: str = "127.0.0.1") -> TCPStore:
    """A torch store for rendezvous, served by this process until it is dropped; port 0 picks a free one."""
    # Anyone who reaches it may use it: on one machine prefer `private_store`. It listens on `host` alone, while a plain
    # TCPStore listens on every interface. `EVERYWHERE` is for networks created for one run.
    from torch.distributed import TCPStore

    try:
        listener = socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise _taken(port, host, error) from error
    own = host == EVERYWHERE
    # Torch looks up a name for the address, and complains on stderr that there is no name server.
    with nullcontext() if _is_loopback(host) else _silenced():
        return TCPStore(
            "127.0.0.1" if own else host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


@contextmanager
def _silenced() -> Generator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def worker_environment(
    rank: int, size: int, store: PrivateStore | int, host: str = "127.0.0.1", seat: Seat | None = None
) -> dict[str, str]:
    """The variables torchrun would set for a worker, so that stock scripts join through `env://`.

    The store is private, or the port of torch's own on `host`. Without a seat the worker is on this machine.
    """
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank if seat is None else seat.local_rank),
        "LOCAL_WORLD_SIZE": str(size if seat is None else seat.local_size),
        "GROUP_RANK": str(0 if seat is None else seat.number),
        "GROUP_WORLD_SIZE": str(1 if seat is None else seat.hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(store.port if isinstance(store, PrivateStore) else store),
        # Makes every rank a client: the store is the launcher's, not rank 0's.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "offbeat",
    }
    if isinstance(store, PrivateStore):
        environment[STORE] = store.path
    if seat is not None:
        environment["GLOO_SOCKET_IFNAME"] = seat.host.interface
    elif _is_loopback(host):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
