"""The launcher: roles as real processes, forked in milliseconds from a server that has torch imported."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType

from offbeat.errors import UsageError
from offbeat.runtime.launch._interrupts import Interrupts
from offbeat.runtime.launch._link import ForkServerLink
from offbeat.runtime.launch._roles import Role, RoleOutcome
from offbeat.runtime.launch._run import LaunchedRun, OnEnd, OnMessage, OnTick

PRELOAD = ("numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "safetensors.torch")
"""What nearly every role imports; each costs its import once per launcher, not once per process."""

GRACE = timedelta(seconds=1.25)
"""From SIGINT to SIGKILL: with the settling time before it, a failure is raised within two seconds."""


class Launcher:
    """Starts roles as processes and ends them, all of them, whatever happens; a context manager.

    Several runs may follow each other, and several launchers may live in one process.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._preload = tuple(preload)
        self._link: ForkServerLink | None = None
        self._running = False
        self._run: LaunchedRun | None = None

    def start(self) -> None:
        """Spawn the fork server, if there is none; returns at once, while its imports go on."""
        if self._link is not None and not self._link.is_usable:
            self.close()
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
        """Run roles until all but those that serve have ended well; the first failure ends the others and is raised.

        `on_message(role, message)`, `on_end(outcome)` of each role, and `on_tick()`, about ten times a second, are
        called on this thread.
        """
        if self._running:
            raise UsageError("This launcher is already running roles: wait for its end, or make a second launcher.")
        names = [str(role) for role in roles]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"Each role needs a rank of its own: {', '.join(twice)} was given more than once.")
        self._running = True
        try:
            self.start()
            assert self._link is not None  # noqa: S101 (start made it)
            with Interrupts() as interrupts:
                self._run = LaunchedRun(self._link, on_message, on_tick, grace, interrupts, on_end)
                return self._run.go(roles)
        finally:
            self._running, self._run = False, None
            if self._link is not None and not self._link.is_usable:
                self.close()

    def kill(self, role: str) -> None:
        """End the process of a role of the run under way, such as `worker 2`; for its callbacks."""
        if self._run is not None:
            self._run.kill(role)

    def add(self, role: Role) -> None:
        """Start one more role in the run under way, in place of one that has ended; for its callbacks."""
        if self._run is None:
            raise UsageError(f"{role} cannot be added: this launcher is running nothing.")
        self._run.add(role)

    def close(self) -> None:
        """End the fork server; the launcher can be started again."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def __enter__(self) -> Launcher:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
