"""Who may start a step: the one object that a server's shard asks, and that the simulator drives with 10,000 workers.

A clock counts the steps that a worker has finished. `Pacing` holds the clocks of the live workers, the step that is
open where a step is summed up before it is applied, and the reads that wait. It knows nothing of gradients: whoever
owns it says what has come (`finish`, `contribute`, `expire`), asks whether the open step is complete (`is_complete`,
`close`), and whether a read may go out (`admits`, `released`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

from offbeat.errors import UsageError
from offbeat.protocols.coding import Matrix, code_for
from offbeat.protocols.servers.consistency import Rule

Item = TypeVar("Item")


class Clocks:
    """Finished steps of each live worker, and the smallest of them, which is kept rather than looked for."""

    __slots__ = ("_clocks", "_counts", "minimum")

    def __init__(self, workers: Iterable[int], clock: int = 0) -> None:
        self._clocks = dict.fromkeys(workers, clock)
        self._counts = {clock: len(self._clocks)} if self._clocks else {}
        self.minimum = clock
        """The smallest clock; while nobody is alive, what it was last."""

    def __len__(self) -> int:
        return len(self._clocks)

    def __contains__(self, worker: int) -> bool:
        return worker in self._clocks

    @property
    def workers(self) -> Sequence[int]:
        """Who is alive, in the order of their coming."""
        return list(self._clocks)

    def of(self, worker: int) -> int:
        """Steps that a live worker has finished."""
        return self._clocks[worker]

    def get(self, worker: int) -> int | None:
        """Steps that a worker has finished; None if it is not alive."""
        return self._clocks.get(worker)

    def count(self, clock: int) -> int:
        """How many workers have finished exactly so many steps."""
        return self._counts.get(clock, 0)

    def at(self, clock: int) -> list[int]:
        """The workers that have finished exactly so many steps."""
        return [worker for worker, own in self._clocks.items() if own == clock]

    def tick(self, worker: int, to: int | None = None) -> bool:
        """A worker has finished its next step, or all up to `to`. True if the minimum moved.

        Clocks never go back: what was heard before, or comes late, changes nothing.
        """
        before = self._clocks[worker]
        after = before + 1 if to is None else to
        if after <= before:
            return False
        self._clocks[worker] = after
        counts = self._counts
        counts[after] = counts.get(after, 0) + 1
        if counts[before] > 1:
            counts[before] -= 1
            return False
        return self._took(before)

    def join(self, worker: int, clock: int | None = None) -> None:
        """A worker comes, or comes again, by default as the slowest, so that it may start at once."""
        self.leave(worker)
        at = self.minimum if clock is None else clock
        if not self._clocks or at < self.minimum:
            self.minimum = at
        self._clocks[worker] = at
        self._counts[at] = self._counts.get(at, 0) + 1

    def leave(self, worker: int) -> bool:
        """A worker goes. True if the minimum moved; a worker that is not there changes nothing."""
        clock = self._clocks.pop(worker, None)
        return clock is not None and self._took(clock)

    def _took(self, clock: int) -> bool:
        """One worker less has this clock."""
        left = self._counts[clock] - 1
        if left:
            self._counts[clock] = left
            return False
        del self._counts[clock]
        if clock != self.minimum or not self._counts:
            return False
        self._advance()
        return True

    def _advance(self) -> None:
        """Go up to the next clock that somebody has: step by step, which the steps made pay for, if there is no gap."""
        for candidate in range(self.minimum + 1, self.minimum + 1 + len(self._counts)):
            if candidate in self._counts:
                self.minimum = candidate
                return
        self.minimum = min(self._counts)


class Parked(Generic[Item]):
    """Requests that wait until the minimum has come up to what they need."""

    __slots__ = ("_needs", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, list[Item]] = {}
        self._needs: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def park(self, needed: int, item: Item) -> None:
        """Keep an item until the minimum is at least `needed`."""
        waiting = self._waiting.get(needed)
        if waiting is None:
            self._waiting[needed] = [item]
            heappush(self._needs, needed)
        else:
            waiting.append(item)

    def release(self, minimum: int) -> list[Item]:
        """Hand back all that need no more than this: those with the least needs first, and then as they came.

        All of them, and not only those that need exactly this: the minimum may have moved by more than one.
        """
        released: list[Item] = []
        while self._needs and self._needs[0] <= minimum:
            released += self._waiting.pop(heappop(self._needs))
        return released


class Pacing(Generic[Item]):
    """Decides who may start a step under a rule; `Item` is whatever waits for its turn, such as a read."""

    __slots__ = ("_aggregated", "_answers", "_begun", "_code", "_parked", "clocks", "completed", "overdue", "rule")

    def __init__(self, rule: Rule, workers: Iterable[int]) -> None:
        self.rule = rule
        self._aggregated = rule.aggregated
        self.clocks = Clocks(workers)
        """Finished steps of each worker that is waited for."""
        self.overdue = False
        """The deadline of the open step has passed."""
        self.completed = 0
        """Steps that were closed, where steps are summed up: the number of the open one."""
        self._begun = False
        self._answers: set[int] = set()
        self._code = code_for(len(self.clocks), rule.coded, rule.cyclic) if rule.coded else None
        self._parked: Parked[Item] = Parked()

    @property
    def minimum(self) -> int:
        """Steps that are complete: all their updates are in the values."""
        return self.completed if self._aggregated else self.clocks.minimum

    @property
    def timed(self) -> int | None:
        """The step whose deadline is running: from when it was opened; the first one, from its first gradient."""
        running = self.rule.deadline is not None and (self.completed > 0 or self._begun)
        return self.completed if running else None

    def restart(self, completed: int, minimum: int, clocks: Iterable[tuple[int, int]], overdue: bool = False) -> None:
        """Go on from these clocks; nothing of the open step has come yet."""
        self.clocks = Clocks((), minimum)
        for worker, clock in clocks:
            self.clocks.join(worker, clock)
        self.completed, self.overdue, self._begun = completed, overdue, False
        self._answers.clear()

    def forget(self) -> None:
        """Drop all reads that wait: nobody asks for them any more."""
        self._parked = Parked()

    # What has happened.

    def contribute(self, worker: int) -> None:
        """A worker's gradient, or a part of it that counts by itself, can be used for the open step."""
        self._begun = True
        self._answers.add(worker)

    def finish(self, worker: int, clock: int) -> None:
        """A worker has finished `clock` steps."""
        self.clocks.tick(worker, clock)

    def expire(self, step: int) -> None:
        """The deadline of a step has passed; one that is complete already is none the worse for it."""
        self.overdue = step == self.completed

    def enter(self, worker: int, clock: int) -> int:
        """A worker takes part from here on, or goes on from a later step. Returns the step that it is awaited in."""
        at = max(clock, self.minimum)
        if worker in self.clocks:
            self.clocks.tick(worker, at)
        else:
            self.clocks.join(worker, at)
        return self.clocks.of(worker)

    def leave(self, worker: int) -> None:
        """A worker is waited for no more."""
        self.clocks.leave(worker)
        self._answers.discard(worker)

    # Whether the open step is complete.

    def is_complete(self) -> bool:
        """Whether as many as are waited for have done the open step, or have said that they never will."""
        if not self._aggregated or not len(self.clocks):
            return False
        if self.clocks.minimum > self.completed:
            return True
        if not self.rule.closes:
            return False
        if self._code is not None:
            return self.coefficients() is not None
        done = len(self.clocks) - self.clocks.count(self.completed)
        if self.overdue:
            return done > 0 or self._begun
        return done >= self.rule.enough(len(self.clocks))

    def coefficients(self) -> Matrix | None:
        """How much of each worker's answer to a coded step goes into the sum; None if there are not enough of them."""
        if self._code is None or len(self._answers) * (self._code.tolerated + 1) < self._code.workers:
            return None
        try:
            return self._code.decode(self._answers)
        except UsageError:
            return None

    def close(self) -> None:
        """Go on to the next step; whoever has not finished this one goes on with the others."""
        slow = [] if self.clocks.minimum > self.completed else self.clocks.at(self.completed)
        self.completed += 1
        self.overdue = self._begun = False
        self._answers.clear()
        for worker in slow:
            self.clocks.tick(worker, self.completed)

    # Who may read, and so start.

    def admits(self, needed: int, item: Item) -> bool:
        """Whether a read that needs so many complete steps may go out; else it waits, and `released` names it."""
        if (self.completed if self._aggregated else self.clocks.minimum) >= needed:
            return True
        self._parked.park(needed, item)
        return False

    def released(self) -> list[Item]:
        """What waited and may go out now."""
        return self._parked.release(self.minimum)
