"""Events of a process, written into a mapped file: no system call, no lock, no waiting.

The file is a header, a table of names and a ring of records of 32 bytes. What a record is about (operation, size, kind
of number, caller …) is written into the table once, and named by its number from then on. The pages belong to the
kernel, so that the last events of a process can be read after it was killed. A record's own number is its last field:
a record that is half written, or written over, is known by it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from offbeat.errors import OutputError, UsageError

FOLDER = "events"
"""Where a run folder has them."""
_MAGIC = b"offbeat1"
_HEADER = struct.Struct("<8sIIIIQ")
_RECORD = struct.Struct("<IIQdQ")
_COUNT = struct.Struct("<Q")
_COUNT_AT = _HEADER.size - _COUNT.size
_LENGTH = struct.Struct("<H")
RECORDS = 32768
"""How many events the ring holds: older ones are written over, and counted as dropped."""
NAMES = 4096
"""How many different things events may be about."""
_SPARE = 512
"""Names that are kept for the time when all others are taken: what is named then is named less exactly."""
_SLOT = 1024
_TABLE_AT = 64
_RING_AT = _TABLE_AT + NAMES * _SLOT
_SIZE = _RING_AT + RECORDS * _RECORD.size
_FIELDS = np.dtype([("kind", "<u4"), ("name", "<u4"), ("sequence", "<u8"), ("time", "<f8"), ("number", "<u8")])


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
    """An optimizer is about to step."""
    END = 7
    """The program has returned."""


class About(msgspec.Struct, frozen=True, omit_defaults=True):
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


class Stamp(msgspec.Struct, frozen=True):
    """One event that was read back."""

    mark: Mark
    about: About | None
    sequence: int
    time: float


class Recorder:
    """Writes the events of this process."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._names: dict[Hashable, int] = {}
        self._groups: dict[str, int] = {}
        self._numbers = itertools.count(1)
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
            raise OutputError(f"{path} cannot be written: {error}. Free some space, or leave --watch away.") from error
        _HEADER.pack_into(self._memory, 0, _MAGIC, os.getpid(), rank, RECORDS, NAMES, 0)

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

    def stamp(self, mark: Mark, name: int = 0, sequence: int = 0) -> None:
        """Something happens now."""
        number = next(self._numbers)
        at = _RING_AT + (number - 1) % RECORDS * 32
        _RECORD.pack_into(self._memory, at, mark, name, sequence, time.monotonic(), number)
        _COUNT.pack_into(self._memory, _COUNT_AT, number)

    def step(self) -> None:
        """An optimizer is about to step: what it waited for has come."""
        self.look()
        self.stamp(Mark.STEP)

    def look(self) -> None:
        """Note which of the operations under way have ended in the meantime."""
        if self.open:
            for work in list(self.open):
                work.look()


class Reader:
    """Reads what another process has written, even while it writes."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
            magic, self.pid, self.rank, records, names, _ = _HEADER.unpack_from(self._memory, 0)
        except (OSError, ValueError, struct.error) as error:
            raise UsageError(f"{path} cannot be read as events: {error}.") from error
        if (magic, records, names) != (_MAGIC, RECORDS, NAMES):
            raise UsageError(f"{path} holds no events that this version of offbeat can read.")
        self.dropped = 0
        """How many events were written over before they were read."""
        self.read = 0
        """How many events were read, or found to be gone."""
        self._abouts: dict[int, About | None] = {0: None}

    @property
    def written(self) -> int:
        """How many events there have been."""
        return _COUNT.unpack_from(self._memory, _COUNT_AT)[0]

    def new(self) -> list[Stamp]:
        """The events since the last call, as far as they are whole."""
        return [
            Stamp(Mark(kind), self.about(name), sequence, at) for kind, name, sequence, at, _ in self.rows().tolist()
        ]

    def rows(self) -> Any:
        """The same as a numpy table with the columns kind, name, sequence, time, number; `about` tells the names."""
        first = max(self.read, self.written - RECORDS) + 1
        ring = np.frombuffer(self._memory, _FIELDS, RECORDS, _RING_AT)
        wanted = np.arange(first, self.written + 1)
        found = ring[(wanted - 1) % RECORDS]
        whole = found["number"] == wanted
        fresh = len(whole) - int(whole[::-1].argmax()) if whole.any() else 0
        self.dropped += first - 1 - self.read + int(fresh - whole[:fresh].sum())
        self.read = first - 1 + fresh
        return found[:fresh][whole[:fresh]]

    def about(self, number: int) -> About | None:
        """What records of this name are about."""
        if number not in self._abouts:
            at = _TABLE_AT + (number - 1) * _SLOT
            (length,) = _LENGTH.unpack_from(self._memory, at)
            text = self._memory[at + _LENGTH.size : at + _LENGTH.size + length]
            self._abouts[number] = msgspec.json.decode(text, type=About)
        return self._abouts[number]


def events_file(folder: Path, rank: int) -> Path:
    """Where a worker's events are, in its run's folder."""
    return folder / FOLDER / f"worker-{rank}.events"


def stack_file(folder: Path, rank: int) -> Path:
    """Where a worker says, when asked by a signal, what it is doing."""
    return folder / FOLDER / f"worker-{rank}.stack"


RECORDER: ContextVar[Recorder | None] = ContextVar("offbeat recorder", default=None)
"""Set in the workers of a run that is watched, before their work begins."""
