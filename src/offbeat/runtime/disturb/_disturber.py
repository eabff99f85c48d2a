"""What a process does to itself because it was asked to: be paused, keep a pace, be killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from offbeat.protocols.disturbances import AtStep, Disturbance, FaultPlan, KillFault, Pause
from offbeat.runtime.disturb._owner import GuardProcess
from offbeat.runtime.events.recorder import RECORDER, About, Mark

Tell = Callable[[Mapping[str, Any]], None]


class Disturber:
    """Lives in the process that is to be disturbed, and is told when its steps begin.

    `tell` gets `{"kind": "disturbed", "number": sentence}` for each firing, before it where nothing could be said
    afterwards. To be made on the main thread: the guard ends with the thread that started it. What is asked for once
    happens once in a run, however many processes take each other's place: sentences that have `fired` for those before
    this one are neither done nor counted again, though a pace is kept; to one who takes over `after` a step, what was
    to happen up to that step has happened already.
    """

    def __init__(
        self,
        disturbances: Sequence[Disturbance],
        role: str,
        rank: int,
        seed: int,
        tell: Tell,
        fired: Collection[int] = (),
        after: int | None = None,
    ) -> None:
        self._fired = frozenset(fired)
        self._plan = FaultPlan(disturbances, role, rank, seed)
        self._tell = tell
        self._next: int | None = None if after is None else after + 1
        self._begun = False
        self._pacer = Pacer(self._plan.pace) if self._plan.pace else None
        self._guard = GuardProcess(self._plan.timed) if self._plan.pauses else None

    @property
    def active(self) -> bool:
        """Whether anything will happen to this process; if not, nobody need call `step`."""
        return bool(self._plan)

    def step(self, number: int) -> None:
        """A step begins, `number` are finished: do what is to happen before it.

        The same number again does nothing. Numbers may be skipped, as a server's minimum clock does: what was to
        happen in between happens now.
        """
        first = number if self._next is None else self._next
        if not self._plan or number < first:
            return
        if self._pacer is not None:
            self._pacer.finish()
        if not self._begun:
            self._begin()
        self._next = number + 1
        self._paused_by_the_clock()
        for step in range(first, number + 1):
            for sentence, action in self._plan.at(step):
                self._fire(sentence, action)
        if self._pacer is not None:
            self._pacer.begin(self._paused_by_the_clock)

    def go_on_from(self, number: int) -> None:
        """So many steps were done in an earlier run: what was to happen before them does not happen in this one."""
        self._next = max(number, self._next or 0)

    def _begin(self) -> None:
        self._begun = True
        for sentence in self._plan.paces:
            if sentence not in self._fired:
                self._count(sentence)
        if self._guard is not None:
            self._guard.begin()

    def _fire(self, sentence: int, action: KillFault | Pause) -> None:
        if sentence in self._fired and isinstance(action.when, AtStep):
            return
        self._count(sentence)
        if isinstance(action, KillFault):
            print(f"disturbed: {self._plan.disturbances[sentence].text}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._guard is not None:
            self._guard.pause(action.seconds)

    def _paused_by_the_clock(self) -> float:
        """Seconds of the pauses that the guard has made by itself since this was asked last; they are counted."""
        fired = self._guard.fired() if self._guard is not None else []
        for sentence, _ in fired:
            self._count(sentence)
        return sum(seconds for _, seconds in fired)

    def _count(self, sentence: int) -> None:
        if (recorder := RECORDER.get()) is not None:
            words = self._plan.disturbances[sentence].text
            name = recorder.name(("fault", sentence), lambda: About("faults", "fault", words=words[:200]))
            recorder.stamp(int(Mark.FAULT), name, sentence, max(0, (self._next or 0) - 1))
        self._tell({"kind": "disturbed", "number": sentence})

    def close(self) -> None:
        """From now on nothing happens to this process."""
        if self._guard is not None:
            self._guard.end()
            self._paused_by_the_clock()
            self._guard = None
        self._pacer = None
        self._plan = FaultPlan((), self._plan.role, self._plan.rank, self._plan.seed)


class Pacer:
    """Makes every step take at least so long.

    It sleeps where the step begins, in place of computing that takes longer: what the others wait for is late by it. It
    sleeps less by what the fastest step so far took, so that a step takes the asked time and not that much more.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._fastest = 0.0
        self._steps = 0
        self._began = self._slept = 0.0

    def begin(self, paused: Callable[[], float]) -> None:
        """A step begins; `paused` says for how long the process was stopped since it was asked last."""
        self._began = time.monotonic()
        wanted = max(0.0, self._seconds - self._fastest)
        while (left := self._began + wanted - time.monotonic()) > 0:
            time.sleep(left)
            # A process that computes does not go on while it is stopped, but a sleep does.
            wanted += paused()
        self._slept = time.monotonic() - self._began
        self._steps += 1

    def finish(self) -> None:
        """The step has ended; one that was faster than any before it is held up a little longer."""
        if self._steps:
            took = time.monotonic() - self._began
            work = took - self._slept
            self._fastest = work if self._steps == 1 else min(self._fastest, work)
            time.sleep(max(0.0, self._seconds - took))
