"""The processes of one run: forked, signalled, and heard until they end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import OutputError, UsageError, WaitError
from offbeat.runtime.launch._link import ForkServerLink
from offbeat.runtime.launch._messages import Channel, Fork, FromChild, Signal, frame
from offbeat.runtime.launch._roles import RemoteError, Role, RoleOutcome
from offbeat.runtime.run.procfs import stat_fields


@dataclass
class Child:
    """The state of a role's process."""

    role: Role
    id: int
    channel: Channel[FromChild]
    pid: int | None = None
    error: RemoteError | None = None
    interrupted: bool = False
    stopped_since: float | None = None
    overdue: bool = False
    outcome: RoleOutcome | None = None

    @property
    def standstill(self) -> RemoteError | None:
        """Why it was ended, if that was for being stopped too long."""
        if not self.overdue:
            return None
        text = (
            f"{self.role} was stopped (SIGSTOP) for longer than {self.role.patience:g} s and has been ended. If it is "
            f"to be continued after such a time, allow more with --timeout."
        )
        return RemoteError(WaitError.__name__, text, "", WaitError.__name__)


class Children:
    """All children of a run, and their channels."""

    def __init__(self, link: ForkServerLink) -> None:
        self._link = link
        self._held = contextlib.ExitStack()
        self.close = self._held.close
        self.selector = self._held.enter_context(contextlib.closing(selectors.DefaultSelector()))
        """Ready when the fork server (data None) or a child (its data) has sent something."""
        self.selector.register(link.channel, selectors.EVENT_READ, None)
        self.all: dict[int, Child] = {}  # By the id of their fork order.

    def order(self, order: Fork, role: Role, log: int) -> None:
        """Ask the fork server for one role; it confirms later."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = Child(role, order.id, Channel(ours, FromChild, str(role)))
            self._held.callback(child.channel.close)
            self.all[order.id] = child
            self.selector.register(child.channel, selectors.EVENT_READ, child)
            self._link.send(order, (theirs.fileno(), log))

    def living(self) -> list[Child]:
        """Children that have not ended."""
        return [child for child in self.all.values() if child.outcome is None]

    def unforked(self) -> list[Child]:
        """Children that the fork server has not confirmed yet."""
        return [child for child in self.all.values() if child.pid is None]

    def outcomes(self) -> list[RoleOutcome]:
        """Outcomes of the children that have ended."""
        return [child.outcome for child in self.all.values() if child.outcome is not None]

    def signal(self, number: signal.Signals, role: str | None = None) -> None:
        """Send a signal to all living children, or to one by its name."""
        for child in self.living():
            if role is None or str(child.role) == role:
                self._link.send(Signal(child.id, number))

    def end_stopped(self, now: float) -> None:
        """Kill children that stay stopped for too long: they cannot keep their own deadlines, and peers may not notice.

        A process that a debugger holds does not count as stopped, and servers are left to whoever needs them.
        """
        for child in self.living():
            if child.pid is None or child.role.serves or stat_fields(child.pid)[:1] != ["T"]:
                child.stopped_since = None
            elif child.stopped_since is None:
                child.stopped_since = now
            elif now - child.stopped_since > child.role.patience and not child.overdue:
                child.overdue = True
                self._link.send(Signal(child.id, signal.SIGKILL))

    def stop_hearing(self, child: Child) -> None:
        """Close a child's channel."""
        if child.channel.fileno() >= 0:
            self.selector.unregister(child.channel)
            child.channel.close()

    def kill_groups(self, seconds: float) -> None:
        """Kill all process groups without the fork server, and wait until nothing in them runs or time is up."""
        groups = [child.pid for child in self.all.values() if child.pid is not None]
        for group in groups:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        deadline = time.monotonic() + seconds
        while any(_group_runs(group) for group in groups) and time.monotonic() < deadline:
            time.sleep(0.01)


def _group_runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    # A zombie still counts as a member; whoever inherited it has to reap it.
    return any(
        fields[2] == str(group) and fields[0] not in "ZX"
        for fields in (stat_fields(entry.name) for entry in Path("/proc").glob("[0-9]*"))
        if fields
    )


def open_log(role: Role, held: contextlib.ExitStack) -> int:
    """The descriptor of a role's log, open as long as `held`."""
    try:
        role.log.parent.mkdir(parents=True, exist_ok=True)
        return held.enter_context(role.log.open("ab")).fileno()
    except OSError as error:
        raise OutputError(
            f"The log of {role} cannot be written: {error}. Choose a place where this user may write."
        ) from error


def order_for(number: int, role: Role) -> Fork:
    """The fork server's order for a role; a config that is not plain data is refused here."""
    order = Fork(
        id=number,
        label=str(role),
        entry=role.entry,
        config=dict(role.config),
        environment={**os.environ, **role.environment},
        directory=str(Path.cwd()),
        path=[entry or str(Path.cwd()) for entry in sys.path],
        threads=role.threads,
        network=None if role.network is None else str(role.network),
        patience=role.patience,
    )
    try:
        frame(order)
    except UsageError as error:
        raise UsageError(f"The config of {role} cannot be passed on. {error}") from error
    return order
