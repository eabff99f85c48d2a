"""What a forked child does, from its first instruction to its last.

Random state is left as the fork made it: Python re-seeds `random` in every forked child by itself, while
numpy's legacy global generator and torch's default generator start alike in all children. A role that draws
from those seeds them, as it would have to for a repeatable run anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from offbeat.errors import WaitError
from offbeat.runtime.hosts.network_namespace import enter
from offbeat.runtime.launch._control import Control
from offbeat.runtime.launch._ending import FAILED_SECONDS, Ending, flush
from offbeat.runtime.launch._messages import Exiting, Fork
from offbeat.runtime.launch._rendezvous import use_private_store
from offbeat.runtime.launch._report import describe
from offbeat.runtime.run.rank_environment import STORE

_PR_SET_PDEATHSIG = 1
_IO_LINE_BUFFERED = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def live(order: Fork, control: int, log: int, unneeded: Iterable[int], parent: int) -> NoReturn:
    """Be the role that was ordered, then end; never returns into the fork server's code."""
    code = 1
    try:
        _die_with(parent)
        os.setsid()
        for descriptor in unneeded:
            os.close(descriptor)
        _redirect(log)
        code = _run(order, Control(socket.socket(fileno=control)))
    except BaseException:
        # The last resort: whatever could not be reported to the launcher stands in the log.
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died between the fork and the request, which then never fires.
    if os.getppid() != parent:
        os._exit(1)


def _redirect(log: int) -> None:
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    # C and C++ libraries print through stdio, which would hold lines back until exit since a file is not a terminal.
    _LIBC.setvbuf(ctypes.c_void_p.in_dll(_LIBC, "stdout"), None, _IO_LINE_BUFFERED, 0)
    faulthandler.enable()


def _run(order: Fork, control: Control) -> int:
    failed = False
    try:
        _reset_signals()
        _settle_in(order)
        module, _, name = order.entry.partition(":")
        getattr(importlib.import_module(module), name)(order.config, control)
        code = 0
    except SystemExit as request:
        code = _exit_code(request)
        if code:
            control.report(Exiting(code, time.monotonic()))
    except BaseException as error:
        _report(error, control)
        code, failed = 1, True
    return _end(order, control, code, failed)


def _report(error: BaseException, control: Control) -> None:
    raised_at = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = describe(error, raised_at, ours=__file__)
    control.report(report)
    if not isinstance(error, KeyboardInterrupt):
        print(report.traceback, end="", file=sys.stderr)


def _end(order: Fork, control: Control, code: int, failed: bool) -> int:
    seconds = FAILED_SECONDS if failed else order.patience

    def say(awaited: str) -> None:
        text = f"{order.label} has done its work and waits for {awaited}."
        os.write(2, f"{text}\n".encode())
        control.send({"kind": "lingering", "text": text})

    def give_up(awaited: str) -> None:
        if failed:
            os.write(2, f"{order.label} was ended {seconds:g} s after its failure, in {awaited}.\n".encode())
            return
        faulthandler.dump_traceback(all_threads=True)
        control.fail(
            WaitError(
                f"{order.label} had done its work but did not end within {seconds:g} s, because it waited for "
                f"{awaited}. Let it end before the program does, make it a daemon, or allow more time with --timeout."
            )
        )

    ending = Ending(seconds, say, give_up)
    try:
        ending.shut_down_threads()
    except KeyboardInterrupt as error:
        _report(error, control)
        code = 1
    except Exception:
        traceback.print_exc()  # As the interpreter does, which goes on to the exit handlers.
    ending.run_handlers()
    return code


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The server forks with SIGINT blocked, so that one sent early waits until here instead of being lost.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _settle_in(order: Fork) -> None:
    if order.network is not None:
        enter(Path(order.network))
    gc.enable()
    _allow_descriptors()
    os.chdir(order.directory)
    for name in set(os.environ) - set(order.environment):
        del os.environ[name]
    os.environ.update(order.environment)
    sys.path[:] = order.path
    sys.argv[:] = [order.entry]
    importlib.invalidate_caches()
    if STORE in order.environment:
        use_private_store()
    if order.threads is not None:
        import torch

        torch.set_num_threads(order.threads)


def _allow_descriptors() -> None:
    # Gloo listens on loopback and keeps whatever connects, so any local user takes descriptors from the process; when
    # none is left, it is aborted. The soft limit is commonly 1,024, the hard one a thousand times as much.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _exit_code(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1
