"""Processes as the kernel knows them: who somebody is, whether it still lives, and what it is at.

A number alone does not name a process, for it is given to another one later. A `Passport` does: the number, when the
process began, in which boot of the machine, and where numbers are counted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

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
    """State, parent, group and so on of a process, or of a thread as `PID/task/TID`; nothing if there is none.

    These follow its name, which is in brackets and may hold anything.
    """
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Passport(msgspec.Struct, frozen=True):
    """Names one process, and never another."""

    pid: int
    began: int
    """When, in the kernel's ticks since the machine was started."""
    boot: str
    """Which start of the machine."""
    counted: str
    """Among which processes its number is its own: the PID namespace."""


class Seen(msgspec.Struct, frozen=True):
    """What a process is at."""

    pid: int
    parent: int
    state: str
    """`running`, `sleeping`, `stopped` …"""
    began: int
    cpu_seconds: float
    memory_bytes: int


def seen(pid: int) -> Seen | None:
    """What a process is at; None if there is none of that number."""
    fields = stat_fields(pid)
    if not fields:
        return None
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    spent = (int(fields[11]) + int(fields[12])) / ticks
    state = _STATES.get(fields[0], fields[0])
    return Seen(pid, int(fields[1]), state, int(fields[19]), spent, int(fields[21]) * page)


def passport(pid: int | None = None) -> Passport:
    """The passport of a process that lives; by default of this one."""
    found = seen(os.getpid() if pid is None else pid)
    if found is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return Passport(found.pid, found.began, _boot(), _counted(found.pid))


def lives(one: Passport) -> bool:
    """Whether it is this process that lives under its number."""
    found = seen(one.pid)
    if found is None or found.state == "ended" or found.began != one.began or _boot() != one.boot:
        return False
    return _counted(os.getpid()) == one.counted


@contextmanager
def held(one: Passport) -> Generator[int | None]:
    """A handle by which only this process can be signalled, whatever becomes of its number; None if it has ended."""
    try:
        handle = os.pidfd_open(one.pid)
    except OSError:
        yield None
        return
    try:
        yield handle if lives(one) else None
    finally:
        os.close(handle)


def ignores(pid: int, number: signal.Signals) -> bool:
    """Whether a process takes no notice of a signal, as one that a script started in the background does of SIGINT."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            name, _, mask = line.partition(":")
            if name == "SigIgn":
                return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def everybody() -> Iterator[Seen]:
    """All processes that can be seen."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (found := seen(int(entry.name))) is not None:
            yield found


def writing_to(folder: Path) -> dict[Path, Seen]:
    """Which process prints into each file of a folder; of one and those that it has started, the first."""
    found: dict[Path, list[Seen]] = {}
    for one in everybody():
        with suppress(OSError):
            target = Path((_PROC / str(one.pid) / "fd" / "1").readlink())
            if target.parent == folder and one.state != "ended":
                found.setdefault(target, []).append(one)
    return {file: _eldest(some) for file, some in found.items()}


def _eldest(some: list[Seen]) -> Seen:
    numbers = {one.pid for one in some}
    return min((one for one in some if one.parent not in numbers), key=lambda one: one.began, default=some[0])


def passport_from(data: Any) -> Passport | None:
    """A passport as it was written down, if it was."""
    try:
        return msgspec.convert(data, Passport)
    except msgspec.ValidationError:
        return None


def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _counted(pid: int) -> str:
    try:
        return str((_PROC / str(pid) / "ns/pid").readlink())
    except OSError:
        return ""
