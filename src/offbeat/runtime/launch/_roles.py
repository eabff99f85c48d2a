"""What is launched, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import UsageError


@dataclass(frozen=True)
class Role:
    """One process to be started."""

    kind: str
    """What it is: worker, server, monitor."""
    rank: int
    """Its position among those of its kind."""
    entry: str
    """`package.module:function`, called in the child as `function(config, control)`."""
    config: Mapping[str, Any]
    """Plain data for the entry function."""
    environment: Mapping[str, str]
    """Variables added to the launcher's, set before the entry is imported."""
    log: Path
    """Where the child's descriptors 1 and 2 go: appended, created if missing."""
    threads: int | None = None
    """For `torch.set_num_threads`; None leaves torch's own choice."""
    serves: bool = False
    """Whether it is there for the others: when all others have ended, it is ended too."""
    expendable: bool = False
    """Whether the run goes on without it: if a signal ends it, or, where it only serves, an exit code other than 0."""
    network: Path | None = None
    """The network of the host that it lives on, entered before anything else; None: the launcher's."""
    patience: float = 600.0
    """Seconds that its threads and exit handlers may take to end when its work is done, and that it may stand still
    by SIGSTOP; who is waited for is named."""
    name: str = ""
    """What it is called in messages, if that is not its kind and rank."""

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

    def bears(self, exit_code: int | None) -> bool:
        """Whether the run goes on after it has ended with this code (None: by a signal), having raised nothing.

        A worker that ends with a code of its own choice, as a script does by `sys.exit(3)`, wants the run to fail.
        """
        return self.expendable and (exit_code is None or self.serves)


class RemoteError(msgspec.Struct, tag=True, frozen=True):
    """An exception that ended a child, as text; also what the child says of it to the launcher."""

    type_name: str
    """The exception's class, with its module unless it is a builtin."""
    message: str
    """What `str()` of it gave."""
    traceback: str
    """Its traceback as Python would print it, from the entry function on."""
    offbeat_class: str | None = None
    """The nearest class of `offbeat.errors`, if it is one of ours."""
    communication: bool = False
    """Whether it says that a peer is gone or silent: then the peer is the likelier cause."""
    at: float = 0.0
    """When it was raised, by the machine's monotonic clock."""


@dataclass(frozen=True)
class RoleOutcome:
    """How one role ended."""

    role: Role
    """Which."""
    exit_code: int | None
    """Its exit code, or None if a signal ended it."""
    signal: int | None
    """The signal that ended it, or None."""
    error: RemoteError | None
    """The exception that ended it, or None."""
