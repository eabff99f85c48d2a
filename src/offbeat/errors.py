"""Every error that offbeat raises, as one tree.

Each message says what was wrong (with the offending value), why it matters, and what to do.
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


class ProgramError(UsageError):
    """A program for servers cannot be parsed, has wrong types, or exceeds its budget; `line` and `column` say where."""

    def __init__(self, message: str, at: tuple[int, int] | None = None) -> None:
        super().__init__(message if at is None else f"line {at[0]}, column {at[1]}: {message}")
        self.line, self.column = at or (0, 0)


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


class MachineLostError(RunError):
    """A machine of the run, or the agent on it, is gone; the message names it and what ran there."""


class VerdictError(RunError):
    """A monitored run can never finish; the message says who waits for whom."""

    def __init__(self, message: str, *, kind: str, verdict: Mapping[str, object]) -> None:
        super().__init__(message)
        self.kind = kind
        self.verdict = verdict


class NonFiniteError(RunError):
    """A loss or a gradient became NaN or infinite."""


class SecureAggregationError(RunError):
    """A secret of secure aggregation cannot be recovered, or a key or share is not what it claims to be."""


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
