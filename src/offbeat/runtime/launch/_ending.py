"""The end of a child: what the interpreter does when a program ends, with a notice and a deadline.

As under plain `python`: `threading` shuts down first, which tells executors to end and waits for every thread that is
not a daemon; then the handlers of `atexit` run, one of which waits for the processes of `multiprocessing`; then files
that are still open are written out. Plain Python waits in silence and for ever. Here whoever is waited for is named
after a few seconds, and when the role's patience is over the wait fails.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

NOTICE_SECONDS = 5.0
"""How long a role that has succeeded may take to end before it is said whom it waits for."""
FAILED_SECONDS = 1.0
"""How long the end may take after a failure, when it may well wait for peers that are gone."""
_ARCHIVES = (("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LIBC = ctypes.CDLL(None)


class Ending:
    """The end of one child, which may take so many seconds.

    `say` is called with whom it waits for after `NOTICE_SECONDS`, and `give_up` with the same when the time is over,
    just before the process ends with exit code 1.
    """

    def __init__(self, seconds: float, say: Callable[[str], None], give_up: Callable[[str], None]) -> None:
        self._seconds, self._say, self._give_up = seconds, say, give_up
        self._over = threading.Event()
        self._main = threading.get_ident()
        threading.Thread(target=self._watch, name="offbeat-exit-deadline", daemon=True).start()

    def shut_down_threads(self) -> None:
        """Wait for all threads that are not daemons, as the interpreter does."""
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]

    def run_handlers(self) -> None:
        """Run the handlers of `atexit` and write out what open files hold back; nothing may follow."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        _write_out_files()
        flush()
        self._over.set()

    def _watch(self) -> None:
        deadline = time.monotonic() + self._seconds
        if self._over.wait(min(NOTICE_SECONDS, self._seconds)):
            return
        if time.monotonic() < deadline:
            self._say(self._awaited())
            if self._over.wait(deadline - time.monotonic()):
                return
        with suppress(Exception):
            self._give_up(self._awaited())
        os._exit(1)

    def _awaited(self) -> str:
        """Threads and processes that have not ended, or the exit handler that has not returned."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        threads = [t for t in threading.enumerate() if not t.daemon and t.ident != self._main and t.is_alive()]
        found = [f"thread {t.name!r}{_position(frames.get(t.ident or 0))}" for t in threads]
        if not found:
            found = [f"process {name!r}" for name in _child_processes()]
        return ", ".join(found) or f"an exit handler{_position(frames.get(self._main))}"


def flush() -> None:
    """Write out what the standard streams hold back."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _LIBC.fflush(None)


def _child_processes() -> list[str]:
    """Processes of `multiprocessing` that are not daemons: its exit handler joins them."""
    if "multiprocessing.process" not in sys.modules:
        return []
    from multiprocessing import process

    # Not active_children(), which would reap them under the hands of the thread that is joining them.
    children: Iterable[process.BaseProcess] = process._children  # pyright: ignore[reportAttributeAccessIssue]
    return [child.name for child in list(children) if not child.daemon]


def _position(frame: FrameType | None) -> str:
    """` (train.py:12 in upload)`: where a thread is, in code that is not the standard library's if there is any."""
    at = frame
    while at is not None and at.f_code.co_filename.startswith((_STANDARD_LIBRARY, "<frozen")):
        at = at.f_back
    at = at or frame
    if at is None or Path(at.f_code.co_filename).parent == Path(__file__).parent:
        return ""
    return f" ({Path(at.f_code.co_filename).name}:{at.f_lineno} in {at.f_code.co_name})"


def _write_out_files() -> None:
    """Do for files that a script has left open what the interpreter does when it takes modules down.

    Objects are not destroyed here, so no `__del__` runs: those of libraries with threads of their own crash at that
    point often enough.
    """
    archives = [getattr(sys.modules[name], kind) for name, kind in _ARCHIVES if name in sys.modules]
    things = gc.get_objects()
    # In this order: a text is encoded into an archive, an archive is compressed into a file.
    _each(things, (io.TextIOWrapper,), lambda text: text.flush())
    _each(things, tuple(archives), lambda archive: archive.close())
    _each(things, (io.BufferedWriter, io.BufferedRandom), lambda file: file.flush())


def _each(things: Sequence[object], kinds: tuple[type, ...], act: Callable[[Any], None]) -> None:
    wanted = {kind for kind in set(map(type, things)) if issubclass(kind, kinds)}
    for thing in things:
        if type(thing) in wanted:
            with suppress(OSError, ValueError):
                act(thing)
