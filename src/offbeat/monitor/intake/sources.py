"""Where a monitor's events come from: the files of this machine, or copies of those of other machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from offbeat.errors import UsageError
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.machine import Name
from offbeat.runtime.events.process_state import ProcessState, seconds_without_core, stacks_of, state_of
from offbeat.runtime.events.recorder import FOLDER, Reader, Stamp, events_file, stack_file


class EventBatch(NamedTuple):
    """The events of a process since the last look."""

    process: Name
    stamps: Sequence[Stamp]
    dropped: int = 0  # Number of events before them that were lost.
    reborn: bool = False  # Whether another process has taken its place, whose first events these are.


class EventSource(Protocol):
    """Events of some processes in their order, and facts about those processes."""

    def batches(self) -> Iterator[EventBatch]:
        """What has been recorded since the last call."""
        ...

    def state(self, process: Name) -> ProcessState | None:
        """What the kernel says of a process; None if nothing is known."""
        ...

    def without_core(self, process: Name) -> float | None:
        """Seconds that its threads were ready to run and had no core; None if unknown."""
        ...

    def stacks(self, processes: Sequence[Name]) -> dict[Name, str]:
        """The stacks of processes, of those that answer."""
        ...

    def known_until(self, process: Name, now: float) -> float:
        """The time up to which everything that a process has recorded was in a batch."""
        ...

    def is_complete(self, process: Name) -> bool:
        """Whether everything that a process that has ended had recorded was in a batch, or is lost."""
        ...


class FolderSource:
    """The events files of a run folder: memory that processes of this machine write, or copies over a link."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self._workers = folder, workers
        self._readers: dict[Name, Reader] = {}
        self._files: dict[Name, int] = {}
        self.shifts: dict[Name, float] = {}  # How far the clock of each process is ahead of ours, unless it is ours.
        (folder / FOLDER).mkdir(exist_ok=True)
        for file in (folder / FOLDER).glob("*-*.*"):
            file.unlink(missing_ok=True)

    def batches(self) -> Iterator[EventBatch]:
        """What has been recorded since the last call, servers first."""
        for path in (self._folder / FOLDER).glob("server-*.events"):
            name = path.stem.replace("-", " ")
            if name not in self._readers:
                with suppress(UsageError):
                    self._readers[name] = Reader(path)
        reborn = {worker_name(rank) for rank in range(self._workers) if self._open(rank)}
        for name, reader in sorted(self._readers.items()):
            if reader.written != reader.read or name in reborn:
                reader.keep()
                before, reader.shift = reader.dropped, self.shifts.get(name, 0.0)
                stamps = reader.new()
                yield EventBatch(name, stamps, reader.dropped - before, name in reborn)

    def _open(self, rank: int) -> bool:
        """Open a worker's events file; True if another process has taken its place, and this is that one's."""
        path, name = events_file(self._folder, rank), worker_name(rank)
        with suppress(UsageError, FileNotFoundError):  # It has not begun yet.
            inode = path.stat().st_ino
            if self._files.get(name) == inode:
                return False
            reader, is_second = Reader(path), name in self._files
            self._files[name], self._readers[name] = inode, reader
            return is_second
        return False

    def state(self, process: Name) -> ProcessState | None:
        """What the kernel says of a process of this machine."""
        reader = self._readers.get(process)
        return None if reader is None else state_of(reader.pid)

    def without_core(self, process: Name) -> float | None:
        """Seconds that the threads of a process of this machine had no core."""
        reader = self._readers.get(process)
        return None if reader is None else seconds_without_core(reader.pid)

    def stacks(self, processes: Sequence[Name]) -> dict[Name, str]:
        """The stacks of workers of this machine, of those that answer in time."""
        known = {name: self._readers[name] for name in processes if name in self._readers}
        return stacks_of({name: (reader.pid, stack_file(self._folder, reader.rank)) for name, reader in known.items()})

    def known_until(self, process: Name, now: float) -> float:  # noqa: ARG002
        """Now: memory is read as it is written."""
        return now

    def is_complete(self, process: Name) -> bool:  # noqa: ARG002
        """All of it: what an ended process has written to memory is there."""
        return True
