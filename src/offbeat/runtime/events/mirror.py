"""A copy of another machine's events file, written as its records come in: read like any other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from offbeat.errors import OffbeatError
from offbeat.runtime.events.recorder import FIELDS, NAMES, RECORDS, RING_AT, create, write_name


class MirrorError(OffbeatError):
    """Records that cannot be those of an events file."""


class Mirror:
    """The copy of one process's events file."""

    def __init__(self, path: Path, pid: int, rank: int) -> None:
        path.unlink(missing_ok=True)  # A file being read must not change its process.
        self._memory = create(path, pid, rank)
        self._ring = np.frombuffer(self._memory, FIELDS, RECORDS, RING_AT)

    def write(self, records: bytes | memoryview, names: Iterable[tuple[int, bytes]]) -> None:
        """Add records, which are in the order of their numbers, and what they are about."""
        for number, text in names:
            if not 1 <= number <= NAMES or not write_name(self._memory, number, text):
                raise MirrorError(f"name {number} of {len(text)} bytes has no place in a table of {NAMES:,} names")
        rows = np.frombuffer(records, FIELDS)
        numbers = rows["number"].astype(np.int64)
        if len(rows) > RECORDS or (np.diff(numbers) != 1).any():
            raise MirrorError(f"{len(rows):,} records are not numbered one after the other")
        self._ring[numbers % RECORDS] = rows

    def close(self) -> None:
        """Make sure that the file has everything."""
        del self._ring
        self._memory.flush()


def boot() -> str:
    """Which boot of which machine this is: its processes read the same clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"
