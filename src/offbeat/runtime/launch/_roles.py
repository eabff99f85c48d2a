"""Roles, the processes of a run, and how each one ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import UsageError


@dataclass(frozen=True)
class Role:
    """One process to start."""

    kind: str
    """Worker, server or monitor."""
    rank: int
    """Position among the roles of its kind."""
    entry: str
    """`package.module:function`, called in the child as `function(config, control)`."""
    config: Mapping[str, Any]
    """Plain data for the entry function."""
    environment: Mapping[str, str]
    """Variables added to the launcher's, set before the entry is imported."""
    log: Path
    """File that stdout and stderr are appended to; created if missing."""
    threads: int | None = None
    """For `torch.set_num_threads`; None keeps torch's default."""
    serves: bool = False
    """Whether it only serves the others: it is ended once all of them have ended."""
    expendable: bool = False
    """Whether the run survives its death by a signal or, if it only serves, by a non-zero exit code."""
    network: Path | None = None
    """Network namespace of its host, entered before anything else; None: the launcher's."""
    patience: float = 600.0
    """Seconds its threads and exit handlers may take after its work is done, and seconds it may stay stopped by
    SIGSTOP; the error names what was waited for."""
    name: str = ""
    """Name in messages; by default its kind and rank."""

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
        """Whether the run goes on after it ended with this code (None: by a signal) without an exception.

        A worker that chooses its exit code, as a script does with `sys.exit(3)`, wants the run to fail.
        """
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
    exit_code: int | None  # None if a signal ended it.
    signal: int | None
    error: RemoteError | None  # The exception that ended it, if one did.
