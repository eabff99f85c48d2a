"""A child's connection to its launcher, and exceptions as the messages it sends."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec

from offbeat import errors
from offbeat.runtime.launch._messages import Note, frame
from offbeat.runtime.launch._roles import RemoteError

LAUNCHER_GONE = 75  # Exit code of a child whose launcher is gone; nobody is left to read it.
_LONGEST = 200_000

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
        self.report(describe(error, time.monotonic(), ours=__file__))

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


def describe(error: BaseException, at: float, ours: str) -> RemoteError:
    """The message about an exception; its traceback omits leading frames from the file `ours`."""
    kind = type(error)
    builtin = kind.__module__ in ("builtins", "__main__", "offbeat.errors")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == ours:
        frames = frames.tb_next
    # With no other frames the exception was raised in `ours` itself: then show all of them.
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
