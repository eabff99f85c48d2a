"""A forked child, from its first instruction to its last.

Random state is left as the fork made it: Python re-seeds `random` in every forked child, while numpy's legacy global
generator and torch's default generator start alike in all children. A role that draws from those must seed them, as it
would for a repeatable run anyway.
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
from offbeat.runtime.launch._control import Control, describe
from offbeat.runtime.launch._messages import Exiting, Fork
from offbeat.runtime.launch._rendezvous import use_private_store
from offbeat.runtime.launch._shutdown import FAILED_SECONDS, Shutdown, flush
from offbeat.runtime.run.rank_environment import STORE

_PR_SET_PDEATHSIG = 1
_IO_LINE_BUFFERED = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def live(order: Fork, control: int, log: int, unneeded: Iterable[int], parent: int) -> NoReturn:
    """Run the ordered role, then exit; never returns into the fork server's code."""
    code = 1
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died between the fork and this request, which then never fires.
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        for descriptor in unneeded:
            os.close(descriptor)
        _redirect(log)
        code = _run(order, Control(socket.socket(fileno=control)))
    except BaseException:
        # Last resort: what could not be reported to the launcher goes to the log.
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            flush()
        os._exit(code)


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
    # C and C++ libraries print through stdio, which buffers until exit because a file is not a terminal.
    _LIBC.setvbuf(ctypes.c_void_p.in_dll(_LIBC, "stdout"), None, _IO_LINE_BUFFERED, 0)
    faulthandler.enable()


def _run(order: Fork, control: Control) -> int:
    failed = False
    try:
        _reset_signals()
        _set_up(order)
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

    def warn(awaited: str) -> None:
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

    shutdown = Shutdown(seconds, warn, give_up)
    try:
        shutdown.join_threads()
    except KeyboardInterrupt as error:
        _report(error, control)
        code = 1
    except Exception:
        traceback.print_exc()  # As the interpreter does before it runs the exit handlers.
    shutdown.run_handlers()
    return code


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The server forks with SIGINT blocked, so that an early one waits until here instead of being lost.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _set_up(order: Fork) -> None:
    if order.network is not None:
        enter(Path(order.network))
    gc.enable()
    # Gloo listens on loopback and keeps every connection, so any local user takes descriptors from the process; when
    # none is left, it is aborted. The soft limit is commonly 1,024, the hard one a thousand times as much.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
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


def _exit_code(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1
