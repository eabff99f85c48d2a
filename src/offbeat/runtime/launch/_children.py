"""The launcher's side of the fork server, and the processes of one run: forked, signalled, and heard."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from offbeat.errors import MachineLostError, OutputError, UsageError, WaitError
from offbeat.runtime.launch import messages as wire
from offbeat.runtime.launch._roles import RemoteError, Role, RoleOutcome
from offbeat.runtime.run.procfs import stat_fields

SEND_DEADLINE = 30  # Seconds that the fork server may leave a message unread.
CLOSE_DEADLINE = 10.0  # Seconds that the fork server has to exit; more than it gives its children.


M = TypeVar("M")


class ServerGoneError(Exception):
    """The fork server has ended or does not listen; the run turns this into an error with the reason."""


class MachineLink(Protocol):
    """Where roles are started: the fork server of this machine, or an agent on another."""

    machine: str  # Its name; empty for this machine.
    is_ready: bool  # Whether its imports are done.
    is_usable: bool
    lost: str  # Why it is lost, if it is; only of other machines.

    @property
    def channel(self) -> MessageSource[wire.FromServer]:
        """What it says."""
        ...

    def send(self, message: wire.Signal | wire.Drain) -> None:
        """Say something to it."""
        ...

    def start(self, order: wire.Fork, role: Role) -> MessageSource[wire.FromChild]:
        """Have a role started; what it says."""
        ...


class MessageSource(Protocol[M]):
    """Messages as they come, behind a descriptor that is ready when there are some."""

    @property
    def ended(self) -> bool:
        """Whether no more will come."""
        ...

    def fileno(self) -> int:
        """The descriptor; -1 if closed."""
        ...

    def receive(self) -> list[M]:
        """What has come; never waits."""
        ...

    def receive_rest(self) -> list[M]:
        """What is left of a sender that has ended."""
        ...

    def close(self) -> None:
        """Free the descriptor."""
        ...


class ForkServerLink:
    """One fork server, as its launcher sees it."""

    machine = lost = ""

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_DEADLINE, 0))
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        try:
            self._process = _spawn(theirs.fileno(), self._output.fileno())
        except BaseException:
            ours.close()
            self._output.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.channel: wire.Channel[wire.FromServer] = wire.Channel(ours, wire.FromServer, "the fork server")
        self.preload = tuple(preload)
        self.is_ready = False  # Whether its imports are done.
        self.is_usable = True  # Whether it can still be used for a run.
        with contextlib.suppress(ServerGoneError):  # The first run will report the reason.
            self.send(wire.LauncherHello(list(preload), [entry or str(Path.cwd()) for entry in sys.path]))

    def send(self, message: wire.ToServer, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and open files, to the fork server."""
        try:
            self.channel.send(message, descriptors)
        except OSError as error:
            self.channel.ended = self.channel.ended or isinstance(error, ConnectionError)
            raise ServerGoneError from error

    def start(self, order: wire.Fork, role: Role) -> wire.Channel[wire.FromChild]:
        """Ask for one role; the fork server confirms later."""
        ours, theirs = socket.socketpair()
        channel: wire.Channel[wire.FromChild] = wire.Channel(ours, wire.FromChild, str(role))
        try:
            with theirs, contextlib.ExitStack() as held:
                self.send(order, (theirs.fileno(), _open_log(role, held)))
        except BaseException:
            channel.close()
            raise
        return channel

    def obituary(self) -> str:
        """How the fork server ended, and the end of its output."""
        self.kill()
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._output.seek(0)
        last = self._output.read()[-2000:].decode(errors="replace").strip()
        return f"The fork server, which starts all processes of a run, {how}." + (f" It said:\n{last}" if last else "")

    def kill(self) -> None:
        """End the fork server now, if it has not ended; the kernel then ends its children."""
        self.is_usable = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            # One that is just ending may still report how: a process closes its sockets before it is gone.
            self._process.wait(1 if self.channel.ended else 0)
        self._process.kill()
        self._process.wait(CLOSE_DEADLINE)

    def close(self) -> None:
        """End the fork server and free everything held for it."""
        self.channel.close()
        try:
            if not self.is_ready:
                self._process.kill()  # It has no children yet, and does not listen while it imports.
            self._process.wait(CLOSE_DEADLINE)
        except subprocess.TimeoutExpired:
            self.kill()
        finally:
            self.is_usable = False
            self._output.close()


def _spawn(descriptor: int, output: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        # numpy's OpenBLAS starts its threads when imported, and a process with threads cannot fork safely.
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "offbeat.runtime.launch._server", str(descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        pass_fds=(descriptor,),
        start_new_session=True,  # The terminal's Ctrl-C is for the launcher alone.
    )


@dataclass
class Child:
    """The state of a role's process."""

    role: Role
    id: int
    channel: MessageSource[wire.FromChild]
    link: MachineLink
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

    def __init__(self, links: Sequence[MachineLink]) -> None:
        self._links = {link.machine: link for link in links}
        self._held = contextlib.ExitStack()
        self.close = self._held.close
        self.selector = self._held.enter_context(contextlib.closing(selectors.DefaultSelector()))
        """Ready when a machine or a child (its data) has sent something."""
        for link in links:
            self.selector.register(link.channel, selectors.EVENT_READ, link)
        self.all: dict[int, Child] = {}  # By the id of their fork order.

    def order(self, order: wire.Fork, role: Role) -> None:
        """Ask the role's machine to start it; it confirms later."""
        link = self._links[role.machine]
        channel = link.start(order, role)
        child = self.all[order.id] = Child(role, order.id, channel, link)
        self._held.callback(channel.close)
        self.selector.register(channel, selectors.EVENT_READ, child)

    def are_ready(self) -> bool:
        """Whether roles can be started everywhere, or never will be somewhere."""
        return any(link.lost for link in self._links.values()) or all(link.is_ready for link in self._links.values())

    def refuse_unready(self) -> None:
        """Raise if a machine is not ready, or lost."""
        for link in self._links.values():
            if link.lost:
                raise MachineLostError(f"machine {link.machine} was lost before the run began: {link.lost}.")
            if not link.is_ready:
                self.give_up_here()
                where = f" on machine {link.machine}" if link.machine else ""
                seconds = wire.PRELOAD_DEADLINE
                raise WaitError(f"The fork server{where} did not finish its imports within {seconds:g} s.")

    def give_up_here(self) -> None:
        """The fork server of this machine is gone, or of no use."""
        link = self._links.get("")
        if isinstance(link, ForkServerLink):
            link.is_usable = False

    def lose(self, link: MachineLink) -> list[RoleOutcome]:
        """End what ran on a machine that is gone; the failures, each of which names all of it."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(link.channel)
        now = time.monotonic()
        children = [child for child in self.living() if child.link is link]
        names = " and ".join(str(child.role) for child in children)
        text = f"machine {link.machine} was lost, and with it {names}: {link.lost}. Resume with --resume."
        error = RemoteError(MachineLostError.__name__, text, "", MachineLostError.__name__, at=now)
        for child in children:
            self.stop_hearing(child)
            child.outcome = RoleOutcome(child.role, None, int(signal.SIGKILL), None, now)
        return [RoleOutcome(child.role, None, int(signal.SIGKILL), error, now) for child in children]

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
                child.link.send(wire.Signal(child.id, number))

    def end_stopped(self, now: float) -> None:
        """Kill children that stay stopped for too long: they cannot keep their deadlines, and peers may not notice."""
        # A process that a debugger holds does not count as stopped, and servers are left to whoever needs them.
        for child in self.living():
            if child.pid is None or child.role.serves or child.link.machine or stat_fields(child.pid)[:1] != ["T"]:
                child.stopped_since = None
            elif child.stopped_since is None:
                child.stopped_since = now
            elif now - child.stopped_since > child.role.patience and not child.overdue:
                child.overdue = True
                child.link.send(wire.Signal(child.id, signal.SIGKILL))

    def stop_hearing(self, child: Child) -> None:
        """Close a child's channel."""
        if child.channel.fileno() >= 0:
            self.selector.unregister(child.channel)
            child.channel.close()

    def kill_groups(self, seconds: float) -> None:
        """Kill all process groups without the fork server, and wait until nothing in them runs or time is up."""
        groups = [child.pid for child in self.all.values() if child.pid is not None and not child.link.machine]
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


def _open_log(role: Role, held: contextlib.ExitStack) -> int:
    """The descriptor of a role's log, open as long as `held`."""
    try:
        role.log.parent.mkdir(parents=True, exist_ok=True)
        return held.enter_context(role.log.open("ab")).fileno()
    except OSError as error:
        raise OutputError(
            f"The log of {role} cannot be written: {error}. Choose a place where this user may write."
        ) from error


def order_for(number: int, role: Role) -> wire.Fork:
    """The fork server's order for a role; a config that is not plain data is refused here."""
    order = wire.Fork(
        id=number,
        label=str(role),
        entry=role.entry,
        config=dict(role.config),
        # Another machine has its own.
        environment={**({} if role.machine else os.environ), **role.environment},
        directory=str(Path.cwd()),
        path=[entry or str(Path.cwd()) for entry in sys.path],
        threads=role.threads,
        network=None if role.network is None else str(role.network),
        patience=role.patience,
    )
    try:
        wire.frame(order)
    except UsageError as error:
        raise UsageError(f"The config of {role} cannot be passed on. {error}") from error
    return order
