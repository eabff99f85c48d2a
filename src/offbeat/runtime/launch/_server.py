"""The fork server: imports slow modules once, then forks a role in milliseconds.

It has one thread, no state but its children, and ends them all when its launcher is gone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Never, assert_never

from offbeat.runtime.launch import _child
from offbeat.runtime.launch import messages as wire

TURN = 0.5  # Seconds between checks that the launcher is alive, in case its socket does not tell.
FAREWELL = 5.0  # Seconds to wait for killed children before exiting anyway.

_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """Forks, signals and reaps the roles of one launcher."""

    def __init__(self, end: socket.socket) -> None:
        self._channel: wire.Channel[wire.ToServer] = wire.Channel(end, wire.ToServer, "the launcher")
        self._launcher = os.getppid()
        self._roles: dict[int, int] = {}  # process -> id of its role
        self._lingering: set[int] = set()  # process groups whose leader has ended
        self._draining = False
        self._wake, self._bell = socket.socketpair()
        self._selector = selectors.PollSelector()

    def serve(self) -> None:
        """Do what the launcher orders until it is gone."""
        self._wake.setblocking(False)
        self._bell.setblocking(False)
        signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        # Adopt a role's orphans, so that it is known when the last of a group is gone.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            while not self._channel.ended and os.getppid() == self._launcher:
                for message in self._next():
                    self._obey(message)
        except BrokenPipeError:
            pass  # The launcher went away during a send.
        finally:
            self._end_all()

    def _next(self) -> list[wire.ToServer]:
        # Members of a group whose parent is another process end without notice.
        ready = {key.fileobj for key, _ in self._selector.select(0.02 if self._lingering else TURN)}
        if self._wake in ready:
            self._wake.recv(4096)
        self._reap()
        return self._channel.receive() if self._channel in ready else []

    def _obey(self, message: wire.ToServer) -> None:
        match message:
            case wire.LauncherHello():
                self._preload(message)
            case wire.Fork():
                self._fork(message)
            case wire.Signal():
                self._signal(message)
            case wire.Drain():
                self._draining = True
                self._answer_drain()
            case _:
                assert_never(message)

    def _preload(self, hello: wire.LauncherHello) -> None:
        sys.path[:] = hello.path
        # A hung import would notice nothing, not even the end of its launcher.
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(int(wire.PRELOAD_DEADLINE))
        for name in hello.preload:
            try:
                importlib.import_module(name)
            except BaseException as error:
                self._fail(f"it could not import {name!r}: {type(error).__name__}: {error}", traceback.format_exc())
        signal.alarm(0)
        faulthandler.unregister(signal.SIGALRM)
        if (problem := several_threads()) is not None:
            self._fail(problem, "")
        gc.collect()
        gc.disable()
        gc.freeze()
        self._channel.send(wire.ServerReady())

    def _fail(self, message: str, trace: str) -> Never:
        self._channel.send(wire.Broken(message, trace))
        raise SystemExit(1)

    def _fork(self, order: wire.Fork) -> None:
        control, log = self._channel.descriptors[:2]
        del self._channel.descriptors[:2]
        try:
            if (problem := several_threads()) is not None:
                self._channel.send(wire.ForkRefused(order.id, problem))
                return
            server = os.getpid()
            process = os.fork()
            if process == 0:
                own = (self._channel.fileno(), self._wake.fileno(), self._bell.fileno(), *self._channel.descriptors)
                _child.live(order, control, log, own, server)
            self._roles[process] = order.id
            self._channel.send(wire.Forked(order.id, process))
        except OSError as error:
            self._channel.send(wire.ForkRefused(order.id, f"the system refused to fork: {error}"))
        finally:
            os.close(control)
            os.close(log)

    def _signal(self, order: wire.Signal) -> None:
        for process, role in self._roles.items():
            if role == order.id:
                _signal_group(process, order.number)
                if order.number == signal.SIGINT:
                    # A stopped process keeps SIGINT pending; continued, it can clean up.
                    _signal_group(process, signal.SIGCONT)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if ended is None:
                break
            if ended.si_pid in self._roles:
                self._bury(ended.si_pid)
            else:
                os.waitpid(ended.si_pid, 0)
        self._lingering = {group for group in self._lingering if _group_exists(group)}
        self._answer_drain()

    def _bury(self, process: int) -> None:
        at = time.monotonic()
        # Before the wait, while the group's number cannot be reused.
        _signal_group(process, signal.SIGKILL)
        self._lingering.add(process)
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        role = self._roles.pop(process)
        self._channel.send(wire.RoleEnded(role, None, -code, at) if code < 0 else wire.RoleEnded(role, code, None, at))

    def _answer_drain(self) -> None:
        if self._draining and not self._roles and not self._lingering:
            self._draining = False
            self._channel.send(wire.Drained())

    def _end_all(self) -> None:
        deadline = time.monotonic() + FAREWELL
        self._channel.close()
        self._draining = False
        for process in self._roles:
            _signal_group(process, signal.SIGKILL)
        while self._roles and time.monotonic() < deadline:
            for process in list(self._roles):
                if os.waitpid(process, os.WNOHANG)[0]:
                    del self._roles[process]
            time.sleep(0.005)


def several_threads() -> str | None:
    """Why this process must not fork, if it has several threads: a fork would copy their locks, held forever."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(names) == 1:
        return None
    return (
        f"it has {len(names)} threads ({', '.join(names)}) and must have one to fork safely. A module it imports "
        "beforehand starts threads: take it out of `preload`."
    )


def _signal_group(leader: int, number: int) -> None:
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        # The child has not made its group yet; until it is reaped, its number is its own.
        os.kill(leader, number)


def _group_exists(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except OSError:
        # Gone, or owned by a user that the role changed to, which we could not end anyway.
        return False
    return True


def main(descriptor: int) -> None:
    """Serve the launcher at the other end of a socket."""
    faulthandler.enable()
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])
    ForkServer(socket.socket(fileno=descriptor)).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
