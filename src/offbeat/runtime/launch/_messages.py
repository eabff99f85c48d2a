"""What launcher, fork server and children say to each other, and how it is framed.

A frame is four bytes of length (big-endian, capped) and a msgspec struct as MessagePack. Not JSON, since
JSON has no NaN: a diverged loss must arrive as one. Not pickle, since reading a message must run no code.
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

LIMIT = 64 * 1024 * 1024
"""Bytes that one frame may have: more is a mistake, and would be paid for twice in memory."""

PRELOAD_DEADLINE = 120.0
"""Seconds that the fork server's imports may take: a cold disk is slow, a hanging import is endless."""

_LENGTH = struct.Struct(">I")
_CHUNK = 1024 * 1024
_FDS_AT_ONCE = 8


class LauncherHello(msgspec.Struct, tag=True, frozen=True):
    """Launcher to server, once: what to import, and from where."""

    preload: list[str]
    path: list[str]


class Fork(msgspec.Struct, tag=True, frozen=True):
    """Launcher to server: fork a role. Two descriptors travel with it: control socket and log file."""

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
    """Launcher to server: answer when no process of any role is left."""


class ServerReady(msgspec.Struct, tag=True, frozen=True):
    """Server to launcher: everything is imported."""

    seconds: float


class Broken(msgspec.Struct, tag=True, frozen=True):
    """Server to launcher: it cannot serve, and why."""

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
    """Child to launcher: a message of the role's own."""

    content: dict[str, Any]


class Exiting(msgspec.Struct, tag=True, frozen=True):
    """Child to launcher: the role ends with this code, not 0, once its threads and exit handlers have."""

    code: int
    at: float


ToServer = LauncherHello | Fork | Signal | Drain
FromServer = ServerReady | Broken | Forked | ForkRefused | RoleEnded | Drained
FromChild = Note | RemoteError | Exiting

M = TypeVar("M")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)  # pyright: ignore[reportUnknownVariableType]
    raise TypeError(f"{type(value).__qualname__} is not plain data (None, bool, int, float, str, list, dict)")


def frame(message: msgspec.Struct) -> bytes:
    """One message as it goes over the wire."""
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
    """One end of a socketpair: blocking sends, reads that take what is there, descriptors alongside."""

    def __init__(self, end: socket.socket, reads: object, name: str) -> None:
        self._socket = end
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(reads)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        self._buffer = bytearray()
        self._name = name
        self.descriptors: list[int] = []
        """Descriptors that arrived and were not taken yet, in the order of arrival."""
        self.ended = False
        """Whether the other side has closed."""

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send one message, all of it; raises OSError if the other side is gone."""
        data = frame(message)
        if descriptors:
            sent = socket.send_fds(self._socket, [data], list(descriptors))
            data = data[sent:]
        self._socket.sendall(data)

    def receive(self) -> list[M]:
        """The complete messages that one read brings; never waits."""
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
        return self._take()

    def receive_rest(self) -> list[M]:
        """All complete messages of a sender that has ended."""
        messages: list[M] = []
        while True:
            before = len(self._buffer)
            new = self.receive()
            messages += new
            if self.ended or (not new and len(self._buffer) == before):
                return messages

    def _take(self) -> list[M]:
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

    def close(self) -> None:
        """Close this end, and descriptors that nobody took."""
        self._socket.close()
        while self.descriptors:
            with contextlib.suppress(OSError):
                os.close(self.descriptors.pop())
