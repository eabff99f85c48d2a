"""Which of several failures is the cause, and the error that tells of it."""

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

SETTLE = 0.5
"""Seconds to wait for a better explanation when the first failure only complains of a peer."""

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
    """A role that ended otherwise than well."""

    role: Role
    at: float
    error: RemoteError | None = None
    exit_code: int | None = None
    signal: int | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that a peer is gone."""
        return self.error is not None and self.error.communication


class Failures:
    """What has gone wrong in a run so far."""

    def __init__(self) -> None:
        self._known: list[Failure] = []
        self._settled_at = 0.0
        self.borne: list[Failure] = []
        """Ends of expendable roles."""
        self.announced: list[Failure] = []
        """Of those who end themselves with an exit code, and may not have ended yet."""

    def add(self, failure: Failure) -> None:
        """Something that ends the run."""
        if not self._known:
            self._settled_at = time.monotonic() + SETTLE
        self._known.append(failure)

    def decide(self) -> bool:
        """Whether the run is to be ended now."""
        certain = any(not failure.is_consequence for failure in self._known)
        return certain or (bool(self._known) and time.monotonic() >= self._settled_at)

    def cause(self, done: bool) -> Failure | None:
        """What it all comes from, if anything; `done` says whether somebody has done the work of the run."""
        # Nobody is left who could have done it. What others went on after is not why one has failed by itself.
        if self.borne and not done and all(failure.is_consequence for failure in self._known):
            self._known += [failure for failure in self.borne if failure.error is not None] or self.borne
        # Others may notice that somebody leaves, and fail of it, before its process has ended.
        if self._known and all(failure.is_consequence for failure in self._known):
            self._known += self.announced
        return cause_of(self._known) if self._known else None


def cause_of(failures: Sequence[Failure]) -> Failure:
    """The first in time, but one that only complains of a peer after all others."""
    return min(failures, key=lambda f: (f.is_consequence, f.at - (HEAD_START if f.signal is not None else 0.0)))


def obituary(outcome: RoleOutcome) -> str:
    """How a process that did not end well has ended, with the end of its log."""
    return str(error_for(Failure(outcome.role, 0.0, outcome.error, outcome.exit_code, outcome.signal)))


def error_for(failure: Failure) -> OffbeatError:
    """The error that the launcher raises for a failure."""
    if failure.error is not None:
        return _from_exception(failure.role, failure.error)
    role, log = failure.role, failure.role.log
    if failure.signal is not None:
        hint = f" ({_HINTS[number]})" if (number := failure.signal) in _HINTS else ""
        what = f"was ended by {_signal_name(failure.signal)}{hint}."
        code = 128 + failure.signal  # As shells tell of it.
    else:
        what = f"ended with exit code {failure.exit_code}."
        code = failure.exit_code or 1
    # A crash leaves a dump of the stack, which begins with what matters.
    lines = last_lines(log, 20 if failure.signal is not None else 10)
    tail = f" Its log {log} ends with:\n{lines}" if lines else f" Its log {log} is empty."
    return WorkerError(f"{role} {what}{tail}", role=role.kind, rank=role.rank, exit_code=code, name=str(role))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # Real-time signals have no names.


def _from_exception(role: Role, remote: RemoteError) -> OffbeatError:
    error = _same_class(role, remote)
    if error is None:
        message = f"{role} failed with {remote.type_name}: {remote.message} (its log: {role.log})"
        error = WorkerError(message, role=role.kind, rank=role.rank, name=str(role))
    vars(error)["remote_traceback"] = remote.traceback
    # So that a traceback nobody catches shows both sides.
    error.add_note(f"In {role}:\n{remote.traceback.rstrip()}")
    return error


def _same_class(role: Role, remote: RemoteError) -> OffbeatError | None:
    kind = getattr(errors, remote.offbeat_class or "", None)
    if not (isinstance(kind, type) and issubclass(kind, OffbeatError)):
        return None
    named = re.search(rf"\b{re.escape(str(role))}\b", remote.message)
    try:
        return kind(remote.message if named else f"{role}: {remote.message}")
    except TypeError:
        return None  # Its constructor wants more than a message.
