"""The capacity of this machine: memory, processes and open files, checked before a run starts."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from offbeat.errors import UsageError

MEMORY_OF_A_PROCESS: Final = 32 << 20  # Minimum private memory of a worker or server, in bytes.
FILES_OF_A_PROCESS: Final = 2  # Files that the launcher keeps open for each process.
_OWN_FILES: Final = 64  # Other open files of the launcher.
_CGROUP: Final = Path("/sys/fs/cgroup")


def check_room(processes: int, threads: int) -> None:
    """Refuse to start more processes and threads than this machine can hold."""
    for most, what in _limits(threads):
        if processes > most:
            raise UsageError(
                f"{processes:,} processes with {threads:,} thread{'s' if threads > 1 else ''} each do not fit on this "
                f"machine: {what} suffice for {max(0, most):,}. Ask for fewer workers, servers or threads."
            )


def _limits(threads: int) -> Iterator[tuple[int, str]]:
    """How many processes fit, by each resource."""
    memory = free_memory()
    if memory is not None:
        least = MEMORY_OF_A_PROCESS >> 20
        yield memory // MEMORY_OF_A_PROCESS, f"{memory / 1e9:.1f} GB of free memory, at {least} MiB a process or more,"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        yield (files - _OWN_FILES) // FILES_OF_A_PROCESS, f"{files:,} open files (`ulimit -n`)"
    user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    thread_limits = {
        "`ulimit -u`": None if user == resource.RLIM_INFINITY else user,
        "of the kernel": _number(Path("/proc/sys/kernel/threads-max")),
        "of its cgroup": _number(_CGROUP / "pids.max"),
    }
    for what, most in thread_limits.items():
        if most is not None:
            yield most // max(1, threads), f"{most:,} threads ({what})"


def free_memory() -> int | None:
    """Bytes available to new processes, limited by the machine and by this process's cgroup; None: unknown."""
    known: list[int] = []
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        known += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    most, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if most is not None and used is not None:
        known.append(max(0, most - used))
    return min(known, default=None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # Missing, or `max`.
        return None
