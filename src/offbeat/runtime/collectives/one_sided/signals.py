"""Signals between processes: counting semaphores in shared memory, and how to wait for them.

A wait tries a few times, then yields, then sleeps; so it is quick when the peer is about to signal, and does not take
the core from it when there are more processes than cores. While it sleeps it checks every 100 ms whether the peer is
still alive. Semaphores order memory on every processor, and release the GIL while they sleep.
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
"""Bytes of one semaphore: a cache line of its own, so that neighbours do not slow each other down."""
TRIES, YIELDS, SLICE = 20, 100, 0.1
"""Attempts without yielding, attempts with a yield between them, and seconds of sleep between checks of the peer."""
STARVED = 300_000
"""Nanoseconds of one yield after which other processes must be using up the cores."""
FEWEST_NAPS, MOST_NAPS = 4, 256
"""Waits that sleep at once after that: twice as many each time it happens again."""
_MOST = 2**31 - 1


def lay_out(segment: Segment, offset: int, count: int) -> None:
    """Create `count` semaphores of value 0 at this offset; called once, by the process that created the segment."""
    library = ctypes.CDLL(None, use_errno=True)
    for number in range(count):
        place = ctypes.c_void_p(segment.address + offset + number * SIGNAL_BYTES)
        if library.sem_init(place, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")


def semaphore_at(segment: Segment, offset: int) -> Any:
    """The semaphore at this offset, as a SemLock of `multiprocessing`."""
    address = segment.address + offset
    try:
        from _multiprocessing import SemLock

        semaphore = SemLock._rebuild(address, 1, _MOST, None)  # pyright: ignore[reportAttributeAccessIssue]
    except (ImportError, AttributeError, TypeError, OSError) as error:
        raise SegmentError(f"this Python cannot place semaphores in shared memory: {error}") from error
    if semaphore.handle != address:
        raise SegmentError("this Python moves semaphores out of shared memory")
    return semaphore


class Waiter:
    """How one process waits for others."""

    def __init__(self, alive: Callable[[int], None]) -> None:
        self._alive = alive
        self._sleepy = self._naps = 0

    def wait(self, acquire: Callable[..., bool], peer: int) -> None:
        """Take one signal from `peer`; `alive(peer)` is called every 100 ms, and raises when none can come."""
        if self._sleepy:
            self._sleepy -= 1
        elif self._tried(acquire):
            return
        while not acquire(True, SLICE):
            try:
                self._alive(peer)
            except BaseException:
                # The peer may have signalled and left just after the wait ended: its signal still counts.
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
            signalled = acquire(False)
            now = time.perf_counter_ns()
            if now - before > STARVED:
                self._sleepy = self._naps = min(max(2 * self._naps, FEWEST_NAPS), MOST_NAPS)
                return signalled
            if signalled:
                self._naps = 0
                return True
            before = now
        return False


class Life:
    """Whether a process still exists, even if its number has been reused."""

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
        """Close the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
