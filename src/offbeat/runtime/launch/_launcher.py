"""The launcher: roles as real processes, forked in milliseconds from a server that has imported torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from offbeat.errors import UsageError
from offbeat.runtime.launch._children import ForkServerLink
from offbeat.runtime.launch._roles import Role, RoleOutcome
from offbeat.runtime.launch._run import Interrupts, LaunchedRun, OnEnd, OnMessage, OnTick

PRELOAD = ("numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "safetensors.torch")
"""Imports of nearly every role, paid for once per launcher instead of once per process."""
GRACE = timedelta(seconds=1.25)
"""From SIGINT to SIGKILL: with the settling time before it, a failure is raised within two seconds."""


class Launcher:
    """Starts roles as processes and ends them all, whatever happens; a context manager.

    It can do several runs in sequence, and one process can have several launchers.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._preload = tuple(preload)
        self._link: ForkServerLink | None = None
        self._running = False
        self._run: LaunchedRun | None = None

    def start(self) -> None:
        """Spawn the fork server if there is none; returns at once, while it imports."""
        self._drop_broken_server()
        if self._link is None:
            self._link = ForkServerLink(self._preload)

    @property
    def server_pid(self) -> int | None:
        """The fork server's process, if there is one."""
        return None if self._link is None else self._link.pid

    def run(
        self,
        roles: Sequence[Role],
        *,
        on_message: OnMessage,
        on_tick: OnTick | None = None,
        on_end: OnEnd | None = None,
        grace: timedelta = GRACE,
    ) -> list[RoleOutcome]:
        """Run roles until all except servers have succeeded; the first failure ends the others and is raised.

        `on_message(role, message)`, `on_end(outcome)` for each role and `on_tick()`, about ten times a second, are
        called on this thread.
        """
        if self._running:
            raise UsageError("This launcher is already running roles: wait for its end, or make a second launcher.")
        names = [str(role) for role in roles]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"Each role needs a rank of its own: {', '.join(duplicates)} was given more than once.")
        self._running = True
        try:
            self.start()
            assert self._link is not None  # noqa: S101 (start made it)
            with Interrupts() as interrupts:
                self._run = LaunchedRun(self._link, on_message, on_tick, grace, interrupts, on_end)
                return self._run.go(roles)
        finally:
            self._running, self._run = False, None
            self._drop_broken_server()

    def kill(self, role: str) -> None:
        """Kill the process of a role of the current run, such as `worker 2`; for callbacks."""
        if self._run is not None:
            self._run.kill(role)

    def add(self, role: Role) -> None:
        """Start one more role in the current run, in place of one that has ended; for callbacks."""
        if self._run is None:
            raise UsageError(f"{role} cannot be added: this launcher is running nothing.")
        self._run.add(role)

    def _drop_broken_server(self) -> None:
        if self._link is not None and not self._link.is_usable:
            self.close()

    def close(self) -> None:
        """End the fork server; the launcher can be started again."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def __enter__(self) -> Launcher:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
