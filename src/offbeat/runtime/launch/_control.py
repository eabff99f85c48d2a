"""A child's line to its launcher."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from offbeat.errors import UsageError
from offbeat.runtime.launch._messages import Note, frame
from offbeat.runtime.launch._report import describe

LAUNCHER_GONE = 75
"""The exit code of a child that finds its launcher gone; nobody is left to read it."""


class Control:
    """What a role's entry function gets to speak to its launcher; made by the launcher only."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._cut = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Send plain data to the launcher's `on_message`; from any thread of the role's own process."""
        self._put(Note(dict(message)))

    def _put(self, message: msgspec.Struct) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                "A process that a role has forked cannot use the role's control: two processes would write into "
                "each other's messages. Send from the role itself."
            )
        data = frame(message)
        # No deadline: a launcher stopped by Ctrl-Z may pause a run, and one that is gone is noticed at once.
        with self._lock:
            if self._cut:
                return
            # Stays true if a signal's exception cuts the frame short: what came after could not be read.
            self._cut = True
            try:
                self._socket.sendall(data)
            except OSError:
                os._exit(LAUNCHER_GONE)
            self._cut = False

    def fail(self, error: BaseException) -> None:
        """Tell the launcher why the role cannot go on; from any thread, such as one that watches the others."""
        self._put(describe(error, time.monotonic(), ours=__file__))

    def report(self, message: msgspec.Struct) -> None:
        """Send a message of the launcher's own protocol."""
        self._put(message)
