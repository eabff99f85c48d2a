"""The guard: a tiny process that stops its parent process and continues it after a while.

A `Disturber` runs it as `python -I -S _guard.py <owner's pid> <pause>/<period> ...`, so it imports only the standard
library and has none of its owner's sockets. It reads orders from stdin, one per line, and replies on stdout:

    pause <seconds>   stop the owner for that long; `done` when it runs again
    begin             start the timed pauses; `fired <number>` for each
    end               exit
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

STOP_DEADLINE = 1.0  # Seconds for the kernel to stop all threads of the owner.
_PR_SET_PDEATHSIG = 1


class Guard:
    """Pauses its owner, on order and periodically."""

    def __init__(self, owner: int, timed: list[tuple[float, float]]) -> None:
        self._owner = owner
        self._timed = timed
        self._due: list[float] = []
        self._interrupted = False
        self._buffer = b""

    def serve(self) -> None:
        """Carry out orders until the end."""
        _say("ready")
        while True:
            wait = max(0.0, min(self._due) - time.monotonic()) if self._due else None
            if select.select([0], [], [], wait)[0]:
                for order in self._orders():
                    if order == "end":
                        return
                    self._obey(order)
            else:
                self._timed_pause()

    def _orders(self) -> list[str]:
        data = os.read(0, 4096)
        if not data:
            return ["end"]
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [line.decode() for line in lines]

    def _obey(self, order: str) -> None:
        if order == "begin":
            now = time.monotonic()
            self._due = [now + period for _, period in self._timed]
        else:
            self._pause(float(order.removeprefix("pause ")))
            _say("done")

    def _timed_pause(self) -> None:
        number = self._due.index(min(self._due))
        seconds, period = self._timed[number]
        self._pause(seconds, f"fired {number}")
        self._due[number] = max(self._due[number] + period, time.monotonic())

    def _pause(self, seconds: float, report: str | None = None) -> None:
        """Stop the owner, wait, continue it; not once the run was interrupted, which also ends a pause."""
        if self._interrupted or os.getppid() != self._owner:
            return
        os.kill(self._owner, signal.SIGSTOP)
        deadline = time.monotonic() + STOP_DEADLINE
        status = Path(f"/proc/{self._owner}/stat")
        while time.monotonic() < deadline and status.read_text().rpartition(")")[2].split()[0] not in "Tt":
            time.sleep(0.0002)
        if report is not None:
            _say(report)  # While it is stopped: it reads this when it continues.
        self._interrupted = signal.sigtimedwait([signal.SIGINT], seconds) is not None
        os.kill(self._owner, signal.SIGCONT)


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main(owner: int, timed: list[tuple[float, float]]) -> None:
    """Guard the process `owner`, and die with it."""
    # Blocked, so that an interrupt of the run can neither end us nor be missed: pauses check for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The owner may have died before this request, which then never fires.
    if os.getppid() == owner:
        Guard(owner, timed).serve()


if __name__ == "__main__":
    pairs = [word.split("/") for word in sys.argv[2:]]
    main(int(sys.argv[1]), [(float(pause), float(period)) for pause, period in pairs])
