"""The order in which a live monitor judges events: records in, deliveries out, by the rule of `--delivery`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from offbeat.protocols.causality.clock_stamps import MOST_CAUSES, ClockStamper, Occurrence
from offbeat.protocols.causality.delivery import (
    ByLamport,
    ByNumber,
    ByTime,
    ByVector,
    Delivery,
    EventReport,
    Probe,
)
from offbeat.protocols.causality.delivery_rule import BOUNDS, FIFO, LAMPORT, TIME, VECTOR, DeliveryRule
from offbeat.protocols.machine import Effect, Event, Name, Received, Send, SetTimer, Start, Timer


class _DeliveryMachine(Protocol):
    def on(self, event: Event, now: float) -> Sequence[Effect]: ...

    def join(self, process: Name) -> None: ...


_MACHINES: Final[Mapping[str, Callable[[Sequence[Name], float], _DeliveryMachine]]] = {
    FIFO: lambda names, _: ByNumber(names),
    TIME: ByTime,
    LAMPORT: ByLamport,
    VECTOR: lambda names, _: ByVector(names),
}


class CutCheck:
    """Whether the events delivered so far are a consistent cut: none of them lacks a cause."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._given: dict[Hashable, None] = {}
        self._lacking: dict[Hashable, float] = {}

    def add(self, occurrence: Occurrence, now: float) -> None:
        """One more event has been delivered."""
        for name in occurrence.gives:
            self._lacking.pop(name, None)
            self._given[name] = None
        for cause in occurrence.needs:
            if cause.name not in self._given:
                self._lacking.setdefault(cause.name, now)
        while len(self._given) > MOST_CAUSES:
            del self._given[next(iter(self._given))]

    def is_consistent(self, now: float) -> bool:
        """Whether no event lacks a cause that may still come."""
        self._lacking = {name: since for name, since in self._lacking.items() if now - since <= self._patience}
        return not self._lacking


class CausalOrder:
    """Puts the events of all processes into the order of a rule of delivery.

    Under `vector` and `lamport` events get their clocks here, from the names of their causes, and nobody need carry
    clocks. Under `time` and `fifo`, which may deliver an effect before its cause, `is_consistent` says whether what has
    been delivered can be judged.
    """

    def __init__(self, names: Sequence[Name], rule: DeliveryRule) -> None:
        self.rule = rule
        self._machine = _MACHINES[rule.name](names, rule.seconds)
        patience = rule.seconds if rule.name == VECTOR else BOUNDS[VECTOR]
        self._stamper = ClockStamper(names, patience) if rule.name in (VECTOR, LAMPORT) else None
        self._check = CutCheck(patience)
        self._names = dict.fromkeys(names, 0)  # Of each process, how many of its events have been taken in.
        self._timers: dict[Any, float] = {}
        self._ready: list[tuple[Name, Any]] = []
        self._delivered = 0
        self.probes = 0
        self.late = 0  # Number of events that came too late for their place in the order.

    def join(self, name: Name) -> None:
        """Make a process known; nothing happens if it is."""
        if name not in self._names:
            self._names[name] = 0
            self._machine.join(name)
            if self._stamper is not None:
                self._stamper.join(name)

    def hear(self, name: Name, occurrence: Occurrence, now: float) -> None:
        """Take in the next event of a process."""
        self.join(name)
        self._names[name] += 1
        if self._stamper is not None:
            self._report(self._stamper.add(name, occurrence, now), now)
        else:
            report = EventReport(self._names[name], occurrence.time, event=occurrence)
            self._on(Received(name, report), now)

    def ended(self, name: Name, now: float) -> None:
        """A process has ended, and all of its events have been taken in."""
        if self._stamper is not None and name in self._names:
            self._report(self._stamper.ended(name, now), now)

    def due(self, now: float, all_of_it: bool = False) -> Iterator[tuple[Name, Any]]:
        """Processes and events whose turn has come, in order; or all that have been taken in, as well as possible."""
        if self._stamper is not None:
            self._report(self._stamper.expire(float("inf") if all_of_it else now), now)
        for token in [token for token, at in self._timers.items() if all_of_it or at <= now]:
            self._timers.pop(token, None)
            self._on(Timer(token), now)
        if self.rule.name == TIME:
            self._on(Timer("look"), float("inf") if all_of_it else now)
        if all_of_it and self.rule.name == LAMPORT:
            self._on(Timer(Probe(0)), now)  # Everybody answers with a clock above all that are held back.
        ready, self._ready = self._ready, []
        yield from ready

    def is_consistent(self, now: float) -> bool:
        """Whether what has been delivered is a consistent cut."""
        return self._stamper is not None or self._check.is_consistent(now)

    @property
    def held(self) -> int:
        """Number of events that are held back."""
        return sum(self._names.values()) - self._delivered

    @property
    def given_up(self) -> int:
        """Number of causes that were not waited for any longer."""
        return 0 if self._stamper is None else self._stamper.given_up

    def _report(self, reports: Iterable[tuple[Name, EventReport]], now: float) -> None:
        for name, report in reports:
            self._on(Received(name, report), now)

    def _on(self, event: Event, now: float) -> None:
        for effect in self._machine.on(event, now):
            if isinstance(effect, Start) and isinstance(effect.work, Delivery):
                occurrence: Occurrence = effect.work.report.event
                self.late += effect.work.late
                self._delivered += 1
                if self._stamper is None:
                    self._check.add(occurrence, now)
                self._ready.append((effect.work.process, occurrence.event))
            elif isinstance(effect, SetTimer):
                self._timers[effect.token] = now + effect.after
            elif isinstance(effect, Send) and isinstance(effect.message, Probe) and self._stamper is not None:
                # Clocks are made here, so that what a process does next can be promised a higher one.
                self.probes += 1
                answer = self._stamper.probed(effect.to, effect.message.lamport)
                self._on(Received(effect.to, answer), now)
