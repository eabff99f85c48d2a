"""Waits of one worker for the others: counted, watched by its presence, and explained when they fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace, TracebackType
from typing import Any

from offbeat.errors import RunError, WaitError
from offbeat.runtime.backend import CollectiveError, MismatchError
from offbeat.runtime.groups.connection import ROLL_CALL, Connection, presence_store
from offbeat.runtime.groups.presence import Presence


class Waits:
    """The waits of one worker in one lane."""

    def __init__(self, rank: int, size: int, timeout: timedelta, connection: Connection | None) -> None:
        self._rank, self._size, self._timeout, self._connection = rank, size, timeout, connection
        self.name, self.count = "0", 0
        """The lane, and the exchanges begun in it."""
        lanes: list[Waits] = [self]
        self._lanes = lanes
        self.presence: Any = SimpleNamespace(waiting=None)
        """Where this worker reports its waits; nowhere if it is alone."""
        if connection is not None:
            store = presence_store(connection.store, connection.number)
            presence = Presence(store, rank, size, lambda: {lane.name: lane.count for lane in lanes})
            presence.break_off = lambda _error: connection.abort()
            self.presence = presence

    def lane(self, number: int) -> Waits:
        """The waits in another lane of the same worker."""
        lane = Waits(self._rank, self._size, self._timeout, None)
        lane.name, lane.presence, lane._connection = str(number), self.presence, self._connection
        self._lanes.append(lane)
        return lane

    def explained(self, error: RuntimeError, what: str, number: int, since: float) -> RunError:
        """An error that says which workers had not arrived, or that a connection broke.

        Gloo raises a RuntimeError for both. A failure before the timeout is not a timeout.
        """
        verdict = getattr(self.presence, "verdict", None)
        if verdict is not None:
            return verdict
        text = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        place = f"worker {self._rank} in {what} (exchange {number})"
        seconds, connection = self._timeout.total_seconds(), self._connection
        if time.monotonic() - since < 0.99 * seconds or connection is None:
            if not isinstance(error, CollectiveError):
                return WaitError(f"{place} lost its connection to another worker, which has most likely died: {text}")
            patience = ROLL_CALL if isinstance(error, MismatchError) else timedelta(0)
            came = {} if connection is None else connection.roll_call(self.name, number, what, patience)
            apart = ", ".join(f"worker {rank} in {where}" for rank, where in sorted(came.items()) if where != what)
            if apart:
                return WaitError(
                    f"{place} met {apart}. Every worker must make the same calls in the same order: does one of them "
                    f"make a call, such as `team.report`, that the others do not?"
                )
            return WaitError(f"{place}: {text}")  # It names the dead ranks, or the others' calls.
        came = connection.roll_call(self.name, number, what)
        missing = [str(rank) for rank in range(self._size) if rank not in came]
        who = f"worker{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "nobody in particular"
        return WaitError(
            f"{place} waited {seconds:g} s for {who}. Look at the log of whoever is missing, "
            f"or, if such a wait is normal for this program, allow more with --timeout."
        )


class ExchangeWait:
    """One exchange that this worker waits in: a context around a wait, or a handle of work in flight."""

    spare = 0
    work: Any = None
    """The torch work, if it is waited for later."""
    then: Callable[[], None] | None = None
    """Called when that is done."""

    def __init__(self, waits: Waits, what: str) -> None:
        waits.count += 1
        self._waits, self.lane, self.what, self.number = waits, waits.name, what, waits.count
        self._since = time.monotonic()

    def __enter__(self) -> None:
        self._waits.presence.waiting = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and isinstance(error, RuntimeError):
                raise self._waits.explained(error, self.what, self.number, self._since) from error
        finally:
            self._waits.presence.waiting = None

    def wait(self) -> None:
        """Wait for the work, and explain its failure."""
        with self:
            self.work.wait()
        if self.then is not None:
            self.then()
            self.then = None
