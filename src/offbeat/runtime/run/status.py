"""Runs seen from outside, by their folders and processes: which are alive, how far they are, and stopping one."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from msgspec import Struct

from offbeat.errors import CheckpointError, OutputError, RunError, UsageError, WaitError
from offbeat.runtime.run.folder import METRICS_FILE, RUN_FILE, RunFolder, strategy_of
from offbeat.runtime.run.procfs import Passport, held, ignores, lives, passport, seen, writing_to
from offbeat.runtime.run.untrusted_files import is_file, is_folder, is_there, parse_json, regular_file

RUNNING: Final = "running"
LOST: Final = "lost"  # A run recorded as running whose launching process is gone: it was killed, or the machine was.
KILLED: Final = "killed"
UNREADABLE: Final = "not readable"  # A folder whose run.json is damaged; `what` says how.
_TAIL: Final = 65536
_POLL: Final = 0.05


class _Report(Struct, omit_defaults=True):
    step: int | None = None
    score: float | None = None
    seconds: float | None = None


class Process(Struct, frozen=True):
    """A live worker or server of a run."""

    role: str  # `worker 3`, `server 0`.
    pid: int
    state: str
    cpu_seconds: float
    memory_bytes: int


class Status(Struct, frozen=True):
    """The status of a run."""

    run: str  # Its folder.
    state: str  # As in run.json, or `lost`.
    what: str
    strategy: str  # As in run.json; `script` if the script distributes itself.
    workers: int | None = None
    started: str | None = None
    launcher: int | None = None  # The process that started it, if that lives.
    step: int | None = None  # At the last report.
    score: float | None = None
    seconds: float | None = None  # Training time at the last report.
    processes: tuple[Process, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self.state == RUNNING

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return msgspec.to_builtins(self)


def find_run(text: Path, parent: Path = Path("runs")) -> RunFolder:
    """A run by its folder, or by its name in the folder of runs."""
    inside = parent / text
    return RunFolder.open(inside if not is_there(text) and is_file(inside / RUN_FILE) else text)


def statuses(parent: Path) -> list[Status]:
    """All runs in a folder, newest last; refused if there is no such folder."""
    if not is_folder(parent):
        raise UsageError(f"there is no folder {parent}: give the one that `offbeat run --out` made its runs in.")
    try:
        entries = sorted(parent.iterdir())
    except OSError as error:
        raise UsageError(f"the folder {parent} cannot be read: {error.strerror}.") from error
    rows: list[Status] = []
    for folder in entries:
        if not is_file(folder / RUN_FILE) or folder.is_symlink():
            continue
        try:
            rows.append(status(RunFolder.open(folder)))
        except CheckpointError as error:
            if is_there(folder / RUN_FILE):  # Otherwise it was removed just now.
                rows.append(Status(str(folder.resolve()), UNREADABLE, str(error), ""))
    return sorted(rows, key=lambda row: (row.started or "", row.run))


def status(folder: RunFolder) -> Status:
    """The current status of a run."""
    known = folder.read()
    config, last = known.get("config", {}), _last_report(folder)
    launcher = _launcher(known)
    state = known.get("state", "unknown")
    if state == RUNNING and launcher is None:
        state = LOST
    what, result = config.get("what", {}), known.get("result") or {}
    task = what.get("task") or {}
    return Status(
        run=str(folder.path),
        state=state,
        what=what.get("script", ":".join(part for part in (task.get("source"), task.get("name")) if part)),
        strategy=strategy_of(known),
        workers=config.get("workers"),
        started=known.get("environment", {}).get("started"),
        launcher=None if launcher is None or state != RUNNING else launcher.pid,
        step=last.get("step", result.get("steps")),
        score=last.get("score", result.get("score")),
        seconds=last.get("seconds", result.get("seconds")),
        processes=processes(folder) if state == RUNNING else (),
    )


def processes(folder: RunFolder) -> tuple[Process, ...]:
    """The live workers and servers of a run: the processes that print into its logs."""
    rows: list[Process] = []
    for file, process in writing_to(folder.path / "logs").items():
        kind, dash, number = file.stem.rpartition("-")
        if file.suffix == ".log" and dash:
            usage = process.cpu_seconds, process.memory_bytes
            rows.append(Process(f"{kind} {number}", process.pid, process.state, *usage))
    return tuple(sorted(rows, key=lambda row: in_order(row.role)))


def in_order(role: str) -> tuple[bool, list[int]]:
    """Sort key for process names: workers first, each kind by number."""
    kind, _, number = role.rpartition(" ")
    return kind != "worker", [int(part) if part.isdecimal() else -1 for part in number.split(".")]


def _launcher(known: dict[str, Any]) -> Passport | None:
    """The process that started a run, if it lives."""
    with suppress(msgspec.ValidationError):
        launcher = msgspec.convert(known.get("process"), Passport)
        return launcher if lives(launcher) else None
    return None


def _last_report(folder: RunFolder) -> dict[str, Any]:
    """The last whole line of the metrics."""
    try:
        with regular_file(folder.path / METRICS_FILE) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read(_TAIL).split(b"\n")[:-1]
        line = parse_json(lines[-1].decode()) if lines else {}
        return cast("dict[str, Any]", msgspec.to_builtins(msgspec.convert(line, _Report)))
    except (OSError, ValueError):
        return {}


def stop(folder: RunFolder, seconds: float, kill: bool = False) -> str:
    """End a run as Ctrl-C does, or kill it, and wait until it has ended; returns its state then."""
    # The signal goes to the launching process, through a handle that no other process can have; that process ends the
    # others and updates run.json. If it ignores SIGINT, because a script started it in the background, it gets SIGTERM.
    known = folder.read()
    launcher = _launcher(known)
    if known.get("state") != RUNNING or launcher is None:
        state = LOST if known.get("state") == RUNNING else known.get("state")
        raise UsageError(f"{folder.path} is not running (it is {state}): there is nothing to stop.")
    if launcher.pid == os.getpid():
        raise UsageError(f"{folder.path} was started by this very process: raise KeyboardInterrupt instead.")
    number = signal.SIGTERM if ignores(launcher.pid, signal.SIGINT) else signal.SIGINT
    with held(launcher) as handle, ExitStack() as stack:
        # Opened first: once the launcher is gone, its processes could no longer be recognized.
        others = [stack.enter_context(held(passport(row.pid))) for row in processes(folder)] if kill else []
        try:
            if handle is not None:
                signal.pidfd_send_signal(handle, signal.SIGKILL if kill else number)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise RunError(
                f"process {launcher.pid} belongs to somebody else, so this user may not end its run: ask them."
            ) from error
        for other in others:
            if other is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(other, signal.SIGKILL)
    return _await_end(folder, launcher, seconds, kill)


def _await_end(folder: RunFolder, launcher: Passport, seconds: float, kill: bool) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = folder.read().get("state", RUNNING)
        if (state != RUNNING or not lives(launcher)) and not processes(folder):
            if folder.read().get("state", RUNNING) == RUNNING and kill:
                with suppress(OutputError):
                    folder.write(state=KILLED)
            return folder.read().get("state", RUNNING)
        time.sleep(_POLL)
    living = ", ".join(f"{row.role} (pid {row.pid}, {row.state})" for row in processes(folder))
    gone = seen(launcher.pid) is None or not lives(launcher)
    who = living or ("nobody" if gone else f"the launching process {launcher.pid}")
    raise WaitError(f"{folder.path} has not ended within {seconds:g} s; {who} still lives. End it with --kill.")
