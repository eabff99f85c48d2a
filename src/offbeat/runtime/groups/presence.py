"""Whether this worker's waits can end: workers tell each other where they are, through the rendezvous store.

While exchanges come and go nothing is told: a wait is noted in one attribute. A thread looks at it a few times a
second; only when a worker has stayed in one wait does it tell the others where, and reads where they are. A worker that
leaves tells so, and waits until all others leave too, so that what a team does at its end is done by all of it.
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
from offbeat.protocols.attendance import (
    FAILED,
    GONE,
    HERE,
    LEAVING,
    LEFT,
    WAITING,
    Attendance,
    hopeless,
    in_words,
    same_place,
)

LOOK = 0.25
"""Seconds between two looks at whether this worker still waits in the same exchange."""
CROWD = 64
"""Workers from which on looks are rarer, so that those who wait do not keep the store busy."""
BREAK = 0.5
"""Seconds for a wait that is hopeless to be broken off before the process is given up."""
YIELD = 2.0
"""Seconds that the error of a worker that has failed is given to be heard before the errors that follow from it."""


class Waiting(NamedTuple):
    """A wait of this worker."""

    what: str
    lane: str
    number: int
    spare: int = 0


class Presence:
    """Where this worker is, and where the others are."""

    def __init__(self, store: Any, rank: int, size: int, counts: Callable[[], Mapping[str, int]]) -> None:
        self._store, self._rank, self._size, self._counts = store, rank, size, counts
        self._keys = [f"offbeat/present/{other}" for other in range(size)]
        self._look = 0
        self._told = Attendance()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.waiting: Any = None
        """The wait that this worker is in: anything with `what`, `lane`, `number` and `spare`. Set by who waits."""
        self.counted: dict[str, Callable[[], int]] = {}
        """More lanes, and how many exchanges were begun on each."""
        self.step: Callable[[], int] = lambda: 0
        """Steps that this worker has finished."""
        self.members: Callable[[], Collection[int]] = lambda: range(size)
        """Ranks of those who take part; the others are waited for by nobody."""
        self.break_off: Callable[[WaitError], None] = lambda _error: None
        """Ends this worker's wait, as far as that is possible, with an error."""
        self.give_up: Callable[[WaitError], None] = _give_up
        """Ends this worker, whose wait could not be broken off."""
        self.verdict: WaitError | None = None
        """Why this worker's wait is hopeless."""
        self._tell(HERE)
        self._thread = threading.Thread(target=self._watch, name="offbeat presence", daemon=True)
        self._thread.start()

    # -- telling -----------------------------------------------------------------------------------------------------

    def _tell(self, state: str, wait: Any = None, what: str = "") -> None:
        with self._lock:
            told = self._told
            self._look += 1
            if told.state in GONE or (told.state == LEAVING and state in (WAITING, LEAVING)):
                # Exchanges that a team makes at its end are not those that others wait in.
                told = msgspec.structs.replace(told, look=self._look)
            else:
                counts = {**self._counts(), **{lane: count() for lane, count in self.counted.items()}}
                told = Attendance(state, self.step(), what, counts=counts, look=self._look)
                if wait is not None:
                    told = msgspec.structs.replace(
                        told, what=wait.what, lane=wait.lane, number=wait.number, spare=wait.spare
                    )
            self._told = told
            self._store.set(self._keys[self._rank], msgspec.json.encode(told))

    def _team(self) -> dict[int, Attendance]:
        """Where everybody is who takes part, as last told."""
        members = self.members()
        told = self._store.multi_get(self._keys)
        return {rank: msgspec.json.decode(one, type=Attendance) for rank, one in enumerate(told) if rank in members}

    # -- waits that cannot end ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause = LOOK * max(1.0, self._size / CROWD)
        last: Any = None
        before: dict[int, Attendance] = {}
        while not self._over.wait(pause):
            wait = self.waiting
            with suppress(RuntimeError):  # The store may be gone: then the launcher knows more than this thread.
                if self._told.state == LEAVING:
                    self._tell(LEAVING)
                elif wait is not None and wait is last:
                    self._tell(WAITING, wait)
                    now = self._team()
                    still = {rank: one for rank, one in now.items() if same_place(before.get(rank, one), one)}
                    self._judge(still, wait)
                    before = now
                else:
                    last, before = wait, {}

    def _judge(self, team: dict[int, Attendance], wait: Any) -> None:
        missing = hopeless(team).get(self._rank)
        if not missing or self.waiting is not wait:
            return
        self.verdict = WaitError(in_words(self._rank, missing, team))
        self.break_off(self.verdict)
        if not self._over.wait(BREAK) and self.waiting is wait:
            self.give_up(self.verdict)

    # -- the end -----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell the others that this worker has done its last step, and goes on telling until it is closed."""
        self._tell(LEAVING)

    def gone(self, failed: bool) -> None:
        """Tell the others that nothing more will come from here: because of an error, or because all is done."""
        with suppress(RuntimeError):
            self._tell(FAILED if failed else LEFT, what=str(self.verdict or "see its log") if failed else "")

    def await_others(self, seconds: float) -> None:
        """Wait until all others leave too."""
        deadline, pause = time.monotonic() + seconds, 0.001
        while there := {rank: one for rank, one in self._team().items() if one.state not in (LEAVING, LEFT)}:
            failed = [rank for rank, one in there.items() if one.state == FAILED]
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

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join(timeout=1.0)


def _give_up(error: WaitError) -> None:
    """The last resort of a process whose main thread waits inside of torch, where nothing reaches it."""
    print(f"offbeat.errors.WaitError: {error}", file=sys.stderr, flush=True)
    os._exit(1)
