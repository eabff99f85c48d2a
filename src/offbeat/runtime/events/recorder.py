"""Events of a process, written into a mapped file: no system call, no lock, no waiting.

The file is a header, a table of names and a ring of records of 48 bytes. What a record is about (operation, size, kind
of number, caller …) is written into the table once, and named by its number from then on. The pages belong to the
kernel, so that the last events of a process can be read after it was killed. A record's own number is its last field:
a record that is half written, or written over, is known by it.

Whoever looks on while the run goes keeps what is about to be written over in a second file beside the first.
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

FOLDER = "events"
"""Where a run folder has them."""
_MAGIC = b"offbeat2"
_HEADER = struct.Struct("<8sIIII")
_RECORD = struct.Struct("<IIQdqqQ")
_LENGTH = struct.Struct("<H")
RECORDS = 32768
"""How many events the ring holds: older ones are written over, and counted as dropped if nobody has kept them."""
KEPT = 1_000_000
"""How many events of a process are kept beside its ring; later ones are dropped once they are written over."""
NAMES = 4096
"""How many different things events may be about."""
_SPARE = 512
"""Names that are kept for the time when all others are taken: what is named then is named less exactly."""
MEMBERS = 1 << 16
"""How many workers a group may have."""
_MOST = 1 << 53
"""Beyond any number, step or time that a run comes to, and exact as a float."""
_SLOT = 1024
_TABLE_AT = 64
_RING_AT = _TABLE_AT + NAMES * _SLOT
_SIZE = _RING_AT + RECORDS * _RECORD.size
_FIELDS = np.dtype(
    [
        ("kind", "<u4"),
        ("name", "<u4"),
        ("sequence", "<u8"),
        ("time", "<f8"),
        ("step", "<i8"),
        ("value", "<i8"),
        ("number", "<u8"),
    ]
)


class Mark(IntEnum):
    """What sort of event a record is."""

    ENTER = 1
    """A collective, or a message, is begun, and waited for at once."""
    START = 2
    """It is begun, and not yet waited for."""
    WAIT = 3
    """From here on it is waited for."""
    EXIT = 4
    FAIL = 5
    """The wait ended with an error: what was waited for did not come."""
    STEP = 6
    """An optimizer is about to step; `sequence` counts them."""
    END = 7
    """The program has returned."""
    TURN = 8
    """From here on time is spent on something else: `sequence` is its number in `KINDS`."""
    READ = 9
    """Values of a shard have come to a worker; `value` says how many steps old they are.

    Of parameters in shared memory: a worker has changed what it had read, and `value` others have in the meantime."""
    CHECKPOINT = 10
    FAULT = 11
    """Something that `--disturb` asked for happens now."""
    NAN = 12
    """What this worker is about to give to the others is not finite."""
    LEAVE = 13
    """A worker takes no further part; servers need not wait for it."""
    VIEW = 14
    """A server, or a worker where there are none, knows of a new view: who takes part. `sequence` is its epoch."""
    APPLIED = 15
    """A server has used a worker's push; `sequence` is its number, `step` the step it belongs to."""
    REFUSED = 16
    """It has found it unfit to be used."""
    DUPLICATE = 17
    """It knew it already."""
    LATE = 18
    """Its step was complete without it."""
    PARKED = 19
    """A worker's pull has to wait until others have come further."""
    ANSWERED = 20
    """A worker was sent values that it had asked for."""
    SENT = 21
    """A message of a protocol of ours was sent, which nobody waits for."""
    RECEIVED = 22
    """It has come, and is used."""


_TURN, _STEP = int(Mark.TURN), int(Mark.STEP)
_MARKS = {int(mark): mark for mark in Mark}
KINDS = ("unknown", "input", "computing", "exchanging", "evaluating", "other")
"""What a worker spends time on; `unknown` until anything says more."""
UNKNOWN, INPUT, COMPUTING, EXCHANGING, EVALUATING, OTHER = range(len(KINDS))

Write = Callable[..., None]
_Records = npt.NDArray[np.void]


class About(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a record is about, as the table of names has it."""

    group: str
    operation: str
    members: tuple[int, ...] | int = ()
    """Ranks of the workers in the group; a number: all from 0 up to it."""
    elements: int | None = None
    """How many numbers this worker gives, where all must give the same."""
    dtype: str | None = None
    reduce: str | None = None
    root: int | None = None
    peer: int | None = None
    """With whom a message is exchanged; -1: with anybody. None for collectives."""
    tag: int = 0
    caller: str | None = None
    backward: bool = False
    """Whether DDP asks for it while backward runs, which does not end before it."""
    shard: int | None = None
    """Which part of the parameters; None: all of them."""
    bound: int | None = None
    """Of a pull: how many steps the reader may be ahead of the slowest; None: of no matter how many."""
    spare: int = 0
    """Of a pull: how many workers a step can do without."""
    words: str | None = None
    """What else is to be said: a rule, a reason."""
    servers: tuple[str, ...] = ()
    """Of a view: who serves each shard."""


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """One event that was read back."""

    mark: Mark
    about: About | None
    sequence: int
    time: float
    step: int = 0
    """Which step it belongs to, where that is known."""
    value: int = 0


class Recorder:
    """Writes the events of this process."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._names: dict[Hashable, int] = {}
        self._groups: dict[str, int] = {}
        self.kind = UNKNOWN
        """What time is spent on now: a number in `KINDS`."""
        self.steps = 0
        """How many steps of optimizers there have been."""
        self.sick = False
        """Whether this worker has given something that was not finite: the first time is what matters."""
        self.suspicious = True
        """Whether what it gives next is to be looked at: once in a step is enough."""
        self.open: list[Any] = []
        """Operations that are under way and that nobody may ever wait for in Python: looked at now and then."""
        self.kept: list[Any] = []
        """Groups that were shut down, until the next is made: if DDP's reducer were the last to let go of one, it would
        join its threads with Python's lock held, which those may be waiting for."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w+b") as file:
                file.truncate(_SIZE)
                self._memory = mmap.mmap(file.fileno(), _SIZE)
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error}. Free some space, or omit --monitor.") from error
        self.stamp = _writer(self._memory)
        """Something happens now: what sort of event, what it is about, its number, its step, and one more number."""
        _HEADER.pack_into(self._memory, 0, _MAGIC, os.getpid(), rank, RECORDS, NAMES)

    def group(self, name: str) -> str:
        """The name of a group that is opened now: one opened a second time under a name is another one."""
        self._groups[name] = count = self._groups.get(name, 0) + 1
        return name if count == 1 else f"{name}, opened for the {count}. time"

    def name(self, key: Hashable, about: Callable[[], About]) -> int:
        """The number by which records name a thing; it is described once."""
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
        if number > NAMES or len(text) > _SLOT - _LENGTH.size:
            return 0
        at = _TABLE_AT + (number - 1) * _SLOT
        self._memory[at + _LENGTH.size : at + _LENGTH.size + len(text)] = text
        _LENGTH.pack_into(self._memory, at, len(text))
        self._names[key] = number
        return number

    def turn(self, kind: int) -> int:
        """From now on time is spent on this; answers what it was spent on before."""
        before = self.kind
        if kind != before:
            self.kind = kind
            self.stamp(_TURN, 0, kind)
        return before

    def step(self) -> None:
        """An optimizer is about to step: what it waited for has come."""
        self.look()
        self.steps += 1
        self.suspicious = not self.sick
        self.stamp(_STEP, 0, self.steps)

    def look(self) -> None:
        """Note which of the operations under way have ended in the meantime."""
        for work in list(self.open) if self.open else ():
            work.look()


def _writer(memory: mmap.mmap) -> Write:
    """Writes one record. A closure over what it needs: looking that up would take as long as writing."""
    pack, clock, following = _RECORD.pack_into, time.monotonic, itertools.count(1).__next__

    def stamp(mark: int, name: int = 0, sequence: int = 0, step: int = 0, value: int = 0) -> None:
        number = following()
        pack(memory, _RING_AT + number % RECORDS * 48, mark, name, sequence, clock(), step, value, number)

    return stamp


class Reader:
    """Reads what another process has written, even while it writes; with `kept`, also what was kept of it before."""

    def __init__(self, path: Path, kept: bool = False) -> None:
        try:
            with regular_file(path) as file:
                self._memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
            magic, self.pid, self.rank, records, names = _HEADER.unpack_from(self._memory, 0)
        except (OSError, ValueError, struct.error) as error:
            raise UsageError(f"{path} cannot be read as events: {error}.") from error
        if (magic, records, names) != (_MAGIC, RECORDS, NAMES):
            raise UsageError(f"{path} holds no events that this version of offbeat can read.")
        self.dropped = 0
        """How many events were written over before they were read."""
        self.read = 0
        """How many events were read, or found to be gone."""
        self._path = path
        self._ring = np.frombuffer(self._memory, _FIELDS, RECORDS, _RING_AT)
        self._abouts: dict[int, About | None] = {0: None}
        self._kept = 0
        self._earlier = self._older() if kept else self._ring[:0]

    def _older(self) -> _Records:
        """What somebody has kept while the run went; a last one that is torn is left out."""
        path = kept_file(self._path)
        try:
            raw = read_bytes(path, (KEPT + 2 * RECORDS) * _RECORD.size)
        except FileNotFoundError:
            return self._ring[:0]
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as events: {error}.") from error
        records = np.frombuffer(raw[: len(raw) // _RECORD.size * _RECORD.size], _FIELDS)
        numbers = records["number"].astype(np.int64)
        if len(numbers) and (numbers[0] < 1 or (np.diff(numbers) < 1).any()):
            raise UsageError(f"{path} is damaged: its events are not numbered in their order. Remove it to do without.")
        return records

    @property
    def written(self) -> int:
        """How many events there have been."""
        found = int(self._ring["number"].max())
        if found > _MOST:
            raise UsageError(f"{self._path} is damaged: it says that it holds event {found:,}.")
        return found

    def new(self) -> list[Stamp]:
        """The events since the last call, as far as they are whole."""
        return [
            Stamp(_MARKS[kind], self.about(name), sequence, at, step, value)
            for kind, name, sequence, at, step, value, _ in self.rows().tolist()
        ]

    def rows(self) -> _Records:
        """The same as a numpy table, a column for each field of a record; `about` tells what the names are about."""
        earlier, self._earlier = self._earlier, self._ring[:0]
        found = np.concatenate([self._counted(earlier), self._counted(self._since(self.read))])
        wrong = (found["kind"] < 1) | (found["kind"] > len(_MARKS)) | (found["name"] > NAMES)
        wrong |= (found["sequence"] > _MOST) | ~(np.abs(found["time"]) < _MOST)  # Not finite is not less, either.
        wrong |= (np.abs(found["step"]) > _MOST) | (np.abs(found["value"]) > _MOST)
        if wrong.any():
            bad = found[int(np.argmax(wrong))]
            raise UsageError(f"{self._path} is damaged: its event {bad['number']} is {bad.tolist()}, which cannot be.")
        return found

    def keep(self) -> None:
        """Put aside what may be written over before the run ends; to be called now and then while it goes."""
        if self.written - self._kept < RECORDS // 2 or self._kept > KEPT:
            return
        records = self._since(self._kept)
        # A process that takes another's place counts from 1 again: what was kept of the other would not fit.
        mode = "ab" if self._kept else "wb"
        with suppress(OSError), kept_file(self._path).open(mode) as file:  # They are then dropped, and counted so.
            file.write(records.tobytes())
        self._kept = int(records["number"][-1])

    def _since(self, number: int) -> _Records:
        """Records after this one that are in the ring, up to the last that is whole."""
        written = self.written
        wanted = np.arange(max(number, written - RECORDS) + 1, written + 1)
        records = self._ring[wanted % RECORDS]
        return records[records["number"] == wanted]

    def _counted(self, records: _Records) -> _Records:
        if len(records):
            last = int(records["number"][-1])
            self.dropped += last - self.read - len(records)
            self.read = last
        return records

    def about(self, number: int) -> About | None:
        """What records of this name are about."""
        if number not in self._abouts:
            at = _TABLE_AT + (number - 1) * _SLOT
            (length,) = _LENGTH.unpack_from(self._memory, at)
            text = self._memory[at + _LENGTH.size : at + _LENGTH.size + length]
            try:
                found = msgspec.json.decode(text, type=About)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise UsageError(
                    f"{self._path} is damaged: what its events are about, {text[:80]!r}: {error}."
                ) from error
            if not isinstance(found.members, tuple) and not 0 <= found.members <= MEMBERS:
                raise UsageError(f"{self._path} is damaged: a group of {found.members:,} workers cannot be.")
            self._abouts[number] = found
        return self._abouts[number]


def events_file(folder: Path, rank: int) -> Path:
    """Where a worker's events are, in its run's folder."""
    return folder / FOLDER / f"worker-{rank}.events"


def server_events_file(folder: Path, shard: int, replica: int) -> Path:
    """Where the events of a server are."""
    return folder / FOLDER / f"server-{shard}.{replica}.events"


def kept_file(events: Path) -> Path:
    """Where events are kept that will not stay in a ring."""
    return events.with_suffix(".kept")


def stack_file(folder: Path, rank: int) -> Path:
    """Where a worker says, when asked by a signal, what it is doing."""
    return folder / FOLDER / f"worker-{rank}.stack"


RECORDER: ContextVar[Recorder | None] = ContextVar("offbeat recorder", default=None)
"""Set in the workers of a run that is watched, before their work begins."""
