"""Ctrl-C and SIGTERM while a run goes on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Counts SIGINT and SIGTERM instead of letting them break off the launcher between two instructions.

    Within `raising()`, where the caller's own code runs, the first one raises KeyboardInterrupt as usual. Handlers
    that an application has set for itself are left alone, and so are threads other than the main one.
    """

    def __init__(self) -> None:
        self.count = 0
        """How many have come."""
        self._may_raise = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                if signal.getsignal(number) is usual:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def raising(self) -> Generator[None, None, None]:
        """Let the first interrupt raise KeyboardInterrupt in the body."""
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self._may_raise and self.count == 1:
            raise KeyboardInterrupt
