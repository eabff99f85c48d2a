"""Roles, the processes of a run: how each one ended, and which of several failures came first."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from offbeat import errors
from offbeat.errors import OffbeatError, UsageError, WorkerError
from offbeat.runtime.launch._logs import last_lines

HEAD_START = 0.1
"""Seconds by which a death is dated back: the kernel closes a dying process's sockets, which its peers notice,
before it tells the parent."""
SETTLE = 0.5  # Seconds to wait for a better explanation when the first failure only reports a lost peer.
_HINTS: dict[int, str] = {
    signal.SIGKILL: "killed by the system or by hand; out of memory?",
    signal.SIGSEGV: "it crashed in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "memory could not be had; is /dev/shm or the disk full?",
    signal.SIGTERM: "ended from outside",
    signal.SIGINT: "interrupted from outside",
}


@dataclass(frozen=True)
class Role:
    """One process to start."""

    kind: str  # Worker, server or monitor.
    rank: int  # Position among the roles of its kind.
    entry: str  # `package.module:function`, called in the child as `function(config, control)`.
    config: Mapping[str, Any]  # Plain data for the entry function.
    environment: Mapping[str, str]  # Variables added to the launcher's, set before the entry is imported.
    log: Path  # File that stdout and stderr are appended to; created if missing.
    threads: int | None = None  # For `torch.set_num_threads`; None keeps torch's default.
    serves: bool = False  # Whether it only serves the others: it is ended once all of them have ended.
    expendable: bool = False
    """Whether the run survives its death by a signal or, if it only serves, by a non-zero exit code."""
    network: Path | None = None  # Network namespace of its host, entered before anything else; None: the launcher's.
    patience: float = 600.0
    """Seconds its threads and exit handlers may take after its work is done, and seconds it may stay stopped by
    SIGSTOP; the error names what was waited for."""
    name: str = ""  # Name in messages; by default its kind and rank.
    machine: str = ""  # The machine that it runs on, if that is not this one.

    def __post_init__(self) -> None:
        module, colon, function = self.entry.partition(":")
        if not (module and colon and function):
            raise UsageError(
                f"The entry {self.entry!r} of {self} names no function: write it as 'package.module:function'."
            )
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"{self} cannot compute with {self.threads} threads: give 1 or more, or None.")

    def __str__(self) -> str:
        return self.name or f"{self.kind} {self.rank}"

    def tolerates(self, exit_code: int | None) -> bool:
        """Whether the run goes on after it ended with this code (None: by a signal) without an exception."""
        # A worker that chooses its exit code, as a script does with `sys.exit(3)`, wants the run to fail.
        return self.expendable and (exit_code is None or self.serves)


class RemoteError(msgspec.Struct, tag=True, frozen=True):
    """An exception that ended a child, as text; also the message in which the child reports it."""

    type_name: str  # The exception's class, with its module unless it is a builtin.
    message: str  # Its `str()`.
    traceback: str  # Its traceback as Python would print it, from the entry function on.
    offbeat_class: str | None = None  # The nearest class of `offbeat.errors`, if it is one of ours.
    communication: bool = False  # Whether it reports a lost or silent peer: then the peer is the likelier cause.
    at: float = 0.0  # When it was raised, by the machine's monotonic clock.


@dataclass(frozen=True)
class RoleOutcome:
    """How one role ended."""

    role: Role
    exit_code: int | None = None  # None if a signal ended it.
    signal: int | None = None
    error: RemoteError | None = None  # The exception that ended it, if one did.
    at: float = 0.0  # When, by the machine's monotonic clock.

    @property
    def is_consequence(self) -> bool:
        """Whether it only reports that a peer is gone."""
        return self.error is not None and self.error.communication


class Failures:
    """The roles of a run that have not ended well so far."""

    def __init__(self, settle: float = SETTLE) -> None:
        self._known: list[RoleOutcome] = []
        self._settle = settle
        self._settled_at = 0.0
        self.tolerated: list[RoleOutcome] = []  # Ends of expendable roles.
        self.announced: list[RoleOutcome] = []  # Roles that exit with a code of their own and may not have ended yet.

    def add(self, failure: RoleOutcome) -> None:
        """Add a failure that ends the run."""
        if not self._known:
            self._settled_at = time.monotonic() + self._settle
        self._known.append(failure)

    def decide(self) -> bool:
        """Whether to end the run now."""
        certain = any(not failure.is_consequence for failure in self._known)
        return certain or (bool(self._known) and time.monotonic() >= self._settled_at)

    def cause(self, done: bool) -> RoleOutcome | None:
        """The root cause, if anything failed; `done` says whether any role did the work of the run."""
        # If nobody is left to do the work, the tolerated deaths are to blame; otherwise the run survived them.
        if self.tolerated and not done and all(failure.is_consequence for failure in self._known):
            self._known += [failure for failure in self.tolerated if failure.error is not None] or self.tolerated
        # Peers may notice a role leaving, and fail because of it, before its process has ended.
        if self._known and all(failure.is_consequence for failure in self._known):
            self._known += self.announced
        return cause_of(self._known) if self._known else None


def cause_of(failures: Sequence[RoleOutcome]) -> RoleOutcome:
    """The earliest failure; ones that only report a lost peer come after all others."""
    return min(failures, key=lambda f: (f.is_consequence, f.at - (HEAD_START if f.signal is not None else 0.0)))


def obituary(failure: RoleOutcome) -> str:
    """How a process that failed has ended, with the end of its log."""
    return str(error_for(failure))


def error_for(failure: RoleOutcome) -> OffbeatError:
    """The error that the launcher raises for a failure."""
    if failure.error is not None:
        return _from_exception(failure.role, failure.error)
    role, log, number = failure.role, failure.role.log, failure.signal
    if number is not None:
        # Real-time signals have no names.
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        what = f"was ended by {name}{f' ({_HINTS[number]})' if number in _HINTS else ''}."
        code = 128 + number  # As shells report it.
    else:
        what = f"ended with exit code {failure.exit_code}."
        code = failure.exit_code or 1
    # A crash leaves a dump of the stack, whose first lines matter most.
    lines = last_lines(log, 20 if number is not None else 10)
    tail = f" Its log {log} ends with:\n{lines}" if lines else f" Its log {log} is empty."
    return WorkerError(f"{role} {what}{tail}", role=role.kind, rank=role.rank, exit_code=code, name=str(role))


def _from_exception(role: Role, remote: RemoteError) -> OffbeatError:
    kind: type[OffbeatError] | None = getattr(errors, remote.offbeat_class or "", None)
    is_named = re.search(rf"\b{re.escape(str(role))}\b", remote.message)
    try:
        error = None if kind is None else kind(remote.message if is_named else f"{role}: {remote.message}")
    except TypeError:
        error = None  # Its constructor needs more than a message.
    if error is None:
        message = f"{role} failed with {remote.type_name}: {remote.message} (its log: {role.log})"
        error = WorkerError(message, role=role.kind, rank=role.rank, name=str(role))
    vars(error).update(remote_traceback=remote.traceback, role=role.kind, rank=role.rank)
    # So that an uncaught traceback shows both sides.
    error.add_note(f"In {role}:\n{remote.traceback.rstrip()}")
    return error
