"""A process's orders from offbeat's launcher, where a script's `offbeat.init()` finds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import OffbeatError
from offbeat.runtime.run.settings import Goal

if TYPE_CHECKING:
    from offbeat.runtime.servers.plan import ServerPlan


@dataclass(frozen=True)
class Assignment:
    """One worker's part in a run."""

    goal: Goal = field(default_factory=Goal)  # The settings of the run.
    folder: Path | None = None  # The run folder; None leaves nothing on disk.
    resume: bool = False  # Whether to resume from the newest checkpoint of the folder.
    joins: bool = False  # Whether this worker joins a team that has already started.
    disturbed: tuple[int, ...] = ()  # Numbers of the `--disturb` faults that already fired for the worker it replaces.
    identity: Mapping[str, Any] = field(default_factory=dict)  # What a checkpoint must match to be resumed from.
    send: Callable[[Mapping[str, Any]], None] = lambda _message: None  # Sends progress to the launcher.
    fail: Callable[[OffbeatError], None] | None = None
    """Reports a fatal error to the launcher, from any thread; None without a launcher of ours."""
    servers: ServerPlan | None = None  # The run's parameter servers, if its strategy has any.
    open_teams: list[Any] = field(default_factory=list)
    """Teams that the script has opened; any it leaves open are closed for it."""


ASSIGNED: ContextVar[Assignment | None] = ContextVar("offbeat assignment", default=None)
"""Set by offbeat's launcher in each worker before a script starts."""
