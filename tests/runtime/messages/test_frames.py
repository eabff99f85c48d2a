"""Messages as frames: what is sent is what is read, and nothing else is read at all."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from frame_support import CODEC, MILLION, Push, Reply, mutated, on_the_wire, originals, resealed
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.runtime.messages.frames import (
    CHUNK,
    HEADER_LIMIT,
    MAGIC,
    Codec,
    EndpointHello,
    FrameError,
    MemoryReference,
    as_bytes,
)


class Stranger(msgspec.Struct, tag=True, frozen=True):
    number: int


LIMITED: Codec[Push | Reply] = Codec(Push | Reply, payload_limit=3 * 1024 * 1024)


# --- what is sent is what is read


@pytest.mark.parametrize("size", [None, 0, 1, 4096, 65_535, 65_536, 100_001, CHUNK, CHUNK + 1, 3 * CHUNK + 12_345])
def test_a_message_and_its_payload_come_back(size: int | None) -> None:
    payload = None if size is None else np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    frames = CODEC.encode(Push("worker 1", 3, (0.5, float("inf"))), payload)
    assert len(frames) == 1 + (0 if size is None else -(-size // CHUNK))
    message, found = CODEC.decode(on_the_wire(frames))
    assert message == Push("worker 1", 3, (0.5, float("inf")))
    if payload is None:
        assert found is None
    else:
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.uint8
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, payload)


@given(st.builds(Push, st.text(), st.integers(-(2**63), 2**64 - 1)), st.none() | st.binary())
def test_any_message_comes_back(message: Push, payload: bytes | None) -> None:
    found, numbers = CODEC.decode(on_the_wire(CODEC.encode(message, payload)))
    assert found == message
    assert (None if numbers is None else bytes(numbers)) == payload  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.int64, np.bool_])
def test_a_payload_of_any_numbers_is_its_bytes(dtype: Any) -> None:
    numbers = np.arange(600).astype(dtype).reshape(20, 30)
    _, found = CODEC.decode(on_the_wire(CODEC.encode(Reply(1), numbers)))
    np.testing.assert_array_equal(found.view(dtype), numbers.reshape(-1))  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def test_the_frames_of_a_payload_are_views_of_it() -> None:
    payload = np.zeros(2 * CHUNK, dtype=np.uint8)
    frames = CODEC.encode(Reply(1), payload)
    assert all(np.shares_memory(np.asarray(frame), payload) for frame in frames[1:])


def test_a_payload_in_one_frame_is_not_copied_when_read() -> None:
    header, chunk = CODEC.encode(Reply(1), np.arange(CHUNK, dtype=np.uint8))
    _, found = CODEC.decode([header, chunk])
    assert np.shares_memory(found, np.asarray(chunk))  # pyright: ignore[reportArgumentType]


def test_references_and_greetings_come_back() -> None:
    reference = MemoryReference("12:7:4096", 3, 100, 2000)
    assert CODEC.decode([CODEC.encode_reference(Reply(1), reference)]) == (Reply(1), reference)
    hello = EndpointHello("abc", 12, 99, True)
    assert CODEC.decode([CODEC.encode_hello(hello)]) == (hello, None)


# --- what cannot be sent is refused before


def test_what_cannot_be_sent_is_told_to_the_sender() -> None:
    with pytest.raises(UsageError, match=r"Stranger is not a message of this codec, which knows: Push, Reply"):
        CODEC.encode(Stranger(1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match=r"3,145,729 bytes cannot be sent: the limit is 3,145,728"):
        LIMITED.encode(Reply(1), bytes(3 * 1024 * 1024 + 1))
    with pytest.raises(UsageError, match="belong in the payload"):
        CODEC.encode(Push("w" * HEADER_LIMIT, 1))
    with pytest.raises(UsageError, match="contiguous"):
        CODEC.encode(Reply(1), np.arange(10)[::2])
    with pytest.raises(UsageError, match="contiguous"):
        as_bytes("text")  # pyright: ignore[reportArgumentType]


# --- nothing else is read


def malformed() -> Iterator[tuple[str, list[bytes]]]:
    header, *chunks = on_the_wire(CODEC.encode(Push("worker 1", 3), bytes(range(100))))
    plain = CODEC.encode(Reply(1))[0]
    yield "nothing", []
    yield "an empty frame", [b""]
    yield "a short header", [plain[:23]]
    yield "no message", [resealed(plain[:24])]
    yield "another magic word", [b"ffob" + plain[4:]]
    yield "another version", [resealed(plain[:8] + b"\x02" + plain[9:])]
    yield "an unknown kind", [resealed(plain[:9] + b"\x04" + plain[10:])]
    yield "a wrong checksum", [plain[:4] + bytes(4) + plain[8:]]
    yield "more after the message", [resealed(plain + b"\x00")]
    yield "a header over the limit", [resealed(plain + bytes(HEADER_LIMIT))]
    yield "a note longer than the header", [resealed(plain[:10] + b"\xff\xff" + plain[12:])]
    yield "no payload where one is announced", [header]
    yield "a frame too many", [header, *chunks, b""]
    yield "a byte of the payload changed", [header, b"\x01" + chunks[0][1:]]
    yield "a byte of the payload missing", [header, chunks[0][:-1]]
    yield "a payload in more frames than said", [header, chunks[0][:50], chunks[0][50:]]
    yield "a payload where none is announced", [plain, b"x"]
    yield "a message of another codec", on_the_wire(Codec(Stranger).encode(Stranger(1)))
    yield "a greeting that is none", [resealed(plain[:9] + b"\x03" + plain[10:])]
    yield "a reference that is none", [resealed(plain[:9] + b"\x02" + plain[10:])]
    shared = CODEC.encode_reference(Reply(1), MemoryReference("1:2:3", 1, 0, 10))
    yield "a reference of another size", [resealed(shared[:16] + struct.pack("<Q", 11) + shared[24:])]
    before = CODEC.encode_reference(Reply(1), MemoryReference("1:2:3", 1, -1, 10))
    yield "a reference before its memory", [before]


@pytest.mark.parametrize(
    ("what", "frames"), list(malformed()), ids=lambda value: value if isinstance(value, str) else "-"
)
def test_malformed_frames_are_refused(what: str, frames: list[bytes]) -> None:
    with pytest.raises(FrameError):
        CODEC.decode(frames)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_noise_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(FrameError):
        CODEC.decode(frames)


@given(
    kind=st.integers(0, 255),
    note=st.integers(0, 2**16 - 1),
    count=st.integers(0, 2**32 - 1),
    nbytes=st.integers(0, 2**64 - 1),
    rest=st.binary(max_size=300),
    chunks=st.lists(st.binary(max_size=50), max_size=3),
    agrees=st.booleans(),
)
def test_headers_with_right_checksums_and_anything_else_raise_nothing_but_frame_errors(
    kind: int, note: int, count: int, nbytes: int, rest: bytes, chunks: list[bytes], agrees: bool
) -> None:
    if agrees:
        kind, note, count, nbytes = kind % 4, note % (len(rest) + 1), len(chunks), sum(map(len, chunks))
    header = struct.pack("<4sIBBHIQ", MAGIC, 0, 1, kind, note, count, nbytes) + rest
    try:
        CODEC.decode([resealed(header, b"".join(chunks)), *chunks])
    except FrameError:
        return


def test_nothing_is_allocated_by_what_a_header_claims() -> None:
    plain = CODEC.encode(Reply(1))[0]
    huge = [
        [resealed(plain[:9] + b"\x01\x00\x00" + struct.pack("<IQ", 256, 2**30) + plain[24:])],
        [resealed(plain[:24] + b"\x82\xa4type\xa4Push\xa7weights\xdd\x7f\xff\xff\xff")],
        [resealed(plain[:24] + b"\x82\xa4type\xa4Push\xa6worker\xdb\x7f\xff\xff\xff")],
        [resealed(plain[:24] + b"\x82\xa4type\xa5Reply\xa4more\xdf\x7f\xff\xff\xff")],
        [resealed(plain[:24] + b"\x82\xa4type\xa5Reply\xa4more\x81\xa1x" + b"\x91" * 50_000)],
    ]
    tracemalloc.start()
    try:
        for frames in huge:
            with pytest.raises(FrameError):
                CODEC.decode(frames)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


# --- mutations in bulk


def refusals(count: int, chance: random.Random) -> tuple[int, int]:
    """How many of so many mutations were refused, and how many were no mutations after all."""
    valid = originals()
    refused = same = 0
    for _ in range(count):
        frames = mutated(chance.choice(valid), valid, chance)
        if frames in valid:
            same += 1
            continue
        try:
            CODEC.decode(frames)
        except FrameError:
            refused += 1
    return refused, same


@pytest.mark.parametrize("count", [20_000, pytest.param(MILLION, marks=pytest.mark.slow)])
def test_mutated_frames_are_all_refused_in_constant_memory(count: int) -> None:
    chance = random.Random(count)
    refusals(1_000, chance)
    tracemalloc.start()
    try:
        refusals(1_000, chance)
        before = tracemalloc.get_traced_memory()[0]
        refusals(1_000, chance)
        assert tracemalloc.get_traced_memory()[0] - before < 16 * 1024
    finally:
        tracemalloc.stop()
    refused, same = refusals(count, chance)
    assert refused + same == count
    assert same < count / 100
