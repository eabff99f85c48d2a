"""Who may start a step: the one object that a server's shard asks, and that the simulator drives with 10,000 workers.

A clock counts the steps that a worker has finished. `Pacing` holds the clocks of the live workers, the open step where
gradients are summed before they are applied, and the waiting reads. It knows nothing of gradients: its owner reports
progress (`finish`, `contribute`, `expire`), asks whether the open step is complete (`is_complete`, `close`), and
whether a read may be answered (`admits`, `released`).
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
    """Finished steps of each live worker, and their minimum, which is kept rather than searched for."""

    __slots__ = ("_clocks", "_counts", "minimum")

    def __init__(self, workers: Iterable[int], clock: int = 0) -> None:
        self._clocks = dict.fromkeys(workers, clock)
        self._counts = {clock: len(self._clocks)} if self._clocks else {}
        self.minimum = clock  # The smallest clock; with no live worker, its last value.

    def __len__(self) -> int:
        return len(self._clocks)

    def __contains__(self, worker: int) -> bool:
        return worker in self._clocks

    @property
    def workers(self) -> Sequence[int]:
        """The live workers, in order of arrival."""
        return list(self._clocks)

    def of(self, worker: int) -> int:
        """Steps that a live worker has finished."""
        return self._clocks[worker]

    def get(self, worker: int) -> int | None:
        """Steps that a worker has finished; None if it is not alive."""
        return self._clocks.get(worker)

    def count(self, clock: int) -> int:
        """Number of workers that have finished exactly `clock` steps."""
        return self._counts.get(clock, 0)

    def at(self, clock: int) -> list[int]:
        """The workers that have finished exactly `clock` steps."""
        return [worker for worker, own in self._clocks.items() if own == clock]

    def tick(self, worker: int, to: int | None = None) -> bool:
        """A worker has finished its next step, or all up to `to`. True if the minimum moved. Clocks never go back."""
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
        """A worker joins, or rejoins, by default as the slowest, so that it may start at once."""
        self.leave(worker)
        at = self.minimum if clock is None else clock
        if not self._clocks or at < self.minimum:
            self.minimum = at
        self._clocks[worker] = at
        self._counts[at] = self._counts.get(at, 0) + 1

    def leave(self, worker: int) -> bool:
        """A worker leaves, if it is there. True if the minimum moved."""
        clock = self._clocks.pop(worker, None)
        return clock is not None and self._took(clock)

    def _took(self, clock: int) -> bool:
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
        # Up to the next clock in use: step by step, which the steps made pay for, if there is no gap.
        for candidate in range(self.minimum + 1, self.minimum + 1 + len(self._counts)):
            if candidate in self._counts:
                self.minimum = candidate
                return
        self.minimum = min(self._counts)


class Parked(Generic[Item]):
    """Requests that wait until the minimum reaches what they need."""

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
        """Remove and return all that need no more than this, the least needs first, then in order of arrival."""
        released: list[Item] = []
        while self._needs and self._needs[0] <= minimum:
            released += self._waiting.pop(heappop(self._needs))
        return released


class Pacing(Generic[Item]):
    """Decides which worker may start a step under a rule; `Item` is whatever waits for its turn, such as a read."""

    __slots__ = ("_aggregated", "_answers", "_begun", "_code", "_parked", "clocks", "completed", "overdue", "rule")

    def __init__(self, rule: Rule, workers: Iterable[int]) -> None:
        self.rule = rule
        self._aggregated = rule.aggregated
        self.clocks = Clocks(workers)  # Finished steps of each worker that is waited for.
        self.overdue = False  # The deadline of the open step has passed.
        self.completed = 0  # Closed steps, under a rule that aggregates: the number of the open one.
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
        """The step whose deadline is running: since it was opened; for the first step, since its first gradient."""
        running = self.rule.deadline is not None and (self.completed > 0 or self._begun)
        return self.completed if running else None

    def restart(self, completed: int, minimum: int, clocks: Iterable[tuple[int, int]], overdue: bool = False) -> None:
        """Continue from these clocks; nothing of the open step has come yet."""
        self.clocks = Clocks((), minimum)
        for worker, clock in clocks:
            self.clocks.join(worker, clock)
        self.completed, self.overdue, self._begun = completed, overdue, False
        self._answers.clear()

    def forget(self) -> None:
        """Drop all waiting reads."""
        self._parked = Parked()

    # Progress.

    def contribute(self, worker: int) -> None:
        """A worker's gradient, or a part of it that counts alone, can be used for the open step."""
        self._begun = True
        self._answers.add(worker)

    def finish(self, worker: int, clock: int) -> None:
        """A worker has finished `clock` steps."""
        self.clocks.tick(worker, clock)

    def expire(self, step: int) -> None:
        """The deadline of a step has passed; if it is complete already, nothing changes."""
        self.overdue = step == self.completed

    def enter(self, worker: int, clock: int) -> int:
        """A worker enters, or continues from a later step. Returns the step that it is awaited in."""
        at = max(clock, self.minimum)
        if worker in self.clocks:
            self.clocks.tick(worker, at)
        else:
            self.clocks.join(worker, at)
        return self.clocks.of(worker)

    def leave(self, worker: int) -> None:
        """A worker is no longer waited for."""
        self.clocks.leave(worker)
        self._answers.discard(worker)

    # Whether the open step is complete.

    def is_complete(self) -> bool:
        """Whether all workers that are waited for have done the open step, or never will."""
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
        """The coefficient of each worker's answer in the sum of a coded step; None if there are not enough answers."""
        if self._code is None or len(self._answers) * (self._code.tolerated + 1) < self._code.workers:
            return None
        try:
            return self._code.decode(self._answers)
        except UsageError:
            return None

    def close(self) -> None:
        """Go on to the next step; workers that have not finished this one move on with the others."""
        slow = [] if self.clocks.minimum > self.completed else self.clocks.at(self.completed)
        self.completed += 1
        self.overdue = self._begun = False
        self._answers.clear()
        for worker in slow:
            self.clocks.tick(worker, self.completed)

    # Reads: a worker that may read may start.

    def admits(self, needed: int, item: Item) -> bool:
        """Whether a read that needs `needed` complete steps may go out; else it waits, and `released` returns it."""
        if (self.completed if self._aggregated else self.clocks.minimum) >= needed:
            return True
        self._parked.park(needed, item)
        return False

    def released(self) -> list[Item]:
        """Waiting reads that may be answered now."""
        return self._parked.release(self.minimum)
