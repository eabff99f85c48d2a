"""One order for what the processes of a run write down while it goes: by time, a fixed while after it happened.

All processes of a host read the same clock, and what they write is in memory at once. So a look that takes in what is
at least `delta` seconds old sees the run as it was at that moment, whichever file it reads first, and whenever it is
told that a process has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from offbeat.protocols.causality.delivery import ByTime, Delivery, EventReport, LateReport
from offbeat.protocols.machine import Effect, Name, Received, Start, Timer

Heard = tuple[Name, Any]
"""Who, and what it did."""


class Listener:
    """Holds what was read back until nothing older can still be unread."""

    def __init__(self, names: Sequence[Name], delta: float) -> None:
        self._counts = dict.fromkeys(names, 0)
        self._machine = ByTime(names, delta)
        self._ready: list[Effect] = []

    def hear(self, name: Name, time: float, what: Any, now: float) -> None:
        """A process has done something at that time."""
        self._counts[name] += 1
        self._ready += self._machine.on(Received(name, EventReport(self._counts[name], time, event=what)), now)

    def due(self, now: float) -> Iterator[Heard]:
        """What is old enough, in order; with an infinite time, all of it."""
        effects, self._ready = [*self._ready, *self._machine.on(Timer("look"), now)], []
        for effect in effects:
            if isinstance(effect, Start) and isinstance(effect.work, Delivery | LateReport):
                yield effect.work.process, effect.work.report.event
