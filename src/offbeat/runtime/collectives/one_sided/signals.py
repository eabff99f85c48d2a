"""One process tells another that something is there: counting semaphores inside shared memory, and how to wait.

A wait tries a few times, then lets others run, then sleeps; so it is quick when the peer is about to come, and does
not take the core from it when there are more processes than cores. While it sleeps it looks every 100 ms whether the
peer is still alive. Semaphores order memory on every processor, and let Python's other threads run while they sleep.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Callable
from typing import Any

from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.collectives.one_sided.tickets import SegmentError

SIGNAL_BYTES = 64
"""Room for one semaphore: a cache line of its own, so that neighbours do not slow each other down."""
TRIES = 20
"""How often a signal is looked for at once."""
YIELDS = 100
"""How often others are let run in between, before it sleeps."""
SLICE = 0.1
"""Seconds of sleep, after which it looks whether the peer is alive."""
STARVED = 300_000
"""Nanoseconds after which a process that let others run knows that somebody else is using up the cores."""
FEWEST_NAPS, MOST_NAPS = 4, 256
"""How many waits sleep at once after that: more each time it happens again, as it then was no chance."""
_MOST = 2**31 - 1


def lay_out(segment: Segment, offset: int, count: int) -> None:
    """Make `count` semaphores of value 0 at this offset; done once, by the process that made the segment."""
    library = ctypes.CDLL(None, use_errno=True)
    for number in range(count):
        place = ctypes.c_void_p(segment.address + offset + number * SIGNAL_BYTES)
        if library.sem_init(place, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")


def semaphore_at(segment: Segment, offset: int) -> Any:
    """The semaphore at this offset, with `acquire(block, timeout)` and `release()`: the one of `multiprocessing`."""
    address = segment.address + offset
    try:
        from _multiprocessing import SemLock

        made = SemLock._rebuild(address, 1, _MOST, None)  # pyright: ignore[reportAttributeAccessIssue]
    except (ImportError, AttributeError, TypeError, OSError) as error:
        raise SegmentError(f"this Python has no semaphores that can lie in shared memory: {error}") from error
    if made.handle != address:
        raise SegmentError("this Python's semaphores do not stay where they are in shared memory")
    return made


class Waiter:
    """How one process waits for others."""

    def __init__(self, alive: Callable[[int], None]) -> None:
        self._alive = alive
        self._sleepy = self._naps = 0

    def wait(self, acquire: Callable[..., bool], peer: int) -> None:
        """Take one signal from `peer`; `alive(peer)` is asked every 100 ms, and raises when there is no more hope."""
        if self._sleepy:
            self._sleepy -= 1
        elif self._tried(acquire):
            return
        while not acquire(True, SLICE):
            try:
                self._alive(peer)
            except BaseException:
                # It may have signalled, and left, just after the wait had ended: what it said still counts.
                if acquire(False):
                    return
                raise

    def _tried(self, acquire: Callable[..., bool]) -> bool:
        for _ in range(TRIES):
            if acquire(False):
                return True
        before = time.perf_counter_ns()
        for _ in range(YIELDS):
            os.sched_yield()
            there = acquire(False)
            now = time.perf_counter_ns()
            if now - before > STARVED:
                self._sleepy = self._naps = min(max(2 * self._naps, FEWEST_NAPS), MOST_NAPS)
                return there
            if there:
                self._naps = 0
                return True
            before = now
        return False


class Life:
    """Whether a process still exists; a number that was given to another process since is not mistaken for it."""

    def __init__(self, process: int) -> None:
        try:
            self._descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            self._descriptor = -1

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        if self._descriptor < 0:
            return True
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Look no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
