"""The ZeroMQ sockets of one endpoint, and the addresses where they may be.

An endpoint has a ROUTER that others connect to, and a DEALER to each peer it connects to. Without keys, addresses are
in a private folder or on loopback.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from offbeat.errors import UsageError
from offbeat.runtime.messages.frames import BULK, CHUNK
from offbeat.runtime.messages.keys import DOMAIN, Keys, for_socket, guard, owner_of

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

PRIVATE = "ipc://*"  # Bind to this for a socket in a new private folder, which is removed with the endpoint.
_PREFIX = "offbeat-sockets-"
_LONGEST_PATH = 107
_TCP = re.compile(r"tcp://(?P<host>[^;/]+):(?P<port>\d+|\*)")


@contextmanager
def private_directory() -> Generator[Path]:
    """A temporary folder that only this user can enter, for the sockets of one run.

    Folders that killed processes left behind are removed first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        process = left.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):
            if process.isdigit() and left.stat().st_uid == os.getuid() and not Path(f"/proc/{process}").exists():
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


def address_in(directory: Path, name: str) -> str:
    """The address of an endpoint in a private folder."""
    return f"ipc://{directory / re.sub(r'[^A-Za-z0-9._-]', '-', name)}"


def check_address(address: str, has_keys: bool) -> None:
    """Refuse an invalid address, and one at which strangers could listen or connect."""
    if address.startswith("ipc://"):
        _check_path(Path(address.removeprefix("ipc://")))
        return
    parts = _TCP.fullmatch(address)
    if parts is None:
        raise UsageError(f"{address!r} is not an address: write ipc:///folder/socket or tcp://host:port.")
    if not has_keys and not _is_loopback(parts["host"]):
        raise UsageError(
            f"{address} can be reached from other machines, and without keys anyone who reaches it is trusted. Give "
            "keys (`offbeat keys new FILE`, the same file on all machines), or use tcp://127.0.0.1:port."
        )


def _check_path(path: Path) -> None:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise UsageError(f"ipc://{path} is too long: Linux allows {_LONGEST_PATH} bytes. Use a shorter folder.")
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise UsageError(f"ipc://{path} cannot be used: {error}.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"Other users can enter {path.parent}, and could connect to what listens there. "
            "Use a private folder (chmod 700), such as `private_directory()` makes."
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


TRIES = 30  # Non-blocking polls, yielding the core in between, before a wait sleeps: waking up takes longer.
_ENCRYPTION = 1024  # Upper bound on the bytes that CURVE adds to a frame.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # Plain numbers: enum flags are slow.

Socket = zmq.Socket[bytes]


@dataclass(slots=True)
class _Wake:
    """Ends a wait from another thread."""

    descriptor: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True

    def ring(self) -> None:
        with self.lock:
            if self.is_open:
                os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        with self.lock:
            if self.is_open:
                self.is_open = False
                os.close(self.descriptor)


class Sockets:
    """All sockets of one endpoint. Single-threaded except for `wake`."""

    def __init__(self, name: str, identity: bytes, keys: Keys | None, high_water: int, most_frames: int) -> None:
        self._name, self._identity, self._keys, self._high_water = name, identity, keys, high_water
        self._most_frames = most_frames
        self._context: zmq.Context[Socket] = zmq.Context()
        self._wake = _Wake()
        self.wake = self._wake.ring  # Ends the current or next wait of `poll`; from any thread.
        self.ready: list[Socket] = []  # Sockets with something to read.
        self._polled: list[tuple[Any, int]] = [(self._wake.descriptor, zmq.POLLIN)]
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self.router: Socket | None = None
        self.strangers: set[str] = set()
        """Public keys that were refused."""
        self.owner = ""
        """The public key of the sender of the message taken last, if it came to the router; empty without keys."""

    def bind(self, address: str) -> str:
        """Listen at this address; returns the actual address."""
        if address == PRIVATE:
            self._folder = tempfile.TemporaryDirectory(prefix="offbeat-")
            address = address_in(Path(self._folder.name), self._name)
        check_address(address, self._keys is not None)
        router = self.router = self._new_socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._keys is not None:
            self._authenticator = guard(self._context, self._keys, self.strangers)
            router.curve_server = True
            router.zap_domain = DOMAIN.encode()
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise UsageError(f"{self._name} cannot listen at {address}: {error}.") from error
        self._polled.append((router, zmq.POLLIN))
        return router.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, peer: str, address: str, public: str | None) -> Socket:
        """A socket to a peer at this address."""
        dealer = self._new_socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, self._identity)
        if self._keys is not None:
            dealer.curve_serverkey = for_socket(public or self._keys.public)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise UsageError(f"{self._name} cannot connect to {peer!r} at {address}: {error}.") from error
        self._polled.append((dealer, zmq.POLLIN))
        return dealer

    def _new_socket(self, kind: int) -> Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.SNDHWM, self._high_water)
        socket.setsockopt(zmq.RCVHWM, self._high_water)
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK + _ENCRYPTION)
        if self._keys is not None:
            socket.curve_publickey = for_socket(self._keys.public)
            socket.curve_secretkey = for_socket(self._keys.secret)
        return socket

    def disconnect(self, dealer: Socket) -> None:
        """Close a socket to a peer and drop its queue."""
        self._polled = [entry for entry in self._polled if entry[0] is not dealer]
        self.ready = [socket for socket in self.ready if socket is not dealer]
        dealer.close(0)

    def put(self, dealer: Socket | None, identity: bytes, frames: list[Any]) -> bool:
        """Queue frames for a peer, all or none; False if the queue is full or there is no route to it."""
        socket = dealer or self.router
        if socket is None:
            return False
        last = frames[-1]
        try:
            if dealer is None:
                socket.send(identity, _MORE)
            for frame in frames[:-1]:
                socket.send(frame, _MORE, len(frame) < BULK)
            socket.send(last, _NOBLOCK, len(last) < BULK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def poll(self, milliseconds: int) -> bool:
        """Wait until a socket has something to read; True if another thread called `wake`."""
        rung = False
        events: list[tuple[Any, int]] = []
        for _ in range(TRIES if milliseconds else 0):
            events = zmq.zmq_poll(self._polled, 0)  # pyright: ignore[reportAssignmentType]
            if events:
                break
            os.sched_yield()
        if not events:
            events = zmq.zmq_poll(self._polled, milliseconds)  # pyright: ignore[reportAssignmentType]
        for entry, _ in events:
            if isinstance(entry, int):
                os.eventfd_read(entry)
                rung = True
            else:
                self.ready.append(entry)
        return rung

    def take(self, socket: Socket) -> tuple[bytes | None, list[Any]]:
        """One message of a socket, with its sender's identity if it is the router; raises `zmq.Again` if there is none.

        Small frames are copied, which is faster and aligns them. Of too many frames only one over the limit is kept.
        """
        identity = None
        if socket is self.router:
            first = socket.recv(_NOBLOCK, False)
            identity = first.bytes
            self.owner = "" if self._keys is None else owner_of(first)
        limit = self._most_frames + 2
        frames: list[Any] = []
        more = True
        while more:
            frame = socket.recv(_NOBLOCK, False)
            more = frame.more
            if len(frames) < limit:
                frames.append(frame.bytes if len(frame) < BULK else frame.buffer)
        return identity, frames

    def close(self) -> None:
        """Close all sockets and drop their queues."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.destroy(linger=0)
        self.ready.clear()
        self._wake.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
