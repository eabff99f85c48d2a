"""Every error that offbeat raises, as one tree.

Each message says what was wrong (with the offending value), why it matters, and what to do.

    OffbeatError
    ├── UsageError                 what was asked for makes no sense; nothing has been started
    │   ├── StrategyError          no such strategy or parameter, or two that cannot go together
    │   ├── TaskError              no such task or script, or one that cannot be used as asked
    │   ├── DataError              data that cannot be divided as asked
    │   ├── ScheduleError          rounds that lose, double or misplace a contribution, or race for a range
    │   └── MachineError           a machine that breaks its invariant, or gets nowhere; carries the seed
    ├── RunError                   a run was started and could not go on
    │   ├── WorkerError            a process raised or was killed; carries role, rank and traceback
    │   ├── WaitError              a wait passed its deadline; names who was waited for
    │   ├── VerdictError           a run that is watched can never go on; carries the kind of verdict
    │   └── NonFiniteError         a loss or gradient became NaN or infinite
    ├── CheckpointError            a checkpoint is missing, damaged, or of another run
    └── OutputError                a run folder that cannot be written

    OffbeatWarning                 a run that goes on, and probably does not do what was meant
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class OffbeatWarning(UserWarning):
    """A run goes on, and probably does not do what was meant."""


class OffbeatError(Exception):
    """The root of all errors that offbeat raises on purpose."""


class UsageError(OffbeatError):
    """What was asked for makes no sense; no process has been started."""


class StrategyError(UsageError):
    """No such strategy or parameter, a value out of range, or parts that cannot go together."""


class TaskError(UsageError):
    """No such task or script, or one that cannot be used as asked."""


class DataError(UsageError):
    """Data that cannot be divided as asked."""


class ScheduleError(UsageError):
    """A schedule loses, doubles or misplaces a contribution, waits in vain, or lets two ranks race for a range."""


class MachineError(UsageError):
    """A machine breaks its invariant under faults, or gets nowhere when they cease; by which seed."""

    def __init__(self, message: str, *, seed: int) -> None:
        super().__init__(message)
        self.seed = seed


class RunError(OffbeatError):
    """A run was started and could not go on."""


class WorkerError(RunError):
    """A process of the run raised an exception or was killed.

    `exit_code` is what the process ended with, or 128 plus the number of the signal that ended it, and so what
    `offbeat run` ends with. `name` is what the run calls the process, such as `worker 2` or `server 0.1`.
    """

    def __init__(
        self, message: str, *, role: str, rank: int, remote_traceback: str = "", exit_code: int = 1, name: str = ""
    ) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank
        self.remote_traceback = remote_traceback
        self.exit_code = exit_code
        self.name = name or f"{role} {rank}"


class WaitError(RunError):
    """A wait passed its deadline; the message names who was waited for."""


class VerdictError(RunError):
    """Who waits for whom in a run that can never go on."""

    def __init__(self, message: str, *, kind: str, verdict: Mapping[str, object]) -> None:
        super().__init__(message)
        self.kind = kind
        self.verdict = verdict


class NonFiniteError(RunError):
    """A loss or a gradient became NaN or infinite."""


class CheckpointError(OffbeatError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class OutputError(OffbeatError):
    """A run folder cannot be written."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The tail of a look-up error: the nearest valid name, then all of them."""
    names = sorted(valid)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} Valid: {', '.join(names) if names else '(none)'}."
