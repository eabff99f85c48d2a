"""Messages for tests of the wire, and ways to mutate their frames."""

from __future__ import annotations

import random
import zlib
from typing import Any

import msgspec

from offbeat.runtime.messages.frames import (
    Codec,
    EndpointHello,
    MemoryReference,
)


class Push(msgspec.Struct, tag=True, frozen=True):
    worker: str
    number: int
    weights: tuple[float, ...] = ()


class Reply(msgspec.Struct, tag=True, frozen=True):
    number: int
    more: dict[str, Any] = {}


CODEC: Codec[Push | Reply] = Codec(Push | Reply)


MILLION = 1_000_000


def on_the_wire(frames: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def resealed(header: bytes, payload: bytes = b"") -> bytes:
    """A header whose checksum is right whatever else is wrong: what somebody would send who means ill."""
    checksum = zlib.crc32(payload, zlib.crc32(header[8:]))
    return header[:4] + checksum.to_bytes(4, "little") + header[8:]


def originals() -> list[list[bytes]]:
    return [
        on_the_wire(frames)
        for frames in (
            CODEC.encode(Push("worker 1", 3, (1.0, 2.0))),
            CODEC.encode(Reply(7, {"loss": 0.5, "names": ["a", "b"]})),
            CODEC.encode(Push("worker 2", 9), random.Random(1).randbytes(64)),
            CODEC.encode(Reply(8), random.Random(2).randbytes(2000)),
            [CODEC.encode_reference(Push("worker 3", 1), MemoryReference("123:7:8192", 1, 4096, 4096))],
            [CODEC.encode_hello(EndpointHello("0123456789abcdef", 123, 2**62, True))],
        )
    ]


def mutated(frames: list[bytes], others: list[list[bytes]], chance: random.Random) -> list[bytes]:
    """Frames changed in one of seven ways: bits, bytes, truncation, splices, and wrong counts."""
    number = chance.randrange(len(frames))
    old = frames[number]
    way = chance.randrange(7)
    if way == 0:
        place, bit = divmod(chance.randrange(8 * len(old)), 8)
        new = old[:place] + bytes((old[place] ^ 1 << bit,)) + old[place + 1 :]
    elif way == 1:
        place = chance.randrange(len(old))
        new = old[:place] + chance.randbytes(4) + old[place + 4 :]
    elif way == 2:
        new = old[: chance.randrange(len(old))]
    elif way == 3:
        other = chance.choice(chance.choice(others))
        new = old[: chance.randrange(len(old))] + other[chance.randrange(len(other)) :]
    elif way == 4:
        return [*frames, chance.choice(others)[0]]
    elif way == 5:
        return frames[:number] + frames[number + 1 :]
    else:
        new = old + chance.randbytes(chance.randrange(1, 9))
    return [*frames[:number], new, *frames[number + 1 :]]
