"""Interpreter shutdown of a child, with a warning and a deadline.

As in plain `python`: `threading` shuts down first, which ends executors and joins every non-daemon thread; then
`atexit` handlers run, one of which joins the processes of `multiprocessing`; then open files are flushed. Plain Python
waits silently and forever. Here a warning names what is waited for after a few seconds, and the wait fails once the
role's patience is over.
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
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

NOTICE_SECONDS = 5.0  # How long a successful role may take to exit before a warning names what it waits for.
FAILED_SECONDS = 1.0  # How long a failed role may take to exit: it may well be waiting for peers that are gone.
_ARCHIVES = (("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LIBC = ctypes.CDLL(None)


class Shutdown:
    """The shutdown of one child within the given seconds.

    `warn` is called with what it waits for after `NOTICE_SECONDS`, and `give_up` with the same when time is up, just
    before the process exits with code 1.
    """

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
    """Flush files that a script left open, as the interpreter does when it tears down modules.

    No object is destroyed, so no `__del__` runs: those of libraries with their own threads often crash at this point.
    """
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
