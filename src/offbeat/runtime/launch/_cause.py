"""Root-cause analysis: which of several failures came first, and the error that reports it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat import errors
from offbeat.errors import OffbeatError, WorkerError
from offbeat.runtime.launch._logs import last_lines
from offbeat.runtime.launch._roles import RemoteError, Role, RoleOutcome

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
class Failure:
    """A role that did not end well."""

    role: Role
    at: float
    error: RemoteError | None = None
    exit_code: int | None = None
    signal: int | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether it only reports that a peer is gone."""
        return self.error is not None and self.error.communication


class Failures:
    """The failures of a run so far."""

    def __init__(self) -> None:
        self._known: list[Failure] = []
        self._settled_at = 0.0
        self.tolerated: list[Failure] = []  # Ends of expendable roles.
        self.announced: list[Failure] = []  # Roles that exit with a code of their own and may not have ended yet.

    def add(self, failure: Failure) -> None:
        """Add a failure that ends the run."""
        if not self._known:
            self._settled_at = time.monotonic() + SETTLE
        self._known.append(failure)

    def decide(self) -> bool:
        """Whether to end the run now."""
        certain = any(not failure.is_consequence for failure in self._known)
        return certain or (bool(self._known) and time.monotonic() >= self._settled_at)

    def cause(self, done: bool) -> Failure | None:
        """The root cause, if anything failed; `done` says whether any role did the work of the run."""
        # If nobody is left to do the work, the tolerated deaths are to blame; otherwise the run survived them.
        if self.tolerated and not done and all(failure.is_consequence for failure in self._known):
            self._known += [failure for failure in self.tolerated if failure.error is not None] or self.tolerated
        # Peers may notice a role leaving, and fail because of it, before its process has ended.
        if self._known and all(failure.is_consequence for failure in self._known):
            self._known += self.announced
        return cause_of(self._known) if self._known else None


def cause_of(failures: Sequence[Failure]) -> Failure:
    """The earliest failure; ones that only report a lost peer come after all others."""
    return min(failures, key=lambda f: (f.is_consequence, f.at - (HEAD_START if f.signal is not None else 0.0)))


def obituary(outcome: RoleOutcome) -> str:
    """How a process that failed has ended, with the end of its log."""
    return str(error_for(Failure(outcome.role, 0.0, outcome.error, outcome.exit_code, outcome.signal)))


def error_for(failure: Failure) -> OffbeatError:
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
    error = _same_class(role, remote)
    if error is None:
        message = f"{role} failed with {remote.type_name}: {remote.message} (its log: {role.log})"
        error = WorkerError(message, role=role.kind, rank=role.rank, name=str(role))
    vars(error)["remote_traceback"] = remote.traceback
    # So that an uncaught traceback shows both sides.
    error.add_note(f"In {role}:\n{remote.traceback.rstrip()}")
    return error


def _same_class(role: Role, remote: RemoteError) -> OffbeatError | None:
    kind = getattr(errors, remote.offbeat_class or "", None)
    if not (isinstance(kind, type) and issubclass(kind, OffbeatError)):
        return None
    is_named = re.search(rf"\b{re.escape(str(role))}\b", remote.message)
    try:
        return kind(remote.message if is_named else f"{role}: {remote.message}")
    except TypeError:
        return None  # Its constructor needs more than a message.
