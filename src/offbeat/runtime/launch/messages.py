"""Messages between launcher, fork server and children, and their framing.

A frame is four bytes of length (big-endian, capped) and a msgspec struct as MessagePack. Not JSON, which has no
NaN: a diverged loss must arrive as one. Not pickle: reading a message must run no code.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from offbeat.errors import RunError, UsageError
from offbeat.runtime.launch._roles import RemoteError

LIMIT = 64 * 1024 * 1024  # Bytes in one frame at most: more is a mistake, and would take memory twice.
PRELOAD_DEADLINE = 120.0
"""Seconds that the fork server's imports may take: a cold disk is slow, but a hung import never ends."""

_LENGTH = struct.Struct(">I")
_CHUNK = 1024 * 1024
_FDS_AT_ONCE = 8


class LauncherHello(msgspec.Struct, tag=True, frozen=True):
    """Launcher to server, once: modules to import, and the import path."""

    preload: list[str]
    path: list[str]


class Fork(msgspec.Struct, tag=True, frozen=True):
    """Launcher to server: fork a role. Its control socket and log file travel along as descriptors."""

    id: int
    label: str
    entry: str
    config: dict[str, Any]
    environment: dict[str, str]
    directory: str
    path: list[str]
    threads: int | None
    network: str | None = None
    patience: float = 600.0


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Launcher to server: send a signal to the process group of a role."""

    id: int
    number: int


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Launcher to server: reply once no process of any role is left."""


class ServerReady(msgspec.Struct, tag=True, frozen=True):
    """Server to launcher: everything is imported."""


class Broken(msgspec.Struct, tag=True, frozen=True):
    """Server to launcher: why it cannot serve."""

    message: str
    traceback: str


class Forked(msgspec.Struct, tag=True, frozen=True):
    """Server to launcher: a role has a process."""

    id: int
    pid: int


class ForkRefused(msgspec.Struct, tag=True, frozen=True):
    """Server to launcher: a role could not be forked."""

    id: int
    message: str


class RoleEnded(msgspec.Struct, tag=True, frozen=True):
    """Server to launcher: a role's process has ended, with a code or by a signal."""

    id: int
    exit_code: int | None
    signal: int | None
    at: float


class Drained(msgspec.Struct, tag=True, frozen=True):
    """Server to launcher: no process of any role is left."""


class Note(msgspec.Struct, tag=True, frozen=True):
    """Child to launcher: a message for `on_message`."""

    content: dict[str, Any]


class Exiting(msgspec.Struct, tag=True, frozen=True):
    """Child to launcher: the role will exit with this non-zero code once its threads and exit handlers are done."""

    code: int
    at: float


ToServer = LauncherHello | Fork | Signal | Drain
FromServer = ServerReady | Broken | Forked | ForkRefused | RoleEnded | Drained
FromChild = Note | RemoteError | Exiting

M = TypeVar("M")


def frame(message: msgspec.Struct) -> bytes:
    """One message as it goes over the wire."""

    def _plain(value: object) -> object:
        if isinstance(value, Mapping):
            return dict(value)  # pyright: ignore[reportUnknownVariableType]
        raise TypeError(f"{type(value).__qualname__} is not plain data (None, bool, int, float, str, list, dict)")

    try:
        body = msgspec.msgpack.encode(message, enc_hook=_plain)
    except (TypeError, OverflowError, ValueError) as error:
        raise UsageError(
            f"A message cannot be sent between processes: {error}. Only plain data can: convert it first."
        ) from error
    if len(body) > LIMIT:
        raise UsageError(
            f"A message of {len(body):,} bytes cannot be sent between processes: the limit is {LIMIT:,}. "
            "Write large data to a file and send its path."
        )
    return _LENGTH.pack(len(body)) + body


class Channel(Generic[M]):
    """One end of a socketpair: blocking sends, non-blocking reads, file descriptors alongside."""

    def __init__(self, end: socket.socket, reads: object, name: str) -> None:
        self._socket = end
        self.fileno = end.fileno
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(reads)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        self._buffer = bytearray()
        self._name = name
        self.descriptors: list[int] = []  # Descriptors that arrived and were not taken yet, in order of arrival.
        self.ended = False  # Whether the other side has closed.

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send one whole message; raises OSError if the other side is gone."""
        data = frame(message)
        if descriptors:
            data = data[socket.send_fds(self._socket, [data], list(descriptors)) :]
        self._socket.sendall(data)

    def receive(self) -> list[M]:
        """The complete messages after one read; never waits."""
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK, _FDS_AT_ONCE, flags)
        except BlockingIOError:
            return []
        except ConnectionError:
            data, descriptors = b"", []
        self.descriptors += descriptors
        self.ended = self.ended or not data
        self._buffer += data
        messages: list[M] = []
        position = 0
        while len(self._buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, position)
            if length > LIMIT:
                raise RunError(f"A frame of {length:,} bytes came from {self._name}: the limit is {LIMIT:,}.")
            start = position + _LENGTH.size
            if len(self._buffer) < start + length:
                break
            messages.append(self._decoder.decode(bytes(self._buffer[start : start + length])))
            position = start + length
        del self._buffer[:position]
        return messages

    def receive_rest(self) -> list[M]:
        """All complete messages from a sender that has ended."""
        messages: list[M] = []
        while True:
            before = len(self._buffer)
            new = self.receive()
            messages += new
            if self.ended or (not new and len(self._buffer) == before):
                return messages

    def close(self) -> None:
        """Close this end, and any descriptors not taken."""
        self._socket.close()
        while self.descriptors:
            with contextlib.suppress(OSError):
                os.close(self.descriptors.pop())
