"""The launcher: roles as real processes, forked in milliseconds from a server that has imported torch.

A run forks the roles, pumps their messages, notices failures, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any, assert_never

import msgspec

from offbeat.errors import RunError, UsageError, WaitError
from offbeat.runtime.launch import messages as wire
from offbeat.runtime.launch._children import Child, Children, ForkServerLink, MachineLink, ServerGoneError, order_for
from offbeat.runtime.launch._roles import SETTLE, Failures, RemoteError, Role, RoleOutcome, error_for

TICK = 0.1  # Seconds between calls of `on_tick`.
FORK_DEADLINE = 30.0  # Seconds for the fork server to fork all roles.
SETTLE_FAR = 7.0
"""Seconds to wait for a better explanation than a lost peer where machines may be lost: longer than their silence."""
KILL_DEADLINE = 10.0  # Seconds for the kernel to end processes after SIGKILL.
PRELOAD = ("numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "safetensors.torch")
"""Imports of nearly every role, paid for once per launcher instead of once per process."""
GRACE = timedelta(seconds=1.25)
"""From SIGINT to SIGKILL: with the settling time before it, a failure is raised within two seconds."""

OnMessage = Callable[[Role, dict[str, Any]], None]
OnTick = Callable[[], None]
OnEnd = Callable[[RoleOutcome], None]


class Interrupts:
    """Counts SIGINT and SIGTERM instead of letting them interrupt the launcher between two instructions.

    Within `raising()`, where the caller's code runs, the first one raises KeyboardInterrupt as usual. An application's
    own handlers are left alone, and so are threads other than the main one.
    """

    def __init__(self) -> None:
        self.count = 0  # How many have come.
        self._may_raise = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                if signal.getsignal(number) is default:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def raising(self) -> Generator[None]:
        """Let the first interrupt raise KeyboardInterrupt in the body."""
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self._may_raise and self.count == 1:
            raise KeyboardInterrupt


class LaunchedRun:
    """One run; used once."""

    def __init__(
        self,
        link: ForkServerLink | None,
        machines: Sequence[MachineLink],
        on_message: OnMessage,
        on_tick: OnTick,
        on_end: OnEnd,
        grace: timedelta,
        interrupts: Interrupts,
    ) -> None:
        self._link, self._grace, self._interrupts = link, grace.total_seconds(), interrupts
        self._links: list[MachineLink] = [*([] if link is None else [link]), *machines]
        self._on_message, self._on_tick, self._on_end = on_message, on_tick, on_end
        self._children = Children(self._links)
        self._failures = Failures(SETTLE_FAR if machines else SETTLE)
        self._next_tick = 0.0
        self._silenced = False
        self._ending_since: float | None = None
        self._killed = False
        self._drained: set[str] = set()
        self._problem: BaseException | None = None  # raised while ending

    def go(self, roles: Sequence[Role]) -> list[RoleOutcome]:
        """Run the roles to their end."""
        with contextlib.closing(self._children):
            orders = [order_for(number, role) for number, role in enumerate(roles)]
            try:
                self._await_server()
                self._fork(roles, orders)
                self._turn_until(self._is_decided)
            except ServerGoneError:
                self._children.give_up_here()  # _end reports why.
            except BaseException:
                self._end()
                raise
            self._end()
        outcomes = self._children.outcomes()
        cause = self._failures.cause(done=any(o.exit_code == 0 for o in outcomes if not o.role.serves))
        if cause is not None and not (cause.is_consequence and self._problem is not None):
            raise error_for(cause)
        if self._interrupts.count:
            raise KeyboardInterrupt
        if self._problem is not None:
            raise self._problem
        return outcomes

    # -- starting

    def _await_server(self) -> None:
        self._turn_until(lambda: self._children.are_ready() or self._interrupts.count > 0, wire.PRELOAD_DEADLINE)
        if not self._interrupts.count:
            self._children.refuse_unready()

    def _fork(self, roles: Sequence[Role], orders: Sequence[wire.Fork]) -> None:
        for role, order in zip(roles, orders, strict=True):
            if self._interrupts.count:
                return
            self._children.order(order, role)
        self._turn_until(lambda: not self._children.unforked() or self._is_decided(), FORK_DEADLINE)
        if self._children.unforked() and not self._is_decided():
            missing = ", ".join(str(child.role) for child in self._children.unforked())
            raise WaitError(f"The fork server did not start {missing} within {FORK_DEADLINE:g} s.")

    def add(self, role: Role) -> None:
        """Start one more role, unless the run is ending."""
        if self._ending_since is None:
            if any(str(child.role) == str(role) for child in self._children.living()):
                raise UsageError(f"{role} is running: another can take its place only when it has ended.")
            self._children.order(order_for(len(self._children.all), role), role)

    def kill(self, role: str) -> None:
        """Kill this role's process, if it lives."""
        self._children.signal(signal.SIGKILL, role)

    # -- running

    def _is_decided(self) -> bool:
        if self._interrupts.count or all(child.role.serves for child in self._children.living()):
            return True
        return self._failures.decide()

    def _turn_until(self, done: Callable[[], bool], seconds: float | None = None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done() and (deadline is None or time.monotonic() < deadline):
            self._turn(deadline)

    def _turn(self, deadline: float | None) -> None:
        now = time.monotonic()
        until = self._next_tick if deadline is None else min(self._next_tick, deadline)
        for key, _ in self._children.selector.select(max(0.0, until - now)):
            speaker: Child | MachineLink = key.data
            if not isinstance(speaker, Child):
                self._attend(speaker)
            elif speaker.outcome is None:
                self._hear(speaker, speaker.channel.receive)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK
            self._children.end_stopped(time.monotonic())
            self._call(self._on_tick)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        if self._silenced:
            return
        self._silenced = True  # Stays so if the callback raises.
        try:
            with self._interrupts.raising() if self._ending_since is None else contextlib.nullcontext():
                callback(*arguments)
            self._silenced = False
        except Exception as error:
            if self._ending_since is None:
                raise
            # A callback cannot stop the run from ending.
            self._problem = self._problem or error

    def _hear(self, child: Child, receive: Callable[[], list[wire.FromChild]]) -> None:
        try:
            messages = receive()
        except (RunError, msgspec.MsgspecError) as error:
            self._children.stop_hearing(child)
            if self._ending_since is None:
                raise RunError(f"{child.role} sent a message that cannot be read: {error}") from error
            return  # While ending, a message may have been cut short.
        for message in messages:
            if isinstance(message, wire.Note):
                self._call(self._on_message, child.role, message.content)
            elif isinstance(message, wire.Exiting):
                if self._ending_since is None or message.at < self._ending_since:
                    self._failures.announced.append(RoleOutcome(child.role, message.code, at=message.at))
            else:
                self._note_error(child, message)
        if child.channel.ended:
            self._children.stop_hearing(child)

    def _attend(self, link: MachineLink) -> None:
        """Hear what a machine's fork server says."""
        for message in link.channel.receive():
            self._heed(message, link)
        if link.channel.ended:
            if link is self._link:
                raise ServerGoneError
            self._lose(link)

    def _lose(self, link: MachineLink) -> None:
        """A machine is gone: one event, which ends all that ran there."""
        for failure in self._children.lose(link):
            if failure.role.tolerates(None):
                self._failures.tolerated.append(failure)
            elif self._ending_since is None:
                self._failures.add(failure)
            self._call(self._on_end, replace(failure, error=None))

    def _heed(self, message: wire.FromServer, link: MachineLink) -> None:
        match message:
            case wire.ServerReady():
                link.is_ready = True
            case wire.Broken():
                link.is_usable = False
                error = RunError(f"The fork server, which starts all processes of a run, failed: {message.message}")
                if message.traceback:
                    error.add_note(f"In the fork server:\n{message.traceback.rstrip()}")
                raise error
            case wire.Forked():
                self._children.all[message.id].pid = message.pid
            case wire.ForkRefused():
                child = self._children.all[message.id]
                child.outcome = RoleOutcome(child.role)
                raise RunError(f"The fork server could not start {child.role}: {message.message}")
            case wire.RoleEnded():
                self._note_end(self._children.all[message.id], message)
            case wire.Drained():
                self._drained.add(link.machine)
            case _:
                assert_never(message)

    def _note_error(self, child: Child, error: RemoteError) -> None:
        child.error = error
        if self._ending_since is None or error.at < self._ending_since:
            if error.type_name == KeyboardInterrupt.__name__:
                child.interrupted = True  # By SIGINT from outside; its process will end soon.
            else:
                self._failures.add(RoleOutcome(child.role, error=error, at=error.at))

    def _note_end(self, child: Child, message: wire.RoleEnded) -> None:
        if child.channel.fileno() >= 0:
            self._hear(child, child.channel.receive_rest)
        self._children.stop_hearing(child)
        code, number, error = message.exit_code, message.signal, child.error
        if child.interrupted and code is not None:
            code, number, error = None, int(signal.SIGINT), None
        child.outcome = RoleOutcome(child.role, code, number, error, message.at)
        self._call(self._on_end, child.outcome)
        if code == 0 or error is not None:
            return
        failure = replace(child.outcome, error=child.standstill)
        if self._ending_since is None and child.role.tolerates(code):
            self._failures.tolerated.append(failure)
        # While ending, only a SIGKILL that we did not send is a cause.
        elif self._ending_since is None or (number == signal.SIGKILL and not self._killed):
            self._failures.add(failure)

    # -- ending

    def _end(self) -> None:
        """End every living child and wait until it is gone; keeps errors instead of raising them."""
        self._ending_since = time.monotonic()
        try:
            self._end_through_server()
        except BaseException as error:
            problem = error
            if self._link is not None:
                self._link.kill()
                self._children.kill_groups(KILL_DEADLINE)
                problem = RunError(self._link.obituary()) if isinstance(error, ServerGoneError) else error
            self._problem = self._problem or problem

    def _end_through_server(self) -> None:
        if self._link is not None and not self._link.is_usable:
            raise ServerGoneError
        # Callbacks are no longer interruptible: from here on, another interrupt means "at once".
        before = self._interrupts.count
        if self._children.living():
            self._children.signal(signal.SIGINT)
            self._turn_until(lambda: not self._children.living() or self._interrupts.count > before, self._grace)
        if self._children.living():
            self._killed = True
            self._children.signal(signal.SIGKILL)
            self._turn_until(lambda: not self._children.living(), KILL_DEADLINE)
        if living := self._children.living():
            names = ", ".join(str(child.role) for child in living)
            raise WaitError(f"{names} did not end within {KILL_DEADLINE:g} s of SIGKILL.")
        if not self._children.all:
            return  # The server may still be importing and not listen.
        for link in self._links:
            if link.is_usable:
                link.send(wire.Drain())

        def drained() -> bool:
            return all(link.machine in self._drained for link in self._links if link.is_usable)

        self._turn_until(drained, KILL_DEADLINE)
        if not drained():
            raise WaitError(f"Processes that the roles had started did not end within {KILL_DEADLINE:g} s of SIGKILL.")


class Launcher:
    """Starts roles as processes and ends them all, whatever happens; a context manager.

    It can do several runs in sequence, and one process can have several launchers.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._preload = tuple(preload)
        self._link: ForkServerLink | None = None
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
        on_tick: OnTick = lambda: None,
        on_end: OnEnd = lambda _outcome: None,
        grace: timedelta = GRACE,
        machines: Sequence[MachineLink] = (),
    ) -> list[RoleOutcome]:
        """Run roles until all except servers have succeeded; the first failure ends the others and is raised.

        `on_message(role, message)`, `on_end(outcome)` for each role and `on_tick()`, about ten times a second, are
        called on this thread. `machines` are those where roles with a `machine` run.
        """
        if self._run is not None:
            raise UsageError("This launcher is already running roles: wait for its end, or make a second launcher.")
        names = [str(role) for role in roles]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"Each role needs a rank of its own: {', '.join(duplicates)} was given more than once.")
        try:
            here = any(not role.machine for role in roles)
            if here:
                self.start()
            with Interrupts() as interrupts:
                link = self._link if here else None
                self._run = LaunchedRun(link, machines, on_message, on_tick, on_end, grace, interrupts)
                return self._run.go(roles)
        finally:
            self._run = None
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
