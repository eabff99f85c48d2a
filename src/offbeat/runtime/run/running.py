"""Runs as their folders and processes show them, from outside: which are alive, how far they are, how to end one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from msgspec import Struct, to_builtins

from offbeat.errors import CheckpointError, OutputError, RunError, UsageError, WaitError
from offbeat.runtime.run.folder import METRICS_FILE, RUN_FILE, RunFolder, strategy_of
from offbeat.runtime.run.procfs import Passport, Seen, held, ignores, lives, passport, passport_from, seen, writing_to
from offbeat.runtime.run.untrusted_files import is_file, is_folder, is_there, parse_json, regular_file

RUNNING: Final = "running"
LOST: Final = "lost"
"""A run that says that it is running, whose launching process is gone: it was killed, or the machine was."""
KILLED: Final = "killed"
UNREADABLE: Final = "not readable"
"""A folder whose run.json is damaged; `what` says how."""
_TAIL: Final = 65536
_LOOK: Final = 0.05


class _Report(Struct, omit_defaults=True):
    """What a line of the metrics says of how far a run is."""

    step: int | None = None
    score: float | None = None
    seconds: float | None = None


class Process(Struct, frozen=True):
    """One worker or server of a run that is alive."""

    role: str
    """`worker 3`, `server 0`."""
    pid: int
    state: str
    cpu_seconds: float
    memory_bytes: int


class Status(Struct, frozen=True):
    """How a run is."""

    run: str
    """Its folder."""
    state: str
    """As in run.json, or `lost`."""
    what: str
    strategy: str
    """As in run.json; `script` if the script distributes itself."""
    workers: int | None
    started: str | None
    launcher: int | None
    """The process that started it, if that lives."""
    step: int | None
    """At the last report."""
    score: float | None
    seconds: float | None
    """Training time at the last report."""
    processes: tuple[Process, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether it goes on."""
        return self.state == RUNNING

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return to_builtins(self)


def found(text: Path, parent: Path = Path("runs")) -> RunFolder:
    """A run by its folder, or by its name in the folder of runs."""
    inside = parent / text
    return RunFolder.open(inside if not is_there(text) and is_file(inside / RUN_FILE) else text)


def statuses(parent: Path) -> list[Status]:
    """All runs in a folder, the newest last; refused if there is no such folder."""
    if not is_folder(parent):
        raise UsageError(f"there is no folder {parent}: give the one that `offbeat run --out` made its runs in.")
    try:
        entries = sorted(parent.iterdir())
    except OSError as error:
        raise UsageError(f"the folder {parent} cannot be read: {error.strerror}.") from error
    folders = [entry for entry in entries if is_file(entry / RUN_FILE) and not entry.is_symlink()]
    return sorted(_told(folders), key=lambda one: (one.started or "", one.run))


def _told(folders: list[Path]) -> Iterator[Status]:
    for folder in folders:
        try:
            yield status(RunFolder.open(folder))
        except CheckpointError as error:
            if is_there(folder / RUN_FILE):  # Otherwise somebody has removed it just now.
                yield Status(str(folder.resolve()), UNREADABLE, str(error), "", None, None, None, None, None, None)


def status(folder: RunFolder) -> Status:
    """How a run is now."""
    known = folder.read()
    config, last = known.get("config", {}), _last_report(folder)
    launcher = _launcher(known)
    state = known.get("state", "unknown")
    if state == RUNNING and launcher is None:
        state = LOST
    result = known.get("result") or {}
    return Status(
        str(folder.path),
        state,
        _what(config.get("what", {})),
        strategy_of(known),
        config.get("workers"),
        known.get("environment", {}).get("started"),
        None if launcher is None or state != RUNNING else launcher.pid,
        last.get("step", result.get("steps")),
        last.get("score", result.get("score")),
        last.get("seconds", result.get("seconds")),
        processes(folder) if state == RUNNING else (),
    )


def processes(folder: RunFolder) -> tuple[Process, ...]:
    """The workers and servers of a run that live now: those that print into its logs."""
    there = writing_to(folder.path / "logs")
    rows = [_process(file, one) for file, one in there.items() if file.suffix == ".log" and "-" in file.stem]
    return tuple(sorted(rows, key=lambda row: in_order(row.role)))


def in_order(role: str) -> tuple[bool, list[int]]:
    """For sorting processes by name: workers first, each kind by its numbers."""
    kind, _, number = role.rpartition(" ")
    return kind != "worker", [int(part) if part.isdecimal() else -1 for part in number.split(".")]


def _process(file: Path, one: Seen) -> Process:
    kind, _, number = file.stem.rpartition("-")
    return Process(f"{kind} {number}", one.pid, one.state, one.cpu_seconds, one.memory_bytes)


def _what(known: dict[str, Any]) -> str:
    if "script" in known:
        return known["script"]
    task = known.get("task", {})
    return ":".join(part for part in (task.get("source"), task.get("name")) if part)


def _launcher(known: dict[str, Any]) -> Passport | None:
    """The process that has started a run, if it lives."""
    one = passport_from(known.get("process"))
    return one if one is not None and lives(one) else None


def _last_report(folder: RunFolder) -> dict[str, Any]:
    """The last whole line of the metrics."""
    try:
        with regular_file(folder.path / METRICS_FILE) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read(_TAIL).split(b"\n")[:-1]
        found = parse_json(lines[-1].decode()) if lines else {}
        return cast("dict[str, Any]", msgspec.to_builtins(msgspec.convert(found, _Report)))
    except (OSError, ValueError):
        return {}


def stop(folder: RunFolder, seconds: float, kill: bool = False) -> str:
    """End a run as Ctrl-C does, or at once, and wait until it has ended; answers its state then.

    The signal goes to the process that started the run, by a handle that no other process can have, and that process
    ends the others and says so in run.json. One that takes no notice of SIGINT, because a script started it in the
    background, gets SIGTERM.
    """
    known = folder.read()
    one = _launcher(known)
    if known.get("state") != RUNNING or one is None:
        state = LOST if known.get("state") == RUNNING else known.get("state")
        raise UsageError(f"{folder.path} is not running (it is {state}): there is nothing to stop.")
    if one.pid == os.getpid():
        raise UsageError(f"{folder.path} was started by this very process: raise KeyboardInterrupt instead.")
    with held(one) as handle, ExitStack() as kept:
        # Taken hold of before: once the launcher is gone, nobody could tell whose they were.
        others = [kept.enter_context(held(passport(row.pid))) for row in processes(folder)] if kill else []
        if handle is not None:
            _signal(handle, _way_to_end(one, kill), one.pid)
        for other in others:
            if other is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(other, signal.SIGKILL)
    return _await_end(folder, one, seconds, kill)


def _way_to_end(one: Passport, kill: bool) -> signal.Signals:
    if kill:
        return signal.SIGKILL
    return signal.SIGTERM if ignores(one.pid, signal.SIGINT) else signal.SIGINT


def _signal(handle: int, number: signal.Signals, pid: int) -> None:
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise RunError(
            f"process {pid} belongs to somebody else, so this user may not end its run: ask them."
        ) from error


def _await_end(folder: RunFolder, one: Passport, seconds: float, kill: bool) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = folder.read().get("state", RUNNING)
        if (state != RUNNING or not lives(one)) and not processes(folder):
            if folder.read().get("state", RUNNING) == RUNNING and kill:
                with suppress(OutputError):
                    folder.write(state=KILLED)
            return folder.read().get("state", RUNNING)
        time.sleep(_LOOK)
    there = ", ".join(f"{row.role} (pid {row.pid}, {row.state})" for row in processes(folder))
    gone = seen(one.pid) is None or not lives(one)
    who = there or ("nobody" if gone else f"the launching process {one.pid}")
    raise WaitError(f"{folder.path} has not ended within {seconds:g} s; {who} still lives. End it with --kill.")
