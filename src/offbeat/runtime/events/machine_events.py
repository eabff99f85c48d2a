"""The events of all processes of this machine, read for a monitor on another one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from offbeat.errors import UsageError
from offbeat.protocols.causality.forwarder import (
    Continue,
    Position,
    ProcessPulse,
    ReadRecords,
    Records,
    RecordsRead,
    StackReply,
    StackRequest,
)
from offbeat.protocols.machine import Name, Payload
from offbeat.runtime.events.process_state import seconds_without_core, stacks_of, state_of
from offbeat.runtime.events.recorder import FIELDS, FOLDER, Reader, RecordTable, stack_file

MOST_RECORDS: Final = 1024  # In a batch: 48 KiB.
MOST_NAMES: Final = 40  # New names in a batch, of 1 KiB at most: a message's header has 64 KiB.


class _Followed:
    """One events file, and how far it was read."""

    def __init__(self, name: Name, path: Path) -> None:
        self.name, self.path = name, path
        self.inode = path.stat().st_ino
        self.reader = Reader(path)
        self.number = 0
        self._sent: set[int] = set()  # Names that were sent.

    def batches(self, most: int) -> list[tuple[Records, Payload]]:
        """The next records, at most so many, in batches of consecutive ones."""
        rows = self.reader.since(self.number)[:most]
        batches: list[tuple[Records, Payload]] = []
        gaps = np.flatnonzero(np.diff(rows["number"].astype(np.int64)) != 1) + 1
        for part in np.split(rows, gaps):
            while len(part):
                count, names = self._fitting(part)
                first, text = int(part["number"][0]), part[:count].tobytes()
                batch = Records(0, 0, self.name, self.reader.pid, first, count, names)
                batches.append((batch, Payload(len(text), text)))
                self.number, part = first + count - 1, part[count:]
        return batches

    def _fitting(self, rows: RecordTable) -> tuple[int, tuple[tuple[int, bytes], ...]]:
        """How many of the first records fit a batch, and the names that they need."""
        count = min(len(rows), MOST_RECORDS)
        used, at = np.unique(rows["name"][:count], return_index=True)
        fresh = sorted((int(i), int(name)) for name, i in zip(used, at, strict=True) if name and name not in self._sent)
        if len(fresh) > MOST_NAMES:
            count = fresh[MOST_NAMES][0]
        numbers = [name for i, name in fresh if i < count]
        self._sent.update(numbers)
        return count, tuple((number, self.reader.text(number)) for number in numbers)

    @property
    def left(self) -> int:
        """Number of records that were not read yet."""
        return max(0, self.reader.written - self.number)

    def pulse(self) -> ProcessPulse:
        """What is known of the process. Its end is looked up first: then what it has written is final."""
        state = state_of(self.reader.pid)
        ended = state is None or state.main in ("Z", "X")
        birth, written = self.reader.pid, self.reader.written
        if state is None or ended:
            return ProcessPulse(self.name, birth, written, ended=True)
        waited = seconds_without_core(birth)
        return ProcessPulse(self.name, birth, written, False, state.main, state.ticks, state.stopped, waited)


class MachineEvents:
    """The events files of a folder, followed as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._followed: dict[Name, _Followed] = {}
        self._continue: dict[Name, Position] = {}

    def do(self, work: object, _token: object = None) -> RecordsRead | StackReply | None:
        """Do the work of a `Forwarder`."""
        match work:
            case ReadRecords(most=most, pulse=pulse):
                return self._read(most, pulse)
            case Continue(positions=positions):
                self._continue = {position.process: position for position in positions}
            case StackRequest(processes=names):
                return StackReply(self._stacks(names))
            case _:
                pass
        return None

    def _read(self, most: int, pulse: bool) -> RecordsRead:
        room = most // FIELDS.itemsize
        batches: list[tuple[Records, Payload]] = []
        for path in sorted((self._folder / FOLDER).glob("*.events")):
            followed = self._follow(path)
            # Processes take turns: a busy one must not keep the others' events back.
            if followed is not None and room > 0:
                some = followed.batches(min(room, 4 * MOST_RECORDS))
                room -= sum(batch.count for batch, _ in some)
                batches += some
        pulses = tuple(followed.pulse() for followed in self._followed.values()) if pulse else ()
        return RecordsRead(tuple(batches), pulses, sum(followed.left for followed in self._followed.values()))

    def _follow(self, path: Path) -> _Followed | None:
        """The file; if another process has taken its writer's place, once all of the first has been read."""
        name = path.stem.replace("-", " ", 1)
        followed = self._followed.get(name)
        with suppress(UsageError, OSError):  # It has not begun yet.
            if followed is None or (followed.left == 0 and path.stat().st_ino != followed.inode):
                followed = self._followed[name] = _Followed(name, path)
                known = self._continue.get(name)
                if known is not None and known.birth == followed.reader.pid:
                    followed.number = known.number
        return followed

    def _stacks(self, names: Sequence[Name]) -> dict[Name, str]:
        pids = {name: self._followed[name].reader.pid for name in names if name in self._followed}
        return stacks_of({name: (pid, stack_file(self._folder, _rank(name))) for name, pid in pids.items()})


def _rank(name: Name) -> int:
    return int(name.partition(" ")[2])
