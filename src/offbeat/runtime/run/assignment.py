"""What offbeat's own launcher has told this process to do; a script's `offbeat.init()` finds it here."""

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


def _to_nobody(message: Mapping[str, Any]) -> None:
    del message


@dataclass(frozen=True)
class Assignment:
    """One worker's part of a run."""

    goal: Goal = field(default_factory=Goal)
    """What the run is asked to do."""
    folder: Path | None = None
    """The run's folder; None leaves nothing behind."""
    resume: bool = False
    """Whether to go on from the folder's newest checkpoint."""
    joins: bool = False
    """Whether the others have begun without this worker, which joins them."""
    disturbed: tuple[int, ...] = ()
    """Numbers of the sentences of `--disturb` that came true for those whose place it takes."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint must agree with to be resumed from."""
    send: Callable[[Mapping[str, Any]], None] = _to_nobody
    """Tells the launcher how far the work is."""
    fail: Callable[[OffbeatError], None] | None = None
    """Tells the launcher why the work cannot go on, from any thread; None: there is no launcher of ours."""
    servers: ServerPlan | None = None
    """The run's parameter servers, if its strategy has any."""
    open_teams: list[Any] = field(default_factory=list)
    """Teams that the script has opened, so that one that it forgets to close is closed for it."""


ASSIGNED: ContextVar[Assignment | None] = ContextVar("offbeat assignment", default=None)
"""Set by offbeat's launcher in its workers before a script starts; a worker has one."""
