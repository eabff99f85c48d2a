"""A space-time diagram as a Chrome trace in JSON, which ui.perfetto.dev and chrome://tracing open.

Each process has a track of what it was in, a track of its events, and its stays in collectives, which may overlap. A
flow leads from whoever entered a collective last to where each that it held up left, and from each sending to its
receipt.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from offbeat.monitor.diagram.model import SECONDS, Band, Diagram

_WORK, _EVENTS = 0, 1


def chrome_trace(lanes: Diagram) -> dict[str, Any]:
    """The trace, to be written as JSON; by logical time, each step is a millisecond."""
    trace = _Trace(lanes)
    return {"traceEvents": [*trace.tracks(), *trace.work(), *trace.stays(), *trace.events()], "displayTimeUnit": "ms"}


class _Trace:
    """Makes the records of a trace."""

    def __init__(self, lanes: Diagram) -> None:
        self._lanes = lanes
        self._scale = 1e6 if lanes.axis == SECONDS else 1e3
        self._events = defaultdict[int, list[tuple[float, str, str, dict[str, Any]]]](list)
        """Of each lane: when, what, of which category, and which flow begins or ends with it."""
        for mark in lanes.marks:
            self._event(mark.lane, mark.time, mark.label or mark.kind, mark.kind)
        flows = iter(range(10**9))
        for arrow in lanes.arrows:
            what, flow = f" {arrow.label}" if arrow.label else "", next(flows)
            self._event(arrow.source, arrow.start, f"send{what}", "message", {"ph": "s", "id": flow})
            self._event(arrow.target, arrow.stop, f"receive{what}", "message", {"ph": "f", "bp": "e", "id": flow})
        for band in lanes.bands:
            entry = _last_entry(band)
            for stay in band.stays:
                if stay.lane != band.last and stay.stop >= entry and band.last is not None:
                    flow = next(flows)
                    self._event(band.last, entry, f"last in {band.label}", "collective", {"ph": "s", "id": flow})
                    left = {"ph": "f", "bp": "e", "id": flow}
                    self._event(stay.lane, stay.stop, f"left {band.label}", "collective", left)

    def tracks(self) -> Iterator[dict[str, Any]]:
        """What the tracks are called."""
        for lane, name in enumerate(self._lanes.names):
            yield {"ph": "M", "name": "process_name", "pid": lane, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": lane, "args": {"sort_index": lane}}
            for track, words in ((_WORK, "work and waits"), (_EVENTS, "events")):
                yield {"ph": "M", "name": "thread_name", "pid": lane, "tid": track, "args": {"name": words}}

    def work(self) -> Iterator[dict[str, Any]]:
        """What each process was in."""
        for span in self._lanes.spans:
            name = f"{span.kind}: {span.label}" if span.label else span.kind
            start, stop = self._at(span.start), self._at(span.stop)
            where = {"pid": span.lane, "tid": _WORK, "ts": start, "dur": stop - start}
            yield {"ph": "X", "cat": span.kind, "name": name, **where}

    def stays(self) -> Iterator[dict[str, Any]]:
        """Stays in collectives; one that is never left has no end."""
        for number, band in enumerate(self._lanes.bands):
            for stay in band.stays:
                known = {"cat": "collective", "name": band.label, "id": f"{number}.{stay.lane}", "pid": stay.lane}
                yield {"ph": "b", "tid": _WORK, "ts": self._at(stay.start), **known}
                if not stay.open:
                    yield {"ph": "e", "tid": _WORK, "ts": self._at(stay.stop), **known}

    def events(self) -> Iterator[dict[str, Any]]:
        """Marks and messages as slices of a microsecond at most, for flows to hold on to."""
        for lane, some in self._events.items():
            some.sort(key=lambda event: event[0])
            for (time, name, category, flow), (following, *_) in pairwise([*some, (math.inf, "", "", {})]):
                where = {"pid": lane, "tid": _EVENTS, "ts": time}
                yield {"ph": "X", "cat": category, "name": name, "dur": min(1.0, following - time), **where}
                if flow:
                    yield {"cat": category, "name": category, **flow, **where}

    def _at(self, time: float) -> float:
        """Microseconds since the diagram's beginning."""
        return (time - self._lanes.start) * self._scale

    def _event(self, lane: int, time: float, name: str, category: str, flow: dict[str, Any] | None = None) -> None:
        self._events[lane].append((self._at(time), name, category, flow or {}))


def _last_entry(band: Band) -> float:
    """When the last member came; infinite if that is not known, so that nobody was held up by it."""
    return next((stay.start for stay in band.stays if stay.lane == band.last), math.inf)
