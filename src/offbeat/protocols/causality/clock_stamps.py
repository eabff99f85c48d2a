"""Lamport and vector clocks for events as they come in, from the names of their causes.

Processes need not carry clocks on their messages: an event says under which names it is a cause of others (a message,
an entry into a collective), and which names it depends on. An event is given its clocks once those before it in its
process and its causes have theirs. That is the direct-dependency method of Fowler and Zwaenepoel, "Causal Distributed
Breakpoints" (1990). What `delivery` then makes of the clocks is its own matter.

Nothing waits for ever: a cause that has not come after `patience` seconds, or whose process has ended, is given up, and
counted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.protocols.causality.delivery import Alive, EventReport
from offbeat.protocols.causality.histories import IntArray, lamport
from offbeat.protocols.machine import Name

MOST_CAUSES: Final = (
    1 << 17
)  # Names of causes that are remembered; older ones are forgotten, and given up if asked for.


class Cause(NamedTuple):
    """An event that another depends on."""

    name: Hashable
    process: Name | None = None  # Whose event it is, if that is known.


class Occurrence(Struct, frozen=True, gc=False):
    """An event whose causes are known by name."""

    gives: tuple[Hashable, ...] = ()  # The names under which it is a cause of others.
    needs: tuple[Cause, ...] = ()  # Its causes in other processes.
    time: float = 0.0
    event: Any = None


class _EventClocks(NamedTuple):
    lamport: int
    vector: IntArray


class _Stamped:
    """One process: its latest clocks, and its events that have none yet."""

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.count = 0
        self.clocks = _EventClocks(0, np.zeros(size, np.int64))
        self.pending: deque[tuple[float, Occurrence]] = deque()
        self.wants: Hashable = None  # The name of the cause that its next event waits for.
        self.ended = False


class ClockStamper:
    """Gives events their clocks. Not a machine: it only computes, and its caller says what time it is."""

    def __init__(self, processes: Sequence[Name], patience: float = 2.0) -> None:
        if not patience >= 0:
            raise UsageError(f"a patience of {patience} seconds makes no sense: give 0 or more.")
        self.patience = patience
        self.given_up = 0  # Number of causes that were not waited for any longer.
        self._processes = {name: _Stamped(index, len(processes)) for index, name in enumerate(processes)}
        self._known: OrderedDict[Hashable, _EventClocks] = OrderedDict()
        self._waiting: dict[Hashable, list[Name]] = {}

    def join(self, process: Name) -> None:
        """One more process; the clocks of earlier events have no entry for it, which means 0."""
        self._processes.setdefault(process, _Stamped(len(self._processes), len(self._processes) + 1))

    @property
    def held(self) -> int:
        """Number of events that have no clocks yet."""
        return sum(len(own.pending) for own in self._processes.values())

    def waits(self, now: float) -> dict[Name, tuple[float, Hashable]]:
        """Processes whose events are held back: for how long, and for the name of which cause."""
        waiting = {name: own for name, own in self._processes.items() if own.pending}
        return {name: (now - own.pending[0][0], own.wants) for name, own in waiting.items()}

    def add(self, process: Name, occurrence: Occurrence, now: float) -> Iterator[tuple[Name, EventReport]]:
        """The next event of a process; returns all that have clocks now, causes first."""
        own = self._processes[process]
        own.ended = False  # Another process may have taken its place.
        own.pending.append((now, occurrence))
        if len(own.pending) == 1:
            yield from self._stamped([process], now)

    def ended(self, process: Name, now: float) -> Iterator[tuple[Name, EventReport]]:
        """A process has ended, and all of its events were added: no more causes can come from it."""
        self._processes[process].ended = True
        yield from self._stamped(list(self._processes), now)

    def expire(self, now: float) -> Iterator[tuple[Name, EventReport]]:
        """What has clocks once causes are given up that are overdue."""
        overdue = [
            name
            for name, own in self._processes.items()
            if own.pending and now - own.pending[0][0] > self.patience
        ]  # fmt: skip
        if overdue:
            yield from self._stamped(overdue, now)

    def probed(self, process: Name, clock: int) -> Alive:
        """A process's answer to a liveness probe, which knows all clocks so far: its later ones are higher."""
        own = self._processes[process]
        highest = max(other.clocks.lamport for other in self._processes.values())
        own.clocks = own.clocks._replace(lamport=lamport(highest, clock))
        return Alive(own.clocks.lamport, own.count)

    def _stamped(self, names: list[Name], now: float) -> Iterator[tuple[Name, EventReport]]:
        while names:
            name = names.pop()
            own = self._processes[name]
            while own.pending:
                since, occurrence = own.pending[0]
                missing = self._missing(occurrence, now - since > self.patience)
                if missing is not None:
                    if missing != own.wants:
                        own.wants = missing
                        self._waiting.setdefault(missing, []).append(name)
                    break
                own.pending.popleft()
                own.wants = None
                yield name, self._stamp(own, occurrence)
                for given in occurrence.gives:
                    names += self._waiting.pop(given, ())

    def _missing(self, occurrence: Occurrence, overdue: bool) -> Hashable:
        """The name of a cause that has not come, and may still come."""
        for cause in occurrence.needs:
            if cause.name not in self._known and not overdue:
                process = None if cause.process is None else self._processes.get(cause.process)
                if process is None or not process.ended or process.pending:
                    return cause.name
        return None

    def _stamp(self, own: _Stamped, occurrence: Occurrence) -> EventReport:
        clock, vector = own.clocks.lamport, own.clocks.vector
        if len(vector) <= own.index or occurrence.needs or len(vector) < len(self._processes):
            vector = np.zeros(len(self._processes), np.int64)
            vector[: len(own.clocks.vector)] = own.clocks.vector
        else:
            vector = vector.copy()
        for cause in occurrence.needs:
            known = self._known.get(cause.name)
            if known is None:
                self.given_up += 1
                continue
            clock = max(clock, known.lamport)
            part = vector[: len(known.vector)]
            np.maximum(part, known.vector, out=part)
        own.count += 1
        vector[own.index] = own.count
        own.clocks = _EventClocks(clock + 1, vector)
        for given in occurrence.gives:
            self._known.setdefault(given, own.clocks)
        while len(self._known) > MOST_CAUSES:
            self._known.popitem(last=False)
        return EventReport(own.count, occurrence.time, own.clocks.lamport, vector, occurrence)
