"""Every error that offbeat raises, as one tree.

Each message says what was wrong (with the offending value), why it matters, and what to do.

    OffbeatError
    ├── UsageError                 wrong options or arguments; nothing has been started
    │   ├── StrategyError          unknown strategy or parameter, or two that cannot be combined
    │   ├── TaskError              unknown task or script, or one that cannot be used this way
    │   ├── DataError              data that cannot be split this way
    │   ├── ScheduleError          rounds that lose, duplicate or misplace a contribution, or race
    │   └── MachineError           a machine that breaks its invariant or makes no progress; carries the seed
    ├── RunError                   a run was started and failed
    │   ├── WorkerError            a process raised or was killed; carries role, rank and traceback
    │   ├── WaitError              a wait passed its deadline; names the missing process
    │   ├── VerdictError           a monitored run can never finish; carries the kind of verdict
    │   └── NonFiniteError         a loss or gradient became NaN or infinite
    ├── CheckpointError            a checkpoint is missing, damaged, or of another run
    └── OutputError                a run folder that cannot be written

    OffbeatWarning                 a run that goes on, and probably does not do what was intended
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class OffbeatWarning(UserWarning):
    """A run goes on, and probably does not do what was intended."""


class OffbeatError(Exception):
    """The root of all errors that offbeat raises on purpose."""


class UsageError(OffbeatError):
    """Wrong options or arguments; no process has been started."""


class StrategyError(UsageError):
    """Unknown strategy or parameter, a value out of range, or parts that cannot be combined."""


class TaskError(UsageError):
    """Unknown task or script, or one that cannot be used this way."""


class DataError(UsageError):
    """Data that cannot be split this way."""


class ScheduleError(UsageError):
    """A schedule loses, duplicates or misplaces a contribution, deadlocks, or lets two ranks race for a range."""


class MachineError(UsageError):
    """A machine breaks its invariant under faults, or makes no progress once they stop; `seed` reproduces it."""

    def __init__(self, message: str, *, seed: int) -> None:
        super().__init__(message)
        self.seed = seed


class RunError(OffbeatError):
    """A run was started and failed."""


class WorkerError(RunError):
    """A process of the run raised an exception or was killed.

    `exit_code` is the process's own, or 128 plus the number of the signal that ended it; `offbeat run` ends with it,
    too. `name` is the process's name in the run, such as `worker 2` or `server 0.1`.
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
    """A wait passed its deadline; the message names the missing process."""


class VerdictError(RunError):
    """A monitored run can never finish; the message says who waits for whom."""

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
    """The end of a look-up error: the nearest valid name, then all of them."""
    names = sorted(valid)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} Valid: {', '.join(names) if names else '(none)'}."
