"""A forked child, from its first instruction to its last, and its connection to the launcher.

Random state is left as the fork made it: Python re-seeds `random` in every forked child, while the global generators of
numpy and torch start alike in all children. A role that draws from those must seed them.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import io
import os
import re
import resource
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

from offbeat import errors
from offbeat.runtime.launch._rendezvous import use_private_store
from offbeat.runtime.launch._roles import RemoteError
from offbeat.runtime.launch.messages import Exiting, Fork, Note, frame
from offbeat.runtime.run.rank_environment import STORE

LAUNCHER_GONE = 75  # Exit code of a child whose launcher is gone; nobody is left to read it.
NOTICE_SECONDS = 5.0  # How long a successful role may take to exit before a warning names what it waits for.
FAILED_SECONDS = 1.0  # How long a failed role may take to exit: it may well be waiting for peers that are gone.
_ARCHIVES = (("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LONGEST = 200_000
_PR_SET_PDEATHSIG = 1
_IO_LINE_BUFFERED = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

# Gloo raises bare RuntimeErrors, recognizable only by their text. Examples:
#   [.../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:38421
#   [.../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete
_GLOO = re.compile(r"\bgloo\b|connection (closed|reset) by peer", re.IGNORECASE)


class Control:
    """A role's connection to its launcher, passed to its entry function; only the launcher creates one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._cut = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Send plain data to the launcher's `on_message`; from any thread of the role's process."""
        self.report(Note(dict(message)))

    def fail(self, error: BaseException) -> None:
        """Tell the launcher why the role cannot go on; from any thread, such as one that watches the others."""
        self.report(describe(error))

    def report(self, message: msgspec.Struct) -> None:
        """Send a message of the launcher's own protocol."""
        if os.getpid() != self._process:
            raise errors.UsageError(
                "A process that a role has forked cannot use the role's control: two processes would write into "
                "each other's messages. Send from the role itself."
            )
        data = frame(message)
        # No deadline: a launcher stopped by Ctrl-Z may pause a run, and one that is gone is noticed at once.
        with self._lock:
            if self._cut:
                return
            # Stays true if a signal's exception cuts the frame short: later messages would be unreadable.
            self._cut = True
            try:
                self._socket.sendall(data)
            except OSError:
                os._exit(LAUNCHER_GONE)
            self._cut = False


def describe(error: BaseException) -> RemoteError:
    """The message about an exception; its traceback omits leading frames from this file."""
    at = time.monotonic()
    kind = type(error)
    builtin = kind.__module__ in ("builtins", "__main__", "offbeat.errors")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    # With no other frames the exception was raised in this file itself: then show all of them.
    trace = "".join(traceback.format_exception(kind, error, frames or error.__traceback__))
    ancestors = (base for base in kind.__mro__ if issubclass(base, errors.OffbeatError))
    return RemoteError(
        type_name=kind.__qualname__ if builtin else f"{kind.__module__}.{kind.__qualname__}",
        message=_text(error)[:_LONGEST],
        traceback=trace[-_LONGEST:],
        offbeat_class=next((base.__name__ for base in ancestors if base.__module__ == errors.__name__), None),
        communication=_has_communication_error(error),
        at=at,
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its text could not be made: {type(second).__name__})"


def _has_communication_error(error: BaseException | None) -> bool:
    """Whether the exception, or one in its chain of causes, reports a lost or silent peer."""
    seen: set[int] = set()
    # Only a process that has imported torch.distributed can raise its errors.
    torch_error = getattr(sys.modules.get("torch.distributed"), "DistError", ())
    while error is not None and id(error) not in seen:
        if isinstance(error, (errors.WaitError, ConnectionError, torch_error)):
            return True
        if isinstance(error, RuntimeError) and _GLOO.search(_text(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


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
        with suppress(BaseException):
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = describe(error)
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
            errors.WaitError(
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
        from offbeat.runtime.hosts import enter

        enter(Path(order.network))
    gc.enable()
    # Gloo listens on loopback and keeps every connection, so any local user takes descriptors from the process; when
    # none is left, it is aborted. The soft limit is commonly 1,024, the hard one a thousand times as much.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
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


class Shutdown:
    """The shutdown of one child: tells `warn` what it waits for, and `give_up` once the seconds have passed."""

    def __init__(self, seconds: float, warn: Callable[[str], None], give_up: Callable[[str], None]) -> None:
        self._seconds, self._warn, self._give_up = seconds, warn, give_up
        self._over = threading.Event()
        self._main = threading.get_ident()
        threading.Thread(target=self._watch, name="offbeat-exit-deadline", daemon=True).start()

    def join_threads(self) -> None:
        """Join all non-daemon threads, as the interpreter does."""
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]

    def run_handlers(self) -> None:
        """Run the `atexit` handlers and flush open files; nothing may follow."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        _flush_files()
        flush()
        self._over.set()

    def _watch(self) -> None:
        deadline = time.monotonic() + self._seconds
        if self._over.wait(min(NOTICE_SECONDS, self._seconds)):
            return
        if time.monotonic() < deadline:
            self._warn(self._awaited())
            if self._over.wait(deadline - time.monotonic()):
                return
        with suppress(Exception):
            self._give_up(self._awaited())
        os._exit(1)

    def _awaited(self) -> str:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        threads = [t for t in threading.enumerate() if not t.daemon and t.ident != self._main and t.is_alive()]
        waited_for = [f"thread {t.name!r}{_position(frames.get(t.ident or 0))}" for t in threads]
        if not waited_for:
            waited_for = [f"process {name!r}" for name in _child_processes()]
        return ", ".join(waited_for) or f"an exit handler{_position(frames.get(self._main))}"


def flush() -> None:
    """Flush the standard streams of Python and C."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _LIBC.fflush(None)


def _child_processes() -> list[str]:
    """Non-daemon processes of `multiprocessing`, which its exit handler joins."""
    if "multiprocessing.process" not in sys.modules:
        return []
    from multiprocessing import process

    # Not active_children(), which would reap them while another thread joins them.
    children: Iterable[process.BaseProcess] = process._children  # pyright: ignore[reportAttributeAccessIssue]
    return [child.name for child in list(children) if not child.daemon]


def _position(frame: FrameType | None) -> str:
    """` (train.py:12 in upload)`: where a thread is, outside the standard library if possible."""
    at = frame
    while at is not None and at.f_code.co_filename.startswith((_STANDARD_LIBRARY, "<frozen")):
        at = at.f_back
    at = at or frame
    if at is None or Path(at.f_code.co_filename).parent == Path(__file__).parent:
        return ""
    return f" ({Path(at.f_code.co_filename).name}:{at.f_lineno} in {at.f_code.co_name})"


def _flush_files() -> None:
    """Flush files that a script left open, as the interpreter does when it tears down modules."""
    # No object is destroyed, so no `__del__` runs: those of libraries with their own threads often crash at this point.
    archives = [getattr(sys.modules[name], kind) for name, kind in _ARCHIVES if name in sys.modules]
    live = gc.get_objects()

    def each(kinds: tuple[type, ...], act: Callable[[Any], None]) -> None:
        matching = {kind for kind in set(map(type, live)) if issubclass(kind, kinds)}
        for item in live:
            if type(item) in matching:
                with suppress(OSError, ValueError):
                    act(item)

    # In this order: text is encoded into an archive, which is compressed into a file.
    each((io.TextIOWrapper,), lambda text: text.flush())
    each(tuple(archives), lambda archive: archive.close())
    each((io.BufferedWriter, io.BufferedRandom), lambda file: file.flush())
