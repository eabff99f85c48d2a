"""How a monitor puts reports into an order that the run can have had: four machines.

Reports of events come from many processes, late, duplicated and overtaken. These machines hold reports back until their
turn has come; a delivery is the work of a `Start`. docs/causality.md compares their rules.

No single process holds them up for ever. `Dropped` names events that were never reported. After a process has ended,
reports in flight are waited for some seconds of grace; then what is missing is given up. A report that comes after
something that should follow it is delivered as `late`: nothing is lost, and nobody takes it for being in order.
The same report is delivered once. Reports of unknown processes are ignored; `join` makes one known.

Babaoglu and Marzullo, "Consistent Global States of Distributed Systems" (1993), section 5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.protocols.causality.histories import IntArray, Vector
from offbeat.protocols.machine import Effect, Ended, Event, Name, Received, Send, SetTimer, Start, Timer

MONITOR: Name = "monitor"


class EventReport(Struct, frozen=True):
    """An event, as its process reports it."""

    number: int  # Its number among the process's reported events, from 1.
    time: float = 0.0  # On a clock that agrees with the monitor's; used by `ByTime`.
    lamport: int = 0  # Its Lamport clock; used by `ByLamport`.
    vector: Vector | IntArray = ()  # Its vector clock, which counts reported events; used by `ByVector`.
    event: Any = None


class Dropped(Struct, frozen=True):
    """These events of a process will never be reported."""

    first: int
    last: int


class Probe(Struct, frozen=True):
    """The monitor asks a silent process for its clock. It counts as a message: the answer's clock is higher."""

    lamport: int


class Alive(Struct, frozen=True):
    """The answer: the process's Lamport clock now, after `reported` reports."""

    lamport: int
    reported: int


class Delivery(Struct, frozen=True):
    """A report in its place in the order; or `late`, if something that should follow it was delivered before."""

    process: Name
    report: EventReport
    late: bool = False


class _Ripe(Struct, frozen=True):
    time: float  # Time to deliver everything up to it.


class _Line:
    """Reports of one process, in order of their numbers."""

    def __init__(self, name: Name, index: int) -> None:
        self.name, self.index = name, index
        self.next = 1  # The lowest number that has neither been delivered nor given up.
        self.gone = False  # It has ended, and is no longer waited for.
        self._held: dict[int, EventReport] = {}
        self._dropped: list[range] = []
        self._given_up: list[range] = []
        self._late: set[int] = set()

    def take(self, report: EventReport) -> bool:
        """Keep a report until its turn; False if its turn is over, or it is here already."""
        if report.number < self.next or report.number in self._held:
            return False
        self._held[report.number] = report
        return True

    def is_new(self, number: int) -> bool:
        """Whether this number was given up, and now comes for the first time."""
        if number in self._late or not any(number in given_up for given_up in self._given_up):
            return False
        self._late.add(number)
        return True

    def overtaken(self, report: EventReport) -> Iterator[EventReport]:
        """A report, and what is held before it, whose turn in the order of all processes is over."""
        self._held[report.number] = report
        held = sorted(number for number in self._held if number <= report.number)
        self.give_up(report.number + 1)
        self._late.update(held)
        yield from (self._held.pop(number) for number in held)

    def drop(self, dropped: Dropped) -> None:
        self._dropped.append(range(dropped.first, dropped.last + 1))
        self._pass_dropped()

    def head(self) -> EventReport | None:
        """The next report of this process."""
        if self.gone and self._held and self.next not in self._held:
            self.give_up(min(self._held))
        return self._held.get(self.next)

    def pop(self) -> EventReport:
        report = self._held.pop(self.next)
        self.next += 1
        if self._dropped:
            self._pass_dropped()
        return report

    def give_up(self, below: int) -> None:
        if below > self.next:
            self._given_up.append(range(self.next, below))
            self.next = below

    def _pass_dropped(self) -> None:
        while passed := next((dropped for dropped in self._dropped if self.next in dropped), None):
            self.next = passed.stop
        self._dropped = [dropped for dropped in self._dropped if dropped.stop > self.next]


class _Deliverer:
    """Common to all four: a line for each process, duplicates, and ended processes."""

    def __init__(self, processes: Sequence[Name], grace: float = 1.0) -> None:
        if len(set(processes)) != len(processes) or not processes:
            raise UsageError(f"reports of {list(processes)} cannot be told apart: give each process one name.")
        if grace < 0:
            raise UsageError(f"a grace of {grace} seconds makes no sense: give 0 or more.")
        self.name = MONITOR
        self._grace = grace
        self._lines = {process: _Line(process, index) for index, process in enumerate(processes)}

    def begin(self, now: float) -> Sequence[Effect]:  # noqa: ARG002
        """Nothing, until a report comes."""
        return []

    def join(self, process: Name) -> None:
        """One more process, whose reports come from now on; vector clocks may lack an entry for it, which means 0."""
        if process not in self._lines:
            self._lines[process] = _Line(process, len(self._lines))

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Deliveries in order, and probes to send."""
        effects: list[Effect] = []
        match event:
            case Received(sender=sender, message=EventReport() as report) if sender in self._lines:
                effects += self._take(self._lines[sender], report, now)
            case Received(sender=sender, message=Dropped() as dropped) if sender in self._lines:
                self._lines[sender].drop(dropped)
            case Received(sender=sender, message=Alive() as alive) if sender in self._lines:
                self._heard(self._lines[sender], alive)
            case Ended(name=name) if name in self._lines:
                effects.append(SetTimer(self._grace, Ended(name)))
            case Timer(token=Ended(name=name)):
                self._lines[name].gone = True
            case _:
                pass
        return [*effects, *self._released(event, now)]

    def _take(self, line: _Line, report: EventReport, now: float) -> Iterator[Effect]:  # noqa: ARG002
        if not line.take(report) and line.is_new(report.number):
            yield Start(Delivery(line.name, report, late=True))

    def _heard(self, line: _Line, alive: Alive) -> None:  # noqa: ARG002
        return

    def _released(self, event: Event, now: float) -> Iterable[Effect]:  # noqa: ARG002
        """What can be delivered after this."""
        return ()


class ByNumber(_Deliverer):
    """In order of numbers for each process. It does not order processes among each other."""

    def _released(self, event: Event, now: float) -> Iterator[Effect]:  # noqa: ARG002
        for line in self._lines.values():
            while line.head() is not None:
                yield Start(Delivery(line.name, line.pop()))


class ByTime(_Deliverer):
    """By wall clock: held back until nothing older can still be in flight.

    Correct if clocks agree so well that causes have earlier times than effects, and no report takes longer than delta.
    It does not wait for numbers, so an ended process does not hold it up.
    """

    def __init__(self, processes: Sequence[Name], delta: float) -> None:
        super().__init__(processes, 0.0)
        if delta < 0:
            raise UsageError(f"a bound of {delta} seconds on delays makes no sense: give 0 or more.")
        self._delta = delta
        self._held: list[tuple[float, int, int, int, Name, EventReport]] = []
        self._last = (float("-inf"), 0, 0, 0)

    def _take(self, line: _Line, report: EventReport, now: float) -> Iterator[Effect]:
        if not line.take(report) and not line.is_new(report.number):
            return
        while line.head() is not None:
            line.pop()
        key = (report.time, report.lamport, line.index, report.number)
        if key < self._last:
            yield Start(Delivery(line.name, report, late=True))
            return
        heappush(self._held, (*key, line.name, report))
        # The timer says which time it is for: the sum of two roundings need not be the time that was meant.
        yield SetTimer(max(0.0, report.time + self._delta - now), _Ripe(report.time))

    def _released(self, event: Event, now: float) -> Iterator[Effect]:
        token = event.token if isinstance(event, Timer) else None
        ripe = token.time if isinstance(token, _Ripe) else now - self._delta
        while self._held and self._held[0][0] <= ripe:
            *key, name, report = heappop(self._held)
            self._last = (key[0], key[1], key[2], key[3])
            yield Start(Delivery(name, report))


class ByLamport(_Deliverer):
    """By Lamport clock, ties by process: held back until no process can report a lower one.

    Reports of a process are taken in order of their numbers, so that once a clock was heard, all lower ones are here. A
    process that is silent for `patience` seconds while something is held back is sent a `Probe`.
    """

    def __init__(self, processes: Sequence[Name], patience: float = 0.2, grace: float = 1.0) -> None:
        super().__init__(processes, grace)
        if patience <= 0:
            raise UsageError(f"a patience of {patience} seconds makes no sense: give more than 0.")
        self._patience = patience
        self._clocks = defaultdict[Name, int](int)
        self._answers = defaultdict[Name, Alive](lambda: Alive(0, 0))
        self._ready: list[tuple[int, int, Name, EventReport]] = []
        self._last = (0, 0)
        self._probing = False

    def _take(self, line: _Line, report: EventReport, now: float) -> Iterator[Effect]:
        # Only a process that was no longer waited for can come with a clock that is too low.
        if report.number >= line.next and (report.lamport, line.index) < self._last:
            yield from (Start(Delivery(line.name, held, late=True)) for held in line.overtaken(report))
        else:
            yield from super()._take(line, report, now)

    def _heard(self, line: _Line, alive: Alive) -> None:
        self._answers[line.name] = max(alive, self._answers[line.name], key=lambda answer: answer.lamport)

    def _released(self, event: Event, now: float) -> Iterator[Effect]:  # noqa: ARG002
        for line in self._lines.values():
            self._advance(line)
        while self._ready and not self._silent():
            clock, order, name, report = heappop(self._ready)
            self._last = (clock, order)
            yield Start(Delivery(name, report))
        if isinstance(event, Timer) and isinstance(event.token, Probe):
            self._probing = False
            yield from (Send(name, Probe(self._ready[0][0])) for name in self._silent())
        if self._ready and not self._probing:
            self._probing = True
            yield SetTimer(self._patience, Probe(0))

    def _advance(self, line: _Line) -> None:
        while line.head() is not None:
            report = line.pop()
            self._clocks[line.name] = report.lamport
            heappush(self._ready, (report.lamport, line.index, line.name, report))
        answer = self._answers[line.name]
        if line.next > answer.reported:
            self._clocks[line.name] = max(self._clocks[line.name], answer.lamport)

    def _silent(self) -> list[Name]:
        """Processes that may still report a clock as low as the lowest one held back."""
        if not self._ready:
            return []
        lowest = self._ready[0][0]
        return [name for name, line in self._lines.items() if not line.gone and self._clocks[name] < lowest]


class _Blocked(Struct, frozen=True):
    """What the next report of a process waits for: another process, and how many of its reports."""

    on: _Line
    known: int


class ByVector(_Deliverer):
    """By vector clock: held back until everything that happened before it was delivered, without probes.

    Only the next report of a process can be deliverable, and it waits for one thing at a time: the first of its causes
    that is missing. So each report is examined when it comes to the head of its line, and again when that cause has
    been delivered; how many others are held back does not matter.
    """

    def __init__(self, processes: Sequence[Name], grace: float = 1.0) -> None:
        super().__init__(processes, grace)
        self._all = list(self._lines.values())
        self._passed = np.zeros(len(self._all), np.int64)  # Of each process, how many reports need not be waited for.
        self._blocked: list[_Blocked | None] = [None] * len(self._all)
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in self._all]
        """Of each process, the lines that are blocked on it: a heap of how many of its reports they need, and which."""

    def join(self, process: Name) -> None:
        """One more process."""
        super().join(process)
        for line in list(self._lines.values())[len(self._all) :]:
            self._all.append(line)
            self._blocked.append(None)
            self._waiting.append([])
            self._passed = np.append(self._passed, 0)

    def _take(self, line: _Line, report: EventReport, now: float) -> Iterator[Effect]:
        size = len(report.vector)
        if not line.index < size <= len(self._all) or report.vector[line.index] != report.number:
            raise UsageError(
                f"report {report.number} of {line.name} has the vector clock {report.vector}: it must have an entry "
                f"for each of the {len(self._all)} processes, and its own must be the report's number."
            )
        return super()._take(line, report, now)

    def _released(self, event: Event, now: float) -> Iterator[Effect]:  # noqa: ARG002
        match event:
            case Received(sender=name) | Timer(token=Ended(name=name)) if name in self._lines:
                changed = [self._lines[name]]
            case _:
                return
        while changed:
            line = changed.pop()
            while (report := line.head()) is not None and not self._is_blocked(line, report, changed):
                yield Start(Delivery(line.name, line.pop()))
            self._passed[line.index] = line.next - 1
            waiting = self._waiting[line.index]
            while waiting and (line.gone or waiting[0][0] < line.next):
                other = self._all[heappop(waiting)[1]]
                self._blocked[other.index] = None
                changed.append(other)

    def _is_blocked(self, line: _Line, report: EventReport, changed: list[_Line]) -> bool:
        """Whether something is missing that this report depends on; what will never come is given up."""
        blocked = self._blocked[line.index]
        if blocked is not None and blocked.known >= blocked.on.next:
            return True
        self._passed[line.index] = line.next - 1
        ahead = np.greater(report.vector, self._passed[: len(report.vector)])
        if np.count_nonzero(ahead) == 1:  # Its own entry.
            return False
        for index in np.flatnonzero(ahead).tolist():
            other, known = self._all[index], int(report.vector[index])
            if other is line or known < other.next:
                continue
            if not other.gone or other.head() is not None:
                self._blocked[line.index] = _Blocked(other, known)
                heappush(self._waiting[index], (known, line.index))
                return True
            other.give_up(known + 1)
            changed.append(other)
        return False


class ByArrival(_Deliverer):
    """In order of arrival, for comparison only: it proves nothing."""

    def __init__(self, processes: Sequence[Name]) -> None:
        super().__init__(processes, 0.0)

    def _take(self, line: _Line, report: EventReport, now: float) -> Iterator[Effect]:  # noqa: ARG002
        yield Start(Delivery(line.name, report))
