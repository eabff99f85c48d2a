"""What launcher and agents say to each other over a link: structs, and the bytes of files."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from offbeat.errors import OffbeatError
from offbeat.runtime.launch import messages as wire

_LENGTH = struct.Struct(">I")


class ContentError(OffbeatError):
    """A content that cannot be read: from a program that is not ours."""


class MachineFacts(msgspec.Struct, frozen=True):
    """What a machine is, by its agent."""

    host: str
    """Its own name."""
    offbeat: str
    torch: str
    python: str
    cores: int
    memory: int
    """Bytes of memory that are available."""
    address: str
    """Where other machines of the run reach it."""
    interface: str
    """The network interface with that address."""
    ports: tuple[int, ...]
    """Ports that were free a moment ago."""
    folder: str
    """Where the agent keeps this run's files until they are home."""
    sockets: str
    """A private folder for sockets."""
    code: str
    """Where shipped code is unpacked."""
    now: float
    """The machine's monotonic clock."""


class AgentHello(msgspec.Struct, tag=True, frozen=True):
    """Agent to launcher, first."""

    facts: MachineFacts


class CodePiece(msgspec.Struct, tag=True, frozen=True):
    """Launcher to agent: the next piece of the archive of the user's code, as bytes after this struct."""

    digest: str
    last: bool


class HomeFile(msgspec.Struct, tag=True, frozen=True):
    """Launcher to agent: a file of the run folder that a resumed run needs; its next piece as bytes."""

    path: str
    first: bool


class AgentQuestion(msgspec.Struct, tag=True, frozen=True):
    """Launcher to agent: the question which of these paths are missing, and which addresses cannot be reached."""

    paths: tuple[str, ...]
    addresses: tuple[str, ...] = ()


class AgentAnswer(msgspec.Struct, tag=True, frozen=True):
    """Agent to launcher: what is missing, and why each address cannot be reached."""

    missing: tuple[str, ...]
    unreachable: tuple[str, ...] = ()
    problem: str = ""
    """Why something that was sent before could not be kept."""


class RoleOrder(msgspec.Struct, tag=True, frozen=True):
    """Launcher to agent: start a role with this log, a path in the run folder."""

    fork: wire.Fork
    log: str


class FinishRun(msgspec.Struct, tag=True, frozen=True):
    """Launcher to agent: end what still runs, send what is left of the files, and end."""


class Said(msgspec.Struct, tag=True, frozen=True):
    """Agent to launcher: what a role has said."""

    id: int
    message: wire.FromChild


class Piece(msgspec.Struct, tag=True, frozen=True):
    """Agent to launcher: bytes of a file in the run folder, at this offset; at 0 the file begins anew."""

    path: str
    offset: int


class Trouble(msgspec.Struct, tag=True, frozen=True):
    """Agent to launcher: what went wrong on its machine, such as a full disk."""

    message: str


class RunFinished(msgspec.Struct, tag=True, frozen=True):
    """Agent to launcher: every file is home, nothing runs."""


ToAgent = CodePiece | HomeFile | AgentQuestion | RoleOrder | wire.Signal | wire.Drain | FinishRun
FromAgent = (
    AgentHello | AgentAnswer | Said | Piece | Trouble | RunFinished
    | wire.ServerReady | wire.Broken | wire.Forked | wire.ForkRefused | wire.RoleEnded | wire.Drained
)  # fmt: skip

_TO_AGENT: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)  # pyright: ignore[reportArgumentType]
_FROM_AGENT: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)  # pyright: ignore[reportArgumentType]


def content_of(message: msgspec.Struct, data: bytes = b"") -> bytes:
    """A struct and the bytes that follow it, as one content."""
    return wire.frame(message) + data


def to_agent(content: Any) -> tuple[ToAgent, memoryview]:
    """What the launcher has said, and the bytes after it."""
    return _read(content, _TO_AGENT)


def from_agent(content: Any) -> tuple[FromAgent, memoryview]:
    """What an agent has said, and the bytes after it."""
    return _read(content, _FROM_AGENT)


def _read(content: Any, decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, memoryview]:
    view = memoryview(content).cast("B") if content is not None else memoryview(b"")
    try:
        (length,) = _LENGTH.unpack_from(view)
        if length > len(view) - _LENGTH.size:
            raise ContentError("a content that is shorter than it says")
        start = _LENGTH.size + length
        return decoder.decode(view[_LENGTH.size : start]), view[start:]
    except (struct.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ContentError(f"not a content of ours: {error}") from error
