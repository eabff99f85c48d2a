"""Training with parameter servers, event by event: a server's `Pacing` and every worker's `Rhythm` in virtual time.

Nothing here decides which worker may start or sends what: it carries out what the two say, with sizes and times in
place of tensors. Events of the same time are all handled before any worker reads, unless the rule closes steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

import numpy as np

from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.pacing import Pacing
from offbeat.protocols.servers.worker.rhythm import IN_FLIGHT, Rhythm, RhythmAction, RhythmOf
from offbeat.simulate.network import Link
from offbeat.simulate.queues import Times

COMPUTED, ARRIVED, ANSWERED, VALUES = range(4)
"""Kinds of events of a worker: its step is computed; its push is applied; it is answered; values have come."""
_AWAIT, _PUSH, _PUSH_AND_PULL = RhythmAction.AWAIT, RhythmAction.PUSH, RhythmAction.PUSH_AND_PULL
MANY = 8  # New events are sorted in if there are more of them than this fraction of the future ones.


class ServerPorts:
    """The ports of K servers, one standing for all as they are used alike. First come, first served, full duplex."""

    def __init__(self, link: Link, nbytes: int, servers: int, pushed: int | None = None) -> None:
        self.alpha = link.alpha
        pushed = nbytes if pushed is None else pushed  # Fewer than are pulled, where pushes are compressed.
        self._pushed_whole, self._pulled_whole = link.beta * pushed, link.beta * nbytes
        self._pushed_part, self._pulled_part = self._pushed_whole / servers, self._pulled_whole / servers
        self._apply = link.gamma * nbytes / servers
        self._inbound = self._outbound = self._applied = 0.0

    def push(self, now: float) -> float:
        """When all servers have applied what a worker begins to push now."""
        self._inbound = max(self._inbound, now) + self._pushed_part
        arrived = max(self._inbound, now + self._pushed_whole) + self.alpha
        self._applied = max(self._applied, arrived) + self._apply
        return self._applied

    def pull(self, now: float) -> float:
        """When a worker has all that servers begin to send it now."""
        self._outbound = max(self._outbound, now) + self._pulled_part
        return max(self._outbound, now + self._pulled_whole) + self.alpha


@dataclass(slots=True)
class Worker:
    """One worker, and how far it has got."""

    rhythm: Rhythm
    steps: int = 0  # Steps that it has computed.
    clock: int = 0  # Steps that count as finished: pushes, and those completed without it.
    actions: tuple[RhythmAction, ...] = ()
    at: int = 0  # The next of its actions.
    blocked: RhythmAction | None = None  # The action that it waits in.
    since: float = 0.0  # Since when.
    sent: deque[tuple[int, bool]] = field(default_factory=deque[tuple[int, bool]])
    """Pushes in flight: the clock of each, and whether it asks for values."""
    unanswered: int = 0  # Pushes without a reply.
    late: bool = False  # One of its pushes came when its step was complete.
    asked: bool = False  # Whether it has requested values.
    here: bool = False  # Whether they have come.
    requested: float = 0.0  # When servers heard of the request; infinite while they have not.
    admitted: float = 0.0  # When it was allowed to read them; infinite while it is not.
    reading: int = 0  # Complete steps in the values that are in flight.
    complete: int = 0  # Complete steps in the values that it has.
    stale: int | None = 0  # Staleness of what its next step is computed from, unless counted before.
    written: int = 0  # The version that has all its pushes.
    fresh: deque[tuple[float, int, int]] = field(default_factory=deque[tuple[float, int, int]])
    """Values that servers have sent unasked: arrival time, complete steps, version."""

    def take_fresh(self, needed: int, now: float) -> bool:
        """Use what servers have sent unasked, if it has `needed` complete steps and all of this worker's pushes."""
        fresh = self.fresh
        while len(fresh) > 1 and fresh[1][0] <= now:
            fresh.popleft()
        if not fresh:
            return False
        at, complete, version = fresh[0]
        if at > now or version < self.written or complete < needed:
            return False
        self.complete = complete
        self.stale = max(0, self.clock - complete)
        return True

    def moving(self, now: float) -> float:
        """The part of its wait for values that went into moving them, not into waiting for its turn to be admitted."""
        waited_for_turn = max(0.0, min(self.admitted, now) - max(self.requested, self.since))
        return now - self.since - waited_for_turn


class Agenda:
    """Future events in order, each as its time and a number for what it is."""

    __slots__ = ("_heap", "_sorted", "new")

    def __init__(self) -> None:
        self._sorted: list[tuple[float, int]] = []
        self._heap: list[tuple[float, int]] = []
        self.new: list[tuple[float, int]] = []  # Events that are not sorted in yet.

    def take(self) -> tuple[float, int] | None:
        """Remove and return the next event; None if there is none."""
        new, ahead, heap = self.new, self._sorted, self._heap
        if new:
            if len(new) * MANY > len(ahead):  # Many at once are sorted in, a few go to the heap.
                ahead += new
                ahead.sort(reverse=True)
            else:
                for entry in new:
                    heappush(heap, entry)
            new.clear()
        if ahead and (not heap or ahead[-1] < heap[0]):
            return ahead.pop()
        return heappop(heap) if heap else None

    def another_at(self, now: float) -> bool:
        """Whether another sorted event has this time."""
        ahead, heap = self._sorted, self._heap
        return bool((ahead and ahead[-1][0] == now) or (heap and heap[0][0] == now))

    def left(self) -> list[tuple[float, int]]:
        """All future events, in no order."""
        return self._sorted + self._heap


class Drive:
    """One simulation; used once. Results are its attributes, after `run`."""

    def __init__(
        self,
        rule: Rule,
        durations: Times,
        rhythm: RhythmOf,
        ports: ServerPorts | None,
        progress: Callable[[float], None] | None,
    ) -> None:
        self.steps, self.count = durations.shape
        self.rule = rule
        self.pacing: Pacing[int] = Pacing(rule, range(self.count))
        self.workers = [Worker(rhythm(number)) for number in range(self.count)]
        self.ports = ports
        self.progress = progress
        self.durations = np.ascontiguousarray(durations).reshape(-1).data
        self.ends = [0.0] * self.count
        self.staleness = [0] * (self.steps + 1)
        self.worked = self.exchanged = 0.0
        self.late = self.pushes = self.reads = self.unasked = 0
        self._agenda = Agenda()
        self._entries = self._agenda.new
        self._admitted: list[int] = []
        self._met: list[int] = []
        self._version = 0
        self._timed: int | None = None
        self._told = 0

    def run(self) -> None:
        """Until every worker has made its steps, or under a rule that closes steps, until all are complete."""
        for number in range(self.count):
            self._begin(number, self.workers[number], 0.0)
        now, count, closes, agenda = 0.0, self.count, self.rule.closes, self._agenda
        pacing, steps = self.pacing, self.steps
        while not (closes and pacing.completed >= steps) and (entry := agenda.take()) is not None:
            now, event = entry
            if 0 <= event < count:
                worker = self.workers[event]
                worker.steps += 1
                worker.actions, worker.at = worker.rhythm.computed(worker.clock).actions, 0
                self._go_on(event, worker, now)
            elif event < 0:
                self._overdue(-1 - event, now)
            else:
                self._of_network(event // count, event % count, now)
            if self._admitted and (closes or not agenda.another_at(now)):
                self._hand_out(now)
        if closes:
            self._stop(now)

    # Events.

    def _of_network(self, kind: int, number: int, now: float) -> None:
        worker = self.workers[number]
        if kind == VALUES:
            self._deliver(number, worker, now)
        elif kind == ARRIVED:
            assert self.ports is not None  # noqa: S101
            self._entries.append((now + self.ports.alpha, ANSWERED * self.count + number))
            self._arrived(number, worker, *worker.sent.popleft(), now)
        else:
            worker.unanswered -= 1
            if worker.blocked is RhythmAction.PUSH or (worker.blocked is RhythmAction.SETTLE and not worker.unanswered):
                self.exchanged += now - worker.since
                self._go_on(number, worker, now)

    def _arrived(self, number: int, worker: Worker, clock: int, pulls: bool, now: float) -> None:
        """A push has reached the servers: handle it as a shard does."""
        pacing, rule = self.pacing, self.rule
        if rule.aggregated:
            if clock <= pacing.completed:
                self.late += 1
                worker.late = True
            else:
                pacing.contribute(number)
                pacing.finish(number, clock)
                self._complete(now)
        else:
            self._version += 1
            if pacing.clocks.tick(number, clock):
                self._moved(now)
        worker.written = self._version
        if pulls:
            self._ask(number, worker, clock, now)
        if rule.deadline is not None:
            self._watch_the_time(now)

    def _complete(self, now: float) -> None:
        pacing, before = self.pacing, self.pacing.completed
        while pacing.is_complete():
            pacing.close()
            self._version += 1
        if pacing.completed > before:
            self._moved(now)

    def _moved(self, now: float) -> None:
        pacing = self.pacing
        self._admitted += pacing.released()
        if self.progress is not None and pacing.minimum > self._told:
            self._told = pacing.minimum
            self.progress(min(1.0, self._told / self.steps))
        if self.rule.eager:
            asking = set(self._admitted)
            for number, worker in enumerate(self.workers):
                if number not in asking:
                    self.unasked += 1
                    at = now if self.ports is None else self.ports.pull(now)
                    worker.fresh.append((at, pacing.minimum, self._version))

    def _watch_the_time(self, now: float) -> None:
        step, seconds = self.pacing.timed, self.rule.deadline
        if step is not None and seconds is not None and step != self._timed:
            self._timed = step
            self._entries.append((now + seconds, -1 - step))

    def _overdue(self, step: int, now: float) -> None:
        if step == self.pacing.minimum:
            self.pacing.expire(step)
            self._complete(now)
            self._watch_the_time(now)

    # Workers.

    def _begin(self, number: int, worker: Worker, now: float) -> None:
        """Start the next step, or end."""
        if self.rule.closes:
            worker.steps = worker.clock
        if worker.steps >= self.steps:
            self.ends[number] = now
            return
        if worker.stale is not None:
            self.staleness[worker.stale] += 1
            worker.stale = None
        duration = self.durations[worker.steps * self.count + number] if worker.rhythm.trains() else 0.0
        self.worked += duration
        self._entries.append((now + duration, number))

    def _go_on(self, number: int, worker: Worker, now: float) -> None:
        """Carry out the worker's actions, up to one that blocks; after the last, begin the next step."""
        actions = worker.actions
        while worker.at < len(actions):
            action = actions[worker.at]
            if action is _AWAIT:
                if worker.asked and not worker.here:
                    worker.blocked, worker.since = _AWAIT, now
                    return
                worker.asked = worker.here = False
            elif action is _PUSH or action is _PUSH_AND_PULL:
                if worker.unanswered >= IN_FLIGHT:
                    worker.blocked, worker.since = _PUSH, now
                    return
                self._push(number, worker, action is _PUSH_AND_PULL, now)
            elif action is RhythmAction.REUSE:
                worker.stale = worker.clock - worker.complete
            elif self._waits(action, number, worker, now):
                return
            worker.at += 1
        worker.blocked = None
        self._begin(number, worker, now)

    def _waits(self, action: RhythmAction, number: int, worker: Worker, now: float) -> bool:
        """Do one of the rarer actions. True if it blocks."""
        worker.blocked, worker.since = None, now
        if action is RhythmAction.PULL or (
            action is RhythmAction.TAKE_FRESH and not worker.take_fresh(self.rule.needed(worker.clock), now)
        ):
            self._ask(number, worker, worker.clock, now)
            worker.blocked = None if action is RhythmAction.PULL else _AWAIT
        elif action is RhythmAction.SETTLE and worker.unanswered:
            worker.blocked = RhythmAction.SETTLE
        elif action is RhythmAction.MEET:
            worker.blocked = RhythmAction.MEET
            self._meet(number, now)
            return True
        return worker.blocked is not None

    def _push(self, number: int, worker: Worker, pulls: bool, now: float) -> None:
        worker.clock = clock = worker.clock + 1
        self.pushes += 1
        if self.ports is None:
            self._arrived(number, worker, clock, pulls, now)
            return
        if pulls:
            worker.asked, worker.here = True, False
            worker.requested = worker.admitted = inf
        worker.sent.append((clock, pulls))
        worker.unanswered += 1
        self._entries.append((self.ports.push(now), ARRIVED * self.count + number))

    def _ask(self, number: int, worker: Worker, clock: int, now: float) -> None:
        """Servers hear that a worker wants values for the step after `clock`."""
        worker.asked, worker.here = True, False
        worker.requested, worker.admitted = now, inf
        if self.pacing.admits(self.rule.needed(clock), number):
            self._admitted.append(number)

    def _hand_out(self, now: float) -> None:
        """Send values to all admitted workers."""
        admitted, self._admitted = self._admitted, []
        complete, ports, workers, go_on = self.pacing.minimum, self.ports, self.workers, self._deliver
        self.reads += len(admitted)
        for number in admitted:
            worker = workers[number]
            worker.admitted, worker.reading = now, complete
            if ports is None:
                go_on(number, worker, now)
            else:
                self._entries.append((ports.pull(now), VALUES * self.count + number))

    def _deliver(self, number: int, worker: Worker, now: float) -> None:
        worker.complete = complete = worker.reading
        worker.rhythm.read(complete)
        if worker.late:
            worker.late, worker.clock = False, max(worker.clock, complete)
        stale = worker.clock - complete
        worker.stale = stale if stale > 0 else 0
        worker.here = True
        if worker.blocked is _AWAIT:
            if self.ports is not None:
                self.exchanged += worker.moving(now)
            worker.asked = worker.here = False
            worker.at += 1
            self._go_on(number, worker, now)

    def _meet(self, number: int, now: float) -> None:
        self._met.append(number)
        if len(self._met) < self.count:
            return
        together, self._met = self._met, []
        for each in together:
            worker = self.workers[each]
            worker.at += 1
            self._go_on(each, worker, now)

    def _stop(self, now: float) -> None:
        """All steps are complete: work in progress counts up to now."""
        self.ends = [now] * self.count
        for time, event in self._agenda.left():
            if 0 <= event < self.count:
                self.worked -= time - now
        for worker in self.workers:
            if worker.blocked is RhythmAction.AWAIT:
                self.exchanged += worker.moving(now)
