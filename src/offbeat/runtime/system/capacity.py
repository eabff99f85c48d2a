"""What this machine has room for: memory, processes and open files, looked at before a run starts."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from offbeat.errors import UsageError

MEMORY_OF_A_PROCESS: Final = 32 << 20
"""Bytes that a worker or server takes for itself at the least, beside what it shares with the others."""
FILES_OF_A_PROCESS: Final = 2
"""Files that the launcher keeps open for each."""
_OWN_FILES: Final = 64
"""Files that the launcher has open for other things."""
_CGROUP: Final = Path("/sys/fs/cgroup")


def check_room(processes: int, threads: int) -> None:
    """Refuse to start so many processes with so many threads each if this machine has no room for them."""
    for most, what in _limits(threads):
        if processes > most:
            raise UsageError(
                f"{processes:,} processes with {threads:,} thread{'s' if threads > 1 else ''} each do not fit on this "
                f"machine: {what} suffice for {max(0, most):,}. Ask for fewer workers, servers or threads."
            )


def _limits(threads: int) -> Iterator[tuple[int, str]]:
    """How many processes fit, and by what."""
    memory = free_memory()
    if memory is not None:
        least = MEMORY_OF_A_PROCESS >> 20
        yield memory // MEMORY_OF_A_PROCESS, f"{memory / 1e9:.1f} GB of free memory, at {least} MiB a process or more,"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        yield (files - _OWN_FILES) // FILES_OF_A_PROCESS, f"{files:,} open files (`ulimit -n`)"
    for most, what in _thread_limits():
        yield most // max(1, threads), f"{most:,} threads ({what})"


def _thread_limits() -> Iterator[tuple[int, str]]:
    user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if user != resource.RLIM_INFINITY:
        yield user, "`ulimit -u`"
    for file, what in (
        (Path("/proc/sys/kernel/threads-max"), "of the kernel"),
        (_CGROUP / "pids.max", "of its cgroup"),
    ):
        most = _number(file)
        if most is not None:
            yield most, what


def free_memory() -> int | None:
    """Bytes that new processes can have, by the machine and by the cgroup that this one is in; None: not known."""
    known = [value for value in (_available(), _left_in_cgroup()) if value is not None]
    return min(known, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found[1]) * 1024


def _left_in_cgroup() -> int | None:
    most, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    return None if most is None or used is None else max(0, most - used)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # There is none, or it is `max`.
        return None
