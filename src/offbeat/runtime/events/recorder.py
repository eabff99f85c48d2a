"""Events of a process in a memory-mapped file: no system call, no lock, no waiting.

The file has a header, a table of names and a ring of 48-byte records. What a record is about (operation, size, dtype,
caller …) is written into the table once, and then referred to by number. The kernel owns the pages, so the last events
of a killed process can still be read. The last field of a record is its own number, which exposes records that are
partially written or overwritten.

A live monitor saves records that are about to be overwritten to a second file.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from offbeat.errors import OutputError, UsageError
from offbeat.runtime.run.untrusted_files import read_bytes, regular_file

FOLDER = "events"  # Subfolder of a run folder.
_MAGIC = b"offbeat2"
_HEADER = struct.Struct("<8sIIII")
_RECORD = struct.Struct("<IIQdqqQ")
_LENGTH = struct.Struct("<H")
RECORDS = 32768  # Events in the ring: older ones are overwritten, and count as dropped unless a monitor kept them.
KEPT = 1_000_000  # Events kept per process beside its ring; later ones are dropped once overwritten.
NAMES = 4096  # Size of the table of names.
_SPARE = 512  # Names reserved for when all others are taken; those are less detailed.
MEMBERS = 1 << 16  # Most workers in a group.
_MOST = 1 << 53  # Larger than any number, step or time of a run, and exact as a float.
_SLOT = 1024
_TABLE_AT = 64
RING_AT = _TABLE_AT + NAMES * _SLOT
_SIZE = RING_AT + RECORDS * _RECORD.size
FIELDS = np.dtype(
    [
        ("kind", "<u4"), ("name", "<u4"), ("sequence", "<u8"), ("time", "<f8"), ("step", "<i8"), ("value", "<i8"),
        ("number", "<u8"),
    ]
)  # fmt: skip


class Mark(IntEnum):
    """Kinds of events."""

    ENTER = 1  # A collective or message starts, and is waited for at once.
    START = 2  # It starts, and is not waited for yet.
    WAIT = 3  # The wait for it starts.
    EXIT = 4
    FAIL = 5  # The wait ended with an error.
    STEP = 6  # An optimizer is about to step; `sequence` counts them.
    END = 7  # The program has returned.
    TURN = 8  # Time is spent on something else from here on: `sequence` is its number in `KINDS`.
    READ = 9
    """Values of a shard have reached a worker; `value` is their staleness in steps.

    For parameters in shared memory: a worker has updated what it had read, after `value` updates by others."""
    CHECKPOINT = 10
    FAULT = 11  # An injected fault happens.
    NAN = 12  # This worker is about to send values that are not finite.
    LEAVE = 13  # A worker leaves; servers need not wait for it.
    VIEW = 14  # A server, or a worker where there are none, has a new view. `sequence` is its epoch.
    APPLIED = 15  # A server has applied a push; `sequence` is its number, `step` its step.
    REFUSED = 16  # The server refused the push as unfit.
    DUPLICATE = 17  # The server had the push already.
    LATE = 18  # The step of the push was complete without it.
    PARKED = 19  # A worker's pull must wait for slower workers.
    ANSWERED = 20  # Requested values were sent to a worker.
    SENT = 21  # A one-way message of our protocols was sent.
    RECEIVED = 22  # It has arrived and is used.
    COMPUTED = 23  # A stage of a pipeline has computed; `sequence` is the microbatch, `value` how long, in nanoseconds.


_TURN, _STEP = int(Mark.TURN), int(Mark.STEP)
_MARKS = {int(mark): mark for mark in Mark}
KINDS = ("unknown", "input", "computing", "exchanging", "evaluating", "other", "wait")
"""What a worker spends time on."""
UNKNOWN, INPUT, COMPUTING, EXCHANGING, EVALUATING, OTHER, WAITING = range(len(KINDS))

Write = Callable[..., None]
RecordTable = npt.NDArray[np.void]


class About(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a record is about: an entry of the table of names."""

    group: str
    operation: str
    members: tuple[int, ...] | int = ()  # Ranks in the group; a number n means 0 to n - 1.
    elements: int | None = None  # Elements in this worker's input, where all must match.
    dtype: str | None = None
    reduce: str | None = None
    root: int | None = None
    peer: int | None = None  # The other end of a message; -1: any source. None for collectives.
    tag: int = 0
    caller: str | None = None
    backward: bool = False  # Whether DDP issues it during backward, which does not end before it.
    shard: int | None = None  # Which shard of the parameters; None: all.
    bound: int | None = None  # For a pull: how many steps the reader may be ahead of the slowest; None: unlimited.
    spare: int = 0  # For a pull: how many workers a step can do without.
    words: str | None = None  # Free text: a rule, a reason.
    servers: tuple[str, ...] = ()  # For a view: the primary of each shard.


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """One event, read back."""

    mark: Mark
    about: About | None
    sequence: int
    time: float
    step: int = 0  # Its step, if known.
    value: int = 0


class Recorder:
    """Records the events of this process."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._names: dict[Hashable, int] = {}
        self._groups: dict[str, int] = {}
        self.kind = UNKNOWN  # What time is spent on now: an index into `KINDS`.
        self.steps = 0  # Optimizer steps so far.
        self.sick = False  # Whether this worker has sent values that are not finite: only the first time matters.
        self.suspicious = True  # Whether to check the next input: once per step is enough.
        self.open: list[Any] = []  # Operations in flight that Python may never wait for: polled now and then.
        self.kept: list[Any] = []
        """Groups that were shut down, until the next is made: if DDP's reducer dropped the last reference to one, it
        would join its threads while holding Python's lock, which those may need."""
        self._memory = create(path, os.getpid(), rank)
        self.stamp = _writer(self._memory)  # Records an event: its kind, name, sequence number, step and value.

    def group(self, name: str) -> str:
        """A unique name for a new group: one opened a second time under a name is another group."""
        self._groups[name] = count = self._groups.get(name, 0) + 1
        return name if count == 1 else f"{name}, opened for the {count}. time"

    def name(self, key: Hashable, about: Callable[[], About]) -> int:
        """The number by which records refer to `about()`, which is described once."""
        known = self._names.get(key)
        return known if known is not None else self._add(key, about())

    def _add(self, key: Hashable, about: About) -> int:
        number = len(self._names) + 1
        if number > NAMES - _SPARE:
            about = msgspec.structs.replace(about, elements=None, caller=None)
            key = about
            if key in self._names:
                return self._names[key]
        text = msgspec.json.encode(about)
        if number > NAMES or not write_name(self._memory, number, text):
            return 0
        self._names[key] = number
        return number

    def turn(self, kind: int) -> int:
        """Time is spent on this from now on; returns the previous kind."""
        before = self.kind
        if kind != before:
            self.kind = kind
            self.stamp(_TURN, 0, kind)
        return before

    def step(self) -> None:
        """Record that an optimizer is about to step."""
        self.look()
        self.steps += 1
        self.suspicious = not self.sick
        self.stamp(_STEP, 0, self.steps)

    def look(self) -> None:
        """Record which operations in flight have ended."""
        for work in list(self.open) if self.open else ():
            work.look()


def create(path: Path, pid: int, rank: int) -> mmap.mmap:
    """A new events file of a process, mapped."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.truncate(_SIZE)
            memory = mmap.mmap(file.fileno(), _SIZE)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error}. Free some space, or omit --monitor.") from error
    _HEADER.pack_into(memory, 0, _MAGIC, pid, rank, RECORDS, NAMES)
    return memory


def write_name(memory: mmap.mmap, number: int, text: bytes) -> bool:
    """Write an entry of the table of names; False if it is too long."""
    if len(text) > _SLOT - _LENGTH.size:
        return False
    at = _TABLE_AT + (number - 1) * _SLOT
    memory[at + _LENGTH.size : at + _LENGTH.size + len(text)] = text
    _LENGTH.pack_into(memory, at, len(text))
    return True


def _writer(memory: mmap.mmap) -> Write:
    """A function that writes one record; a closure, because attribute look-ups would take as long as the write."""
    pack, clock, following = _RECORD.pack_into, time.monotonic, itertools.count(1).__next__

    def stamp(mark: int, name: int = 0, sequence: int = 0, step: int = 0, value: int = 0) -> None:
        number = following()
        pack(memory, RING_AT + number % RECORDS * 48, mark, name, sequence, clock(), step, value, number)

    return stamp


class Reader:
    """Reads the events of another process, even while it writes; with `kept`, also the saved ones."""

    def __init__(self, path: Path, kept: bool = False) -> None:
        try:
            with regular_file(path) as file:
                self._memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
            magic, self.pid, self.rank, records, names = _HEADER.unpack_from(self._memory, 0)
        except (OSError, ValueError, struct.error) as error:
            raise UsageError(f"{path} cannot be read as events: {error}.") from error
        if (magic, records, names) != (_MAGIC, RECORDS, NAMES):
            raise UsageError(f"{path} holds no events that this version of offbeat can read.")
        self.shift = 0.0  # How far the clock of its times is ahead of the reader's, in seconds.
        self.dropped = 0  # Events that were overwritten before they were read.
        self.read = 0  # Events read or found missing.
        self._path = path
        self._ring = np.frombuffer(self._memory, FIELDS, RECORDS, RING_AT)
        self._abouts: dict[int, About | None] = {0: None}
        self._kept = 0
        self._earlier = self._older() if kept else self._ring[:0]

    def _older(self) -> RecordTable:
        """The saved events; a torn last one is omitted."""
        path = kept_file(self._path)
        try:
            raw = read_bytes(path, (KEPT + 2 * RECORDS) * _RECORD.size)
        except FileNotFoundError:
            return self._ring[:0]
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as events: {error}.") from error
        records = np.frombuffer(raw[: len(raw) // _RECORD.size * _RECORD.size], FIELDS)
        numbers = records["number"].astype(np.int64)
        if len(numbers) and (numbers[0] < 1 or (np.diff(numbers) < 1).any()):
            raise UsageError(f"{path} is damaged: its events are not numbered in their order. Remove it to do without.")
        return records

    @property
    def written(self) -> int:
        """Number of events so far."""
        last = int(self._ring["number"].max())
        if last > _MOST:
            raise UsageError(f"{self._path} is damaged: it says that it holds event {last:,}.")
        return last

    def new(self) -> list[Stamp]:
        """The complete events since the last call."""
        return [
            Stamp(_MARKS[kind], self.about(name), sequence, at, step, value)
            for kind, name, sequence, at, step, value, _ in self.rows().tolist()
        ]

    def rows(self) -> RecordTable:
        """The same as a numpy table with a column per field; `about` resolves the names."""
        earlier, self._earlier = self._earlier, self._ring[:0]
        rows = np.concatenate([self._counted(earlier), self._counted(self.since(self.read))])
        wrong = (rows["kind"] < 1) | (rows["kind"] > len(_MARKS)) | (rows["name"] > NAMES)
        wrong |= (rows["sequence"] > _MOST) | ~(np.abs(rows["time"]) < _MOST)  # Also true for NaN.
        wrong |= (np.abs(rows["step"]) > _MOST) | (np.abs(rows["value"]) > _MOST)
        if wrong.any():
            bad = rows[int(np.argmax(wrong))]
            raise UsageError(f"{self._path} is damaged: its event {bad['number']} is {bad.tolist()}, which cannot be.")
        if self.shift:
            rows["time"] -= self.shift
        return rows

    def keep(self) -> None:
        """Save records that may be overwritten before the run ends; call it now and then."""
        if self.written - self._kept < RECORDS // 2 or self._kept > KEPT:
            return
        records = self.since(self._kept)
        # A replacement process counts from 1 again: the saved records of the other would not fit.
        mode = "ab" if self._kept else "wb"
        with suppress(OSError), kept_file(self._path).open(mode) as file:  # They then count as dropped.
            file.write(records.tobytes())
        self._kept = int(records["number"][-1])

    def since(self, number: int) -> RecordTable:
        """The complete records in the ring after this one."""
        written = self.written
        numbers = np.arange(max(number, written - RECORDS) + 1, written + 1)
        records = self._ring[numbers % RECORDS]
        return records[records["number"] == numbers]

    def _counted(self, records: RecordTable) -> RecordTable:
        if len(records):
            last = int(records["number"][-1])
            self.dropped += last - self.read - len(records)
            self.read = last
        return records

    def text(self, number: int) -> bytes:
        """The entry of this number in the table of names."""
        at = _TABLE_AT + (number - 1) * _SLOT
        (length,) = _LENGTH.unpack_from(self._memory, at)
        return self._memory[at + _LENGTH.size : at + _LENGTH.size + length]

    def about(self, number: int) -> About | None:
        """What records of this name are about."""
        if number not in self._abouts:
            text = self.text(number)
            try:
                about = msgspec.json.decode(text, type=About)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise UsageError(
                    f"{self._path} is damaged: what its events are about, {text[:80]!r}: {error}."
                ) from error
            if not isinstance(about.members, tuple) and not 0 <= about.members <= MEMBERS:
                raise UsageError(f"{self._path} is damaged: a group of {about.members:,} workers is impossible.")
            self._abouts[number] = about
        return self._abouts[number]


def events_file(folder: Path, rank: int) -> Path:
    """The events of a worker, in a run folder."""
    return folder / FOLDER / f"worker-{rank}.events"


def server_events_file(folder: Path, shard: int, replica: int) -> Path:
    """The events of a server."""
    return folder / FOLDER / f"server-{shard}.{replica}.events"


def kept_file(events: Path) -> Path:
    """The saved events that no longer fit the ring."""
    return events.with_suffix(".kept")


def stack_file(folder: Path, rank: int) -> Path:
    """The stack that a worker dumps on a signal."""
    return folder / FOLDER / f"worker-{rank}.stack"


RECORDER: ContextVar[Recorder | None] = ContextVar("offbeat recorder", default=None)
"""Set in the processes of a watched run before their work begins."""
