"""The processes of one run: ordered from the fork server, signalled, and listened to until they end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import OutputError, UsageError, WaitError
from offbeat.runtime.launch import _groups
from offbeat.runtime.launch._link import ForkServerLink
from offbeat.runtime.launch._messages import Channel, Fork, FromChild, Signal, frame
from offbeat.runtime.launch._roles import RemoteError, Role, RoleOutcome


@dataclass
class Child:
    """A role's process, as far as it has got."""

    role: Role
    order: Fork
    channel: Channel[FromChild]
    pid: int | None = None
    error: RemoteError | None = None
    interrupted: bool = False
    stopped_since: float | None = None
    overdue: bool = False
    outcome: RoleOutcome | None = None

    @property
    def standstill(self) -> RemoteError | None:
        """Why a role was ended that stood still, if it was."""
        if not self.overdue:
            return None
        text = (
            f"{self.role} was stopped (SIGSTOP) for longer than {self.role.patience:g} s and has been ended. If it is "
            f"to be continued after such a time, allow more with --timeout."
        )
        return RemoteError(WaitError.__name__, text, "", WaitError.__name__)


class Children:
    """All of them, and what is heard of them."""

    def __init__(self, link: ForkServerLink) -> None:
        self._link = link
        self._held = contextlib.ExitStack()
        self.selector = self._held.enter_context(contextlib.closing(selectors.DefaultSelector()))
        """Ready when the fork server, or the child that is its data, has said something."""
        self.selector.register(link.channel, selectors.EVENT_READ, None)
        self.all: dict[int, Child] = {}
        """By the number of their order."""

    def close(self) -> None:
        """Free what is held for them."""
        self._held.close()

    def order(self, order: Fork, role: Role, log: int) -> None:
        """Have one role forked; that it was is heard later."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = Child(role, order, Channel(ours, FromChild, str(role)))
            self._held.callback(child.channel.close)
            self.all[order.id] = child
            self.selector.register(child.channel, selectors.EVENT_READ, child)
            self._link.send(order, (theirs.fileno(), log))

    def living(self) -> list[Child]:
        """Those that have not ended."""
        return [child for child in self.all.values() if child.outcome is None]

    def unforked(self) -> list[Child]:
        """Those of which the fork server has not said that they are there."""
        return [child for child in self.all.values() if child.pid is None]

    def outcomes(self) -> list[RoleOutcome]:
        """How those have ended that have."""
        return [child.outcome for child in self.all.values() if child.outcome is not None]

    def signal(self, number: signal.Signals, role: str | None = None) -> None:
        """Send a signal to those that live, or to one of them by its name."""
        for child in self.living():
            if role is None or str(child.role) == role:
                self._link.send(Signal(child.order.id, number))

    def end_stopped(self, now: float) -> None:
        """End who stands still for longer than it may: it cannot keep its own deadlines, and others may need nothing.

        Roles that serve are left to whoever needs them.
        """
        for child in self.living():
            if child.pid is None or child.role.serves or not _groups.is_stopped(child.pid):
                child.stopped_since = None
            elif child.stopped_since is None:
                child.stopped_since = now
            elif now - child.stopped_since > child.role.patience and not child.overdue:
                child.overdue = True
                self._link.send(Signal(child.order.id, signal.SIGKILL))

    def stop_hearing(self, child: Child) -> None:
        """Nothing more is heard of it."""
        if child.channel.fileno() >= 0:
            self.selector.unregister(child.channel)
            child.channel.close()

    def kill_groups(self, deadline: float) -> None:
        """End them and all that they have started, without the fork server."""
        _groups.kill([child.pid for child in self.all.values() if child.pid is not None], deadline)


def open_log(role: Role, held: contextlib.ExitStack) -> int:
    """The descriptor of a role's log, open as long as what holds it."""
    try:
        role.log.parent.mkdir(parents=True, exist_ok=True)
        return held.enter_context(role.log.open("ab")).fileno()
    except OSError as error:
        raise OutputError(
            f"The log of {role} cannot be written: {error}. Choose a place where this user may write."
        ) from error


def order_for(number: int, role: Role) -> Fork:
    """What the fork server is told to start a role; refused here if it is not plain data."""
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
