"""The disturbed process's side of its guard: starting it, giving it orders, and its end."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from offbeat.errors import RunError, WaitError

ANSWER_DEADLINE = 30.0
"""Seconds that the guard has to start, and to answer when a pause is over."""
END_DEADLINE = 5.0
"""Seconds that the guard has to end."""


class GuardProcess:
    """A guard that stops and continues this process."""

    def __init__(self, timed: Sequence[tuple[int, float, float]]) -> None:
        self._timed = timed
        self._heard = b""
        self._said: list[str] = []
        self._fired: list[tuple[int, float]] = []
        self._is_over = False
        clock = [f"{seconds!r}/{period!r}" for _, seconds, period in timed]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("_guard.py")), str(os.getpid()), *clock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def begin(self) -> None:
        """Pauses by the clock begin now."""
        self._await("ready", ANSWER_DEADLINE)
        self._order("begin")

    def pause(self, seconds: float) -> None:
        """Be stopped for so long."""
        self._order(f"pause {seconds!r}")
        self._await("done", seconds + ANSWER_DEADLINE)

    def fired(self) -> list[tuple[int, float]]:
        """Pauses by the clock since this was asked last: the sentence's number, and for how long."""
        while not self._is_over and self._listen(0.0):
            pass
        fired, self._fired = self._fired, []
        return fired

    def end(self) -> None:
        """Have no guard any more; what it has said can still be asked for."""
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
        if self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())

    def _await(self, word: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while word not in self._said:
            left = deadline - time.monotonic()
            if self._is_over:
                raise RunError(
                    "the guard that pauses this process, as --disturb asked, has ended by itself; its log may say why."
                )
            if left <= 0:
                raise WaitError(f"the guard that pauses this process said no {word!r} within {seconds:g} s.")
            self._listen(left)
        self._said.remove(word)

    def _listen(self, seconds: float) -> bool:
        """Take in what the guard says, waiting so long for it; whether there was anything."""
        answers = self._process.stdout
        if answers is None:
            return False
        poll = select.poll()
        poll.register(answers, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return False
        data = os.read(answers.fileno(), 4096)
        self._is_over = not data
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            self._take_in(line.decode())
        return bool(data)

    def _take_in(self, line: str) -> None:
        word, _, number = line.partition(" ")
        if word == "fired":
            sentence, seconds, _ = self._timed[int(number)]
            self._fired.append((sentence, seconds))
        else:
            self._said.append(word)
