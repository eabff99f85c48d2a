"""The wire format of messages, and what is refused.

A message is one header frame and the frames of its payload. The header frame has 24 fixed bytes, an optional note, and
the message as MessagePack (docs/messages.md has it byte by byte). Decoding runs no code of the sender's, and allocates
only for bytes that have arrived, never for what a header claims.
"""

from __future__ import annotations

import struct
import types
import zlib
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError, UsageError

MAGIC = b"offb"
VERSION = 1
HEADER_LIMIT = 64 * 1024  # Largest header frame, in bytes.
PAYLOAD_LIMIT = 1024**3  # Largest payload in bytes, unless the codec sets another limit.
CHUNK = 4 * 1024 * 1024  # Payload bytes per frame; the last has the rest.
BULK = 64 * 1024  # Frames of at least this many bytes are not copied to and from the socket.

Buffer = NDArray[Any] | memoryview | bytes | bytearray
Bytes = NDArray[np.uint8]
Frame = bytes | memoryview

# magic, checksum, version, kind, bytes of the note, frames of the payload, bytes of the payload
_FIXED = struct.Struct("<4sIBBHIQ")
_UNCHECKED = 8  # Leading bytes that the checksum does not cover: the magic word and itself.
_PLAIN, _FRAMES, _SHARED, _HELLO = range(4)
_SMALLEST_CHUNK = 1024 * 1024
_ROW = 4096

M = TypeVar("M")


class FrameError(OffbeatError):
    """Malformed frames: from a stranger, or damaged on the way."""


class MemoryReference(msgspec.Struct, frozen=True, array_like=True):
    """The location of a payload in memory lent by the sender, sent instead of the payload."""

    ticket: str  # Opens the memory (`Segment.ticket`).
    serial: int  # Number of the loan: tickets may be reused for other memory.
    offset: int
    nbytes: int


class EndpointHello(msgspec.Struct, frozen=True, array_like=True):
    """The first message between endpoints, which tells whether they can share memory."""

    host: str  # Hash of the sender's `host_identity()` and incarnation; empty: it cannot read the receiver's memory.
    process: int  # The sender's process; it may lend only its own memory.
    incarnation: int  # Changes with a restart: state about the old process is then discarded.
    answer: bool  # Whether the sender requests a greeting back.


class Codec(Generic[M]):
    """Encodes and decodes messages of one type (a msgspec Struct, or a tagged union of them)."""

    def __init__(self, messages: type[M] | Any, payload_limit: int = PAYLOAD_LIMIT) -> None:
        self.payload_limit = payload_limit
        self.most_frames = 1 + payload_limit // _SMALLEST_CHUNK  # Most frames in a payload.
        is_union = get_origin(messages) in (Union, types.UnionType)
        self._types = frozenset(get_args(messages) if is_union else (messages,))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._references = msgspec.msgpack.Decoder(MemoryReference)
        self._hellos = msgspec.msgpack.Decoder(EndpointHello)

    def encode(self, message: M, payload: Buffer | None = None) -> list[Any]:
        """The frames of a message; payload frames are views, in chunks of 4 MiB."""
        body = self._body(message)
        if payload is None:
            return [_header(_PLAIN, body)]
        flat = as_bytes(payload)
        if flat.nbytes > self.payload_limit:
            raise UsageError(
                f"A payload of {flat.nbytes:,} bytes cannot be sent: the limit is {self.payload_limit:,}. "
                "Send it in parts, or give the codec a higher payload_limit on both sides."
            )
        chunks = [flat[start : start + CHUNK] for start in range(0, flat.nbytes, CHUNK)]
        return [_header(_FRAMES, body, nbytes=flat.nbytes, chunks=chunks), *chunks]

    def encode_reference(self, message: M, reference: MemoryReference) -> bytes:
        """The single frame of a message whose payload is lent."""
        note = self._encoder.encode(reference)
        return _header(_SHARED, self._body(message), note, nbytes=reference.nbytes)

    def encode_hello(self, hello: EndpointHello) -> bytes:
        """The single frame of a greeting."""
        return _header(_HELLO, self._encoder.encode(hello))

    def decode(self, frames: Sequence[Frame]) -> tuple[M | EndpointHello, Bytes | MemoryReference | None]:
        """The message and its read-only payload; raises `FrameError`, and nothing else, if malformed."""
        if not frames or len(frames) - 1 > self.most_frames:
            raise FrameError(f"{len(frames)} frames")
        # Bytes are faster to parse than views, and small frames come as bytes.
        header, *chunks = [frame if type(frame) is bytes else memoryview(frame) for frame in frames]
        kind, start, nbytes = self._checked(header, chunks)
        try:
            if kind == _HELLO:
                return self._hellos.decode(header[start:]), None
            message = self._decoder.decode(header[start:])
            reference = self._references.decode(header[_FIXED.size : start]) if kind == _SHARED else None
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise FrameError(f"not a message of ours: {error}") from error
        if reference is not None:
            if reference.nbytes != nbytes or reference.offset < 0:
                raise FrameError("a reference that contradicts its header")
            return message, reference
        return message, _joined(chunks, nbytes) if kind == _FRAMES else None

    def _body(self, message: M) -> bytes:
        if type(message) not in self._types:
            known = ", ".join(sorted(kind.__name__ for kind in self._types))
            raise UsageError(f"{type(message).__name__} is not a message of this codec, which knows: {known}.")
        return self._encoder.encode(message)

    def _checked(self, header: Frame, chunks: list[Frame]) -> tuple[int, int, int]:
        """Kind, offset of the message and payload size, once the header is known to match itself and the chunks."""
        size = len(header)
        if not _FIXED.size <= size <= HEADER_LIMIT:
            raise FrameError(f"a header of {size:,} bytes")
        magic, checksum, version, kind, note, count, nbytes = _FIXED.unpack_from(header)
        if magic != MAGIC or version != VERSION:
            raise FrameError(f"not of this protocol, or not of its version {VERSION}")
        start = _FIXED.size + note
        if kind > _HELLO or start > size or nbytes > self.payload_limit:
            raise FrameError("a header that contradicts itself")
        arrived = sum(map(len, chunks))
        if count != len(chunks) or arrived != (nbytes if kind == _FRAMES else 0):
            raise FrameError(f"{len(chunks)} frames of {arrived:,} bytes, not as the header says")
        if _checksum(header[_UNCHECKED:], chunks) != checksum:
            raise FrameError("the checksum is wrong")
        return kind, start, nbytes


def as_bytes(payload: Buffer) -> memoryview:
    """A payload as a flat view of bytes; refused if it is not contiguous."""
    try:
        view = memoryview(payload)  # pyright: ignore[reportArgumentType]
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise UsageError(f"A payload must be one contiguous piece of memory: {error}. Copy it first.") from error


def _header(kind: int, body: bytes, note: bytes = b"", nbytes: int = 0, chunks: Sequence[memoryview] = ()) -> bytes:
    size = _FIXED.size + len(note) + len(body)
    if size > HEADER_LIMIT:
        raise UsageError(
            f"A message of {size:,} bytes without its payload cannot be sent: the limit is {HEADER_LIMIT:,}. "
            "Numbers in bulk belong in the payload."
        )
    fixed = _FIXED.pack(MAGIC, 0, VERSION, kind, len(note), len(chunks), nbytes)
    rest = fixed[_UNCHECKED:] + note + body
    return MAGIC + _checksum(rest, chunks).to_bytes(4, "little") + rest


def _checksum(rest: Frame, chunks: Sequence[Frame]) -> int:
    """CRC-32 of the header and of each chunk, in order; large chunks are folded first."""
    checksum = zlib.crc32(rest)
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum) if len(chunk) < BULK else _folded(chunk, checksum)
    return checksum


def _folded(chunk: Frame, checksum: int) -> int:
    """CRC-32 of the sum of a chunk's 4 KiB rows, as 8-byte words, and of the remainder: ten times as fast.

    A change within one row always changes the sum. Only changes in several rows that cancel out escape.
    """
    whole = len(chunk) // _ROW * _ROW
    rows = np.frombuffer(chunk, dtype="<u8", count=whole // 8).reshape(-1, _ROW // 8)
    return zlib.crc32(chunk[whole:], zlib.crc32(np.add.reduce(rows, axis=0), checksum))


def _joined(chunks: Sequence[Frame], nbytes: int) -> Bytes:
    """The chunks as one array: a view of a single chunk, otherwise a copy."""
    if len(chunks) == 1:
        array = np.frombuffer(chunks[0], dtype=np.uint8)
        if type(chunks[0]) is bytes:
            return array
    else:
        array = np.empty(nbytes, dtype=np.uint8)
        position = 0
        for chunk in chunks:
            array[position : position + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
            position += len(chunk)
    array.flags.writeable = False
    return array
