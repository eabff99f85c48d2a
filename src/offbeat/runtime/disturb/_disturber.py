"""Faults that a process injects into itself: pauses, a slow pace, a kill."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from offbeat.errors import RunError, WaitError
from offbeat.protocols.disturbances import AtStep, Disturbance, FaultPlan, KillFault, Pause
from offbeat.runtime.events.recorder import RECORDER, About, Mark

ANSWER_DEADLINE = 30.0  # Seconds that the guard has to start, and to report the end of a pause.
END_DEADLINE = 5.0  # Seconds that the guard has to end.
Tell = Callable[[Mapping[str, Any]], None]


class Disturber:
    """Injects the faults of one process, which calls `step` at each step.

    Create it on the main thread: the guard ends with the thread that started it. A one-time fault fires once per run:
    sentences that `fired` for a replaced process are neither repeated nor counted again, except that a pace is kept;
    for a process that takes over `after` a step, faults up to that step have fired already.
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
        """Whether this process has any faults to inject; if not, `step` need not be called."""
        return bool(self._plan)

    def step(self, number: int) -> None:
        """A step begins after `number` finished ones: inject the faults due since the last number, once."""
        first = number if self._next is None else self._next
        if not self._plan or number < first:
            return
        if self._pacer is not None:
            self._pacer.finish()
        if not self._begun:
            self._begun = True
            for sentence in self._plan.paces:
                if sentence not in self._fired:
                    self._count(sentence)
            if self._guard is not None:
                self._guard.begin()
        self._next = number + 1
        self._count_timed_pauses()
        for step in range(first, number + 1):
            for sentence, action in self._plan.at(step):
                self._fire(sentence, action)
        if self._pacer is not None:
            self._pacer.begin(self._count_timed_pauses)

    def go_on_from(self, number: int) -> None:
        """Skip the faults before this step, which an earlier part of the run has done."""
        self._next = max(number, self._next or 0)

    def _fire(self, sentence: int, action: KillFault | Pause) -> None:
        if sentence in self._fired and isinstance(action.when, AtStep):
            return
        self._count(sentence)
        if isinstance(action, KillFault):
            print(f"disturbed: {self._plan.disturbances[sentence].text}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._guard is not None:
            self._guard.pause(action.seconds)

    def _count_timed_pauses(self) -> float:
        """Count the timed pauses since the last call; returns their seconds."""
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
        """Inject no more faults."""
        if self._guard is not None:
            self._guard.end()
            self._count_timed_pauses()
            self._guard = None
        self._pacer = None
        self._plan = FaultPlan((), self._plan.role, self._plan.rank, self._plan.seed)


class Pacer:
    """Makes every step take at least the given seconds.

    It sleeps at the beginning, so that others wait as for a slow worker, less by the time of the fastest step so far.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._fastest = 0.0
        self._steps = 0
        self._began = self._slept = 0.0

    def begin(self, paused: Callable[[], float]) -> None:
        """A step begins; `paused` returns for how long the process was stopped since the last call."""
        self._began = time.monotonic()
        pause = max(0.0, self._seconds - self._fastest)
        while (left := self._began + pause - time.monotonic()) > 0:
            time.sleep(left)
            # Unlike computing, a sleep goes on while the process is stopped.
            pause += paused()
        self._slept = time.monotonic() - self._began
        self._steps += 1

    def finish(self) -> None:
        """The step has ended; one faster than any before is delayed a little longer."""
        if self._steps:
            took = time.monotonic() - self._began
            work = took - self._slept
            self._fastest = work if self._steps == 1 else min(self._fastest, work)
            time.sleep(max(0.0, self._seconds - took))


class GuardProcess:
    """A guard process that stops and continues this process."""

    def __init__(self, timed: Sequence[tuple[int, float, float]]) -> None:
        self._timed = timed
        self._buffer = b""
        self._words: list[str] = []
        self._fired: list[tuple[int, float]] = []
        self._is_over = False
        clock = [f"{seconds!r}/{period!r}" for _, seconds, period in timed]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("_guard.py")), str(os.getpid()), *clock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._orders, self._answers = cast("Any", self._process.stdin), cast("Any", self._process.stdout)
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)

    def begin(self) -> None:
        """Start the timed pauses."""
        self._await("ready", ANSWER_DEADLINE)
        self._order("begin")

    def pause(self, seconds: float) -> None:
        """Stop this process for the given seconds."""
        self._order(f"pause {seconds!r}")
        self._await("done", seconds + ANSWER_DEADLINE)

    def fired(self) -> list[tuple[int, float]]:
        """Timed pauses since the last call: number of the sentence, and seconds."""
        while not self._is_over and self._listen(0.0):
            pass
        fired, self._fired = self._fired, []
        return fired

    def end(self) -> None:
        """End the guard; its messages can still be read."""
        with suppress(BrokenPipeError):
            self._order("end")
        try:
            self._process.wait(END_DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        while not self._is_over:
            self._listen(END_DEADLINE)
        self._process.communicate()

    def _order(self, line: str) -> None:
        self._orders.write(f"{line}\n".encode())

    def _await(self, word: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while word not in self._words:
            left = deadline - time.monotonic()
            if self._is_over:
                raise RunError("the guard that pauses this process for --disturb ended unexpectedly; see its log.")
            if left <= 0:
                raise WaitError(f"the guard that pauses this process did not report {word!r} within {seconds:g} s.")
            self._listen(left)
        self._words.remove(word)

    def _listen(self, seconds: float) -> bool:
        """Read the guard's messages, waiting at most the given seconds; whether there were any."""
        if not self._poll.poll(seconds * 1000):
            return False
        data = self._answers.read(4096)
        self._is_over = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            word, _, number = line.decode().partition(" ")
            if word == "fired":
                self._fired.append(self._timed[int(number)][:2])
            else:
                self._words.append(word)
        return bool(data)
