"""What a message is on the wire, and what is refused.

A message is one header frame and the frames of its payload. The header frame is 24 bytes of fixed form, then an
optional note, then the message itself as MessagePack (docs/messages.md has it byte by byte). Reading runs no code of
the sender's, and never allocates by what a header claims: only by what has arrived.
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
HEADER_LIMIT = 64 * 1024
"""Bytes that a header frame may have."""
PAYLOAD_LIMIT = 1024**3
"""Bytes that a payload may have, unless the codec is told otherwise."""
CHUNK = 4 * 1024 * 1024
"""Bytes of a payload in one frame; the last has the rest."""

BULK = 64 * 1024
"""Bytes from which on a frame is not copied on its way to and from the socket."""

Buffer = NDArray[Any] | memoryview | bytes | bytearray
Bytes = NDArray[np.uint8]
Frame = bytes | memoryview

# magic, checksum, version, kind, bytes of the note, frames of the payload, bytes of the payload
_FIXED = struct.Struct("<4sIBBHIQ")
_UNCHECKED = 8
"""Bytes at the start that the checksum does not cover: the magic word and itself."""
_PLAIN, _FRAMES, _SHARED, _HELLO = range(4)
_SMALLEST_CHUNK = 1024 * 1024
_ROW = 4096

M = TypeVar("M")


class FrameError(OffbeatError):
    """Frames that are not messages; whoever sent them is not one of us, or the line is broken."""


class MemoryReference(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload lies in memory that the sender has lent: nothing but this is sent."""

    ticket: str
    """What opens the memory (`Segment.ticket`)."""
    serial: int
    """Which loan of the sender's this is: tickets may come back for other memory."""
    offset: int
    nbytes: int


class EndpointHello(msgspec.Struct, frozen=True, array_like=True):
    """What endpoints say to each other before anything else, so that they know whether they share memory."""

    host: str
    """A hash of the sender's `host_identity()` and incarnation; empty if it cannot read the receiver's memory."""
    process: int
    """The sender's process, whose memory alone it may lend."""
    incarnation: int
    """Another number after a restart: what was known of the old one is forgotten."""
    answer: bool
    """Whether the sender wants to be told the same."""


class Codec(Generic[M]):
    """Turns messages of one kind (a msgspec Struct, or a tagged union of them) into frames and back."""

    def __init__(self, messages: type[M] | Any, payload_limit: int = PAYLOAD_LIMIT) -> None:
        self.payload_limit = payload_limit
        self.most_frames = 1 + payload_limit // _SMALLEST_CHUNK
        """Frames that a payload may come in."""
        is_union = get_origin(messages) in (Union, types.UnionType)
        self._types = frozenset(get_args(messages) if is_union else (messages,))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._references = msgspec.msgpack.Decoder(MemoryReference)
        self._hellos = msgspec.msgpack.Decoder(EndpointHello)

    def encode(self, message: M, payload: Buffer | None = None) -> list[Any]:
        """The frames of a message; those of the payload are views of it, in chunks of 4 MiB."""
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
        """The one frame of a message whose payload stays where it is."""
        note = self._encoder.encode(reference)
        return _header(_SHARED, self._body(message), note, nbytes=reference.nbytes)

    def encode_hello(self, hello: EndpointHello) -> bytes:
        """The one frame of a greeting."""
        return _header(_HELLO, self._encoder.encode(hello))

    def decode(self, frames: Sequence[Frame]) -> tuple[M | EndpointHello, Bytes | MemoryReference | None]:
        """The message and its payload, read-only; raises `FrameError`, and nothing else, if they are malformed."""
        if not frames or len(frames) - 1 > self.most_frames:
            raise FrameError(f"{len(frames)} frames")
        # Bytes are quicker to take apart than views, and all that is small comes as bytes.
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
        """Kind, where the message starts, and the payload's size, if the header agrees with itself and the chunks."""
        size = len(header)
        if not _FIXED.size <= size <= HEADER_LIMIT:
            raise FrameError(f"a header of {size:,} bytes")
        magic, checksum, version, kind, note, count, nbytes = _FIXED.unpack_from(header)
        if magic != MAGIC or version != VERSION:
            raise FrameError(f"not of this protocol, or not of its version {VERSION}")
        start = _FIXED.size + note
        if kind > _HELLO or start > size or nbytes > self.payload_limit:
            raise FrameError("a header that contradicts itself")
        arrived = 0
        for chunk in chunks:
            arrived += len(chunk)
        if count != len(chunks) or arrived != (nbytes if kind == _FRAMES else 0):
            raise FrameError(f"{len(chunks)} frames of {arrived:,} bytes, not as the header says")
        if _checksum(header[_UNCHECKED:], chunks) != checksum:
            raise FrameError("the checksum is wrong")
        return kind, start, nbytes


def as_bytes(payload: Buffer) -> memoryview:
    """A payload as one row of bytes, not copied; refused if it does not lie in one piece."""
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
    """CRC-32 of the header and of each chunk, in order; of a large chunk it is that of its fold."""
    checksum = zlib.crc32(rest)
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum) if len(chunk) < BULK else _folded(chunk, checksum)
    return checksum


def _folded(chunk: Frame, checksum: int) -> int:
    """CRC-32 of the sum of a chunk's rows of 4 KiB, as words of 8 bytes, and of what is left: ten times as fast.

    A change within one row always changes the sum. What escapes are changes in several rows that cancel out.
    """
    whole = len(chunk) // _ROW * _ROW
    rows = np.frombuffer(chunk, dtype="<u8", count=whole // 8).reshape(-1, _ROW // 8)
    return zlib.crc32(chunk[whole:], zlib.crc32(np.add.reduce(rows, axis=0), checksum))


def _joined(chunks: Sequence[Frame], nbytes: int) -> Bytes:
    """The chunks as one array: a view if there is one only, else a copy."""
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
