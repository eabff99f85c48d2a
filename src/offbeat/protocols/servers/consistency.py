"""Who may start its next step: bulk synchronous, stale synchronous and asynchronous training by one predicate.

A clock counts the steps that a worker has finished. A worker with clock c may start its next step if and only if
c - min(clocks) <= s. So clocks of finished steps differ by at most s + 1. With s = 0 (`bsp`) everybody waits for
everybody, and nobody for ever: the slowest always may start. With s of several steps (`ssp`) a worker that pauses once
holds nobody up, if it catches up in time. Without a bound (`asp`) nobody waits.

Two rules give up on the slow instead: with `drop` a step is complete with the first p - k answers, with `deadline`
with those that have come by then, and at least one. Answers to a step that is complete are late, and discarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.protocols.machine import Effect, Ended, Event, Name, Received, Send, SetTimer, Timer

Item = TypeVar("Item")


class Rule(Struct, frozen=True):
    """How far apart workers may be, and whether the slow are waited for."""

    bound: int | None
    """Steps that a worker may be ahead of the slowest when it starts one; 0 is `bsp`, None is `asp`."""
    eager: bool = False
    """Servers send fresh values as soon as they have them, rather than when they are asked for."""
    drop: int = 0
    """Workers that a step does not wait for: it is complete with the first p - drop gradients."""
    deadline: float | None = None
    """Seconds after which a step is complete with the gradients that have come, if there is any."""
    coded: int = 0
    """Workers that a step can do without, as others compute the same (gradient coding): it loses nothing by it."""
    cyclic: bool = False
    """Of the two codes the one that repeats parts cyclically."""
    remembers: bool = False
    """Replicas keep the values that gradients may still be computed from, to correct such as come late."""

    def __post_init__(self) -> None:
        """Refuse bounds that make no sense, and dropping where no step is waited for."""
        if self.bound is not None and self.bound < 0:
            raise UsageError(f"a staleness bound of {self.bound} lets nobody start: give 0 (bsp) or more.")
        if self.drop < 0:
            raise UsageError(f"drop_slowest({self.drop}) makes no sense: give the number of workers not waited for.")
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise UsageError(f"deadline({self.deadline}) makes no sense: give a number of seconds above 0.")
        if self.coded < 0:
            raise UsageError(f"coded({self.coded}) makes no sense: give the number of workers not waited for.")
        if self.closes and self.bound != 0:
            raise UsageError("drop_slowest, deadline and coded close a step for all: they need a bound of 0 (bsp).")

    def __str__(self) -> str:
        """The rule as it is written: `bsp`, `ssp(3, eager)`, `asp`, `drop_slowest(2)`, `deadline(0.5)`, `coded(1)`."""
        if self.coded:
            return f"coded({self.coded}{', cyclic' if self.cyclic else ''})"
        if self.drop:
            return f"drop_slowest({self.drop})"
        if self.deadline is not None:
            return f"deadline({self.deadline:g})"
        if self.bound is None:
            return "asp"
        return f"ssp({self.bound}{', eager' if self.eager else ''})" if self.bound else "bsp"

    @property
    def aggregated(self) -> bool:
        """Gradients of a step are summed, then applied once; otherwise each is applied as it comes."""
        return self.bound == 0

    @property
    def closes(self) -> bool:
        """A step may be complete before every worker has answered."""
        return self.drop > 0 or self.coded > 0 or self.deadline is not None

    def may_start(self, clock: int, minimum: int) -> bool:
        """Whether a worker that has finished `clock` steps may start another; `minimum` is the slowest's clock."""
        return self.bound is None or clock - minimum <= self.bound

    def needed(self, clock: int) -> int:
        """The smallest minimum at which a worker that has finished `clock` steps may start another."""
        return 0 if self.bound is None else max(0, clock - self.bound)

    def enough(self, workers: int) -> int:
        """Answers that complete a step of so many workers, deadline or not: at least one."""
        return max(1, workers - self.drop - self.coded)


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

    def forget(self, unwanted: Callable[[Item], bool]) -> None:
        """Drop what nobody waits for any more, such as the requests of a worker that has ended."""
        for needed, waiting in self._waiting.items():
            self._waiting[needed] = [item for item in waiting if not unwanted(item)]


class Finished(Struct):
    """A worker has finished `clock` steps, and asks to start the next."""

    worker: int
    clock: int


class Joined(Struct):
    """A worker has come, and asks to start a step."""

    worker: int


class Admitted(Struct, frozen=True):
    """The worker may start this step; steps count from 0, so it is as many as count as finished."""

    worker: int
    step: int


def worker_name(worker: int) -> Name:
    """The name under which a worker takes part."""
    return f"worker {worker}"


class PaceMachine:
    """Decides who may start its next step, and nothing else: what is left of a server when its data is left out.

    It hears `Finished` and `Joined` from workers and `Ended` from whoever started them, and answers with `Admitted`.
    What comes twice is answered twice, so that an answer that was lost can be asked for again.
    """

    def __init__(self, rule: Rule, workers: Iterable[int], name: Name = "pace") -> None:
        self.name = name
        self.rule = rule
        self._closes = rule.closes
        self._bound = rule.bound
        self.clocks = Clocks(workers)
        self.step = 0
        """Under a rule that closes steps: the one that is open."""
        self.late = 0
        """Answers to steps that were complete: discarded."""
        self._parked: Parked[int] = Parked()
        self._names = {worker: worker_name(worker) for worker in self.clocks.workers}
        self._workers = {name: worker for worker, name in self._names.items()}
        self._answered: dict[int, None] = {}
        self._overdue = False

    def begin(self, now: float) -> Sequence[Effect]:  # noqa: ARG002
        """Everybody may start the first step."""
        return [*self._admit(self.clocks.workers), *self._timer()]

    def on(self, event: Event, now: float) -> Sequence[Effect]:  # noqa: ARG002
        """Who may start, now that this has happened."""
        if type(event) is Received:
            message = event.message
            if type(message) is Finished:
                return self._finished(message.worker, message.clock)
            return self._joined(message.worker) if type(message) is Joined else ()
        if type(event) is Ended and event.name in self._workers:
            return self._left(self._workers[event.name])
        if type(event) is Timer and event.token == self.step:
            self._overdue = True
            return self._close()
        return ()

    def _finished(self, worker: int, clock: int) -> Sequence[Effect]:
        clocks = self.clocks
        known = clocks.get(worker)
        if known is None:
            return ()
        if clock <= known:
            return self._again(worker)
        if self._closes:
            return self._closing(worker, clock)
        moved = clocks.tick(worker, clock)
        minimum = clocks.minimum
        if self._bound is not None and clock - minimum > self._bound:
            self._parked.park(clock - self._bound, worker)
            return self._admit(self._parked.release(minimum)) if moved else ()
        if moved:
            return self._admit([*self._parked.release(minimum), worker])
        return (Send(self._names[worker], Admitted(worker, clock)),)

    def _closing(self, worker: int, clock: int) -> Sequence[Effect]:
        """An answer to a step that closes without the slowest: counted if the step is open, late otherwise."""
        if clock <= self.step:
            self.late += 1
            self.clocks.tick(worker, self.step)
            return self._admit([worker])
        self._answered[worker] = None
        self.clocks.tick(worker, clock)
        return self._close()

    def _close(self) -> Sequence[Effect]:
        """Complete the open step if enough have answered it, and begin the next with them."""
        if not self._answered or (len(self._answered) < self.rule.enough(len(self.clocks)) and not self._overdue):
            return ()
        starting, self._answered = self._answered, {}
        self._overdue = False
        self.step += 1
        return [*self._admit(starting), *self._timer()]

    def _joined(self, worker: int) -> Sequence[Effect]:
        if worker not in self.clocks:
            self._names[worker] = worker_name(worker)
            self._workers[self._names[worker]] = worker
            self.clocks.join(worker, self.step if self._closes else None)
        return self._again(worker)

    def _left(self, worker: int) -> Sequence[Effect]:
        moved = self.clocks.leave(worker)
        if self._closes:
            self._answered.pop(worker, None)
            return self._close()
        self._parked.forget(lambda one: one == worker)
        return self._admit(self._parked.release(self.clocks.minimum)) if moved else ()

    def _again(self, worker: int) -> Sequence[Effect]:
        """Answer what was asked before, or by who has just come; one that waits goes on waiting."""
        clock = self.clocks.of(worker)
        waits = worker in self._answered if self._closes else not self.rule.may_start(clock, self.clocks.minimum)
        return () if waits else self._admit([worker])

    def _admit(self, workers: Iterable[int]) -> list[Effect]:
        names, clock_of = self._names, self.clocks.of
        return [Send(names[worker], Admitted(worker, clock_of(worker))) for worker in workers]

    def _timer(self) -> list[Effect]:
        return [] if self.rule.deadline is None else [SetTimer(self.rule.deadline, self.step)]
