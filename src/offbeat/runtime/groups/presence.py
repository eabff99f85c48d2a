"""Detects waits that cannot end: workers report through the rendezvous store where they wait.

A wait only sets one attribute. A thread checks it a few times a second; only when a worker has stayed in one wait does
it report that, and read where the others are.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from offbeat.errors import WaitError
from offbeat.protocols import attendance
from offbeat.protocols.attendance import FAILED, GONE, HERE, LEAVING, LEFT, WAITING, Attendance

LOOK = 0.25  # Seconds between two checks whether this worker still waits in the same exchange.
CROWD = 64  # Team size above which checks are rarer, so that waiting workers do not overload the store.
BREAK = 0.5  # Seconds for a hopeless wait to be broken off before the process is ended.
YIELD = 2.0  # Seconds by which the error of a failed worker precedes the errors that follow from it.


class Waiting(NamedTuple):
    """A wait of this worker."""

    what: str
    lane: str
    number: int
    spare: int = 0


class Presence:
    """Where this worker and the others are."""

    def __init__(self, store: Any, rank: int, size: int, counts: Callable[[], Mapping[str, int]]) -> None:
        self._store, self._rank, self._size, self._counts = store, rank, size, counts
        self._keys = [f"offbeat/present/{other}" for other in range(size)]
        self._look = 0
        self._reported = Attendance()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.waiting: Any = None
        """This worker's current wait: anything with `what`, `lane`, `number` and `spare`. Set by the waiting code."""
        self.counted: dict[str, Callable[[], int]] = {}  # More lanes, and the exchanges begun on each.
        self.step: Callable[[], int] = lambda: 0  # Steps that this worker has finished.
        self.members: Callable[[], Collection[int]] = lambda: range(size)
        """Ranks of the workers that take part; no worker waits for the others."""
        self.break_off: Callable[[WaitError], None] = lambda _error: None
        """Ends this worker's wait with an error, where that is possible."""
        self.give_up: Callable[[WaitError], None] = _give_up  # Ends this worker, whose wait could not be broken off.
        self.verdict: WaitError | None = None  # Why this worker's wait is hopeless.
        self._report(HERE)
        self._thread = threading.Thread(target=self._watch, name="offbeat presence", daemon=True)
        self._thread.start()

    def _report(self, state: str, wait: Any = None, what: str = "") -> None:
        with self._lock:
            last = self._reported
            self._look += 1
            if last.state in GONE or (last.state == LEAVING and state in (WAITING, LEAVING)):
                # Exchanges that a team makes at its end are not those that others wait in.
                self._reported = msgspec.structs.replace(last, look=self._look)
            else:
                counts = {**self._counts(), **{lane: count() for lane, count in self.counted.items()}}
                place: tuple[Any, ...] = (what,) if wait is None else (wait.what, wait.lane, wait.number, wait.spare)
                self._reported = Attendance(state, self.step(), *place, counts=counts, look=self._look)
            self._store.set(self._keys[self._rank], msgspec.json.encode(self._reported))

    def _team(self) -> dict[int, Attendance]:
        """The last reports of all workers that take part."""
        members = self.members()
        reports = self._store.multi_get(self._keys)
        return {rank: msgspec.json.decode(raw, type=Attendance) for rank, raw in enumerate(reports) if rank in members}

    def _watch(self) -> None:
        pause = LOOK * max(1.0, self._size / CROWD)
        last: Any = None
        before: dict[int, Attendance] = {}
        while not self._over.wait(pause):
            wait = self.waiting
            with suppress(RuntimeError):  # The store may be gone: then the launcher knows more than this thread.
                if self._reported.state == LEAVING:
                    self._report(LEAVING)
                elif wait is not None and wait is last:
                    self._report(WAITING, wait)
                    now = self._team()
                    still = {
                        rank: place
                        for rank, place in now.items()
                        if attendance.same_place(before.get(rank, place), place)
                    }
                    self._judge(still, wait)
                    before = now
                else:
                    last, before = wait, {}

    def _judge(self, team: dict[int, Attendance], wait: Any) -> None:
        missing = attendance.hopeless(team).get(self._rank)
        if not missing or self.waiting is not wait:
            return
        self.verdict = WaitError(attendance.in_words(self._rank, missing, team))
        self.break_off(self.verdict)
        if not self._over.wait(BREAK) and self.waiting is wait:
            self.give_up(self.verdict)

    def leave(self) -> None:
        """Report that this worker has done its last step, until it is closed."""
        self._report(LEAVING)

    def gone(self, failed: bool) -> None:
        """Report that nothing more will come from this worker: because of an error, or because all is done."""
        with suppress(RuntimeError):
            self._report(FAILED if failed else LEFT, what=str(self.verdict or "see its log") if failed else "")

    def await_others(self, seconds: float) -> None:
        """Wait until all others leave too."""
        deadline, pause = time.monotonic() + seconds, 0.001
        while there := {rank: place for rank, place in self._team().items() if place.state not in (LEAVING, LEFT)}:
            failed = [rank for rank, place in there.items() if place.state == FAILED]
            if failed:
                time.sleep(YIELD)
                raise WaitError(
                    f"worker {self._rank} has come to the end of the run, but worker {failed[0]} has failed: "
                    f"{there[failed[0]].what}"
                )
            if time.monotonic() > deadline:
                names = ", ".join(f"worker {rank}" for rank in there)
                raise WaitError(
                    f"worker {self._rank} has come to the end of the run and waited {seconds:g} s for {names}. Look at "
                    f"the log of whoever is missing, or, if such a wait is normal for this program, allow more with "
                    f"--timeout."
                )
            time.sleep(pause)
            pause = min(2 * pause, LOOK)

    def cause(self) -> WaitError | None:
        """Why this worker's wait ended early: its own verdict, or that of a worker that failed first, once known."""
        deadline = time.monotonic() + YIELD
        with suppress(RuntimeError):
            while self.verdict is None and time.monotonic() < deadline:
                for rank, place in self._team().items():
                    if place.state == FAILED and rank != self._rank:
                        return WaitError(f"worker {self._rank} stopped because worker {rank} failed: {place.what}")
                time.sleep(0.02)
        return self.verdict

    def close(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join(timeout=1.0)


def _give_up(error: WaitError) -> None:
    """The last resort of a process whose main thread waits inside torch, out of reach."""
    print(f"offbeat.errors.WaitError: {error}", file=sys.stderr, flush=True)
    os._exit(1)
