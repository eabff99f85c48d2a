"""Processes as /proc shows them: identity, liveness, state and resource use."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

_PROC: Final = Path("/proc")
_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "in a system call",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}


def stat_fields(pid: int | str) -> list[str]:
    """State, parent, group and so on of a process, or of a thread as `PID/task/TID`; empty if there is none."""
    try:
        # They follow the process name, which is in brackets and may contain anything.
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Passport(msgspec.Struct, frozen=True):
    """Identifies one process, and never another, as a PID alone would: PIDs are reused."""

    pid: int
    began: int  # Start time, in kernel ticks since boot.
    boot: str  # The boot of the machine.
    counted: str  # The PID namespace in which the PID counts.


class Seen(msgspec.Struct, frozen=True):
    """The state of a process."""

    pid: int
    parent: int
    state: str  # `running`, `sleeping`, `stopped` …
    began: int
    cpu_seconds: float
    memory_bytes: int


def seen(pid: int) -> Seen | None:
    """The state of a process; None if there is none with this PID."""
    fields = stat_fields(pid)
    if not fields:
        return None
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    spent = (int(fields[11]) + int(fields[12])) / ticks
    state = _STATES.get(fields[0], fields[0])
    return Seen(pid, int(fields[1]), state, int(fields[19]), spent, int(fields[21]) * page)


def passport(pid: int | None = None) -> Passport:
    """The passport of a live process; by default of this one."""
    process = seen(os.getpid() if pid is None else pid)
    if process is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return Passport(process.pid, process.began, _boot(), _namespace(process.pid))


def lives(owner: Passport) -> bool:
    """Whether this very process is alive."""
    process = seen(owner.pid)
    if process is None or process.state == "ended" or process.began != owner.began or _boot() != owner.boot:
        return False
    return _namespace(os.getpid()) == owner.counted


@contextmanager
def held(owner: Passport) -> Generator[int | None]:
    """A handle that signals only this process, even if its PID is reused; None if it has ended."""
    try:
        handle = os.pidfd_open(owner.pid)
    except OSError:
        yield None
        return
    try:
        yield handle if lives(owner) else None
    finally:
        os.close(handle)


def ignores(pid: int, number: signal.Signals) -> bool:
    """Whether a process ignores a signal, as one started in the background by a script ignores SIGINT."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            name, _, mask = line.partition(":")
            if name == "SigIgn":
                return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def writing_to(folder: Path) -> dict[Path, Seen]:
    """The process whose stdout is each file of a folder; of a process and its descendants, the first."""
    writers: dict[Path, list[Seen]] = {}
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            target = Path((entry / "fd" / "1").readlink())
            process = seen(int(entry.name)) if target.parent == folder else None
            if process is not None and process.state != "ended":
                writers.setdefault(target, []).append(process)
    return {file: _eldest(processes) for file, processes in writers.items()}


def _eldest(processes: list[Seen]) -> Seen:
    pids = {process.pid for process in processes}
    return min((p for p in processes if p.parent not in pids), key=lambda p: p.began, default=processes[0])


def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _namespace(pid: int) -> str:
    try:
        return str((_PROC / str(pid) / "ns/pid").readlink())
    except OSError:
        return ""
