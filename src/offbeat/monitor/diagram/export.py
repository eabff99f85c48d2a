"""Exports of a run for other tools: a ShiViz log, a Chrome trace, lines of JSON."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

from offbeat.errors import OutputError, UsageError, did_you_mean
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.diagram.model import SECONDS, Diagram
from offbeat.protocols.causality.histories import json_lines
from offbeat.protocols.causality.shiviz import write

ENDINGS: Final[Mapping[str, str]] = {
    ".shiviz": "shiviz", ".log": "shiviz", ".jsonl": "jsonl", ".perfetto": "perfetto", ".pftrace": "perfetto",
    ".json": "trace",
}  # fmt: skip
"""The kind of export for each file name ending."""
KINDS: Final = ("shiviz", "perfetto", "trace", "jsonl")  # `perfetto` and `trace` are both a Chrome trace.
_EVERYTHING: Final = 10**9
_WORK, _EVENTS = 0, 1


def kind_of(path: Path, kind: str | None = None) -> str:
    """The kind of export: the requested one, or the one that the file name's ending stands for."""
    if kind is not None and kind not in KINDS:
        raise UsageError(f"nothing is exported as {kind!r}.{did_you_mean(kind, KINDS)}")
    kind = kind or ENDINGS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(
            f"{path} does not say as what to export: let it end in {', '.join(ENDINGS)}, or add --as {'|'.join(KINDS)}."
        )
    return kind


def export(scene: Scene, path: Path, kind: str | None = None) -> str:
    """Write a run for another tool; returns the kind of export."""
    kind = kind_of(path, kind)
    try:
        path.write_bytes(exported(scene, kind))
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}. Choose another path.") from error
    return kind


def exported(scene: Scene, kind: str) -> bytes:
    """The contents of an export."""
    if kind == "shiviz":
        text = write(scene.run)
    elif kind == "jsonl":
        text = "".join(f"{line}\n" for line in json_lines(scene.run))
    else:
        text = json.dumps(chrome_trace(scene.diagram(shapes=_EVERYTHING))) + "\n"
    return text.encode()


def chrome_trace(diagram: Diagram) -> dict[str, Any]:
    """A diagram as a Chrome trace, which ui.perfetto.dev opens; one unit of logical time is a millisecond.

    Each process has a track of what it was doing, a track of its events, and its stays in collectives, which may
    overlap. A flow leads from the last member to enter a collective to the exit of each member that it held up, and
    from each send to its receipt.
    """
    trace = _Trace(diagram)
    return {"traceEvents": [*trace.tracks(), *trace.work(), *trace.stays(), *trace.events()], "displayTimeUnit": "ms"}


class _Trace:
    def __init__(self, diagram: Diagram) -> None:
        self._diagram = diagram
        self._scale = 1e6 if diagram.axis == SECONDS else 1e3
        self._flows = count()
        self._events = defaultdict[int, list[tuple[float, str, str, dict[str, Any]]]](list)
        """Of each lane: time, name, category, and the start or end of a flow."""
        for mark in diagram.marks:
            self._event(mark.lane, mark.time, mark.label or mark.kind, mark.kind, {})
        for arrow in diagram.arrows:
            what = f" {arrow.label}" if arrow.label else ""
            ends = (arrow.source, arrow.start, f"send{what}"), (arrow.target, arrow.stop, f"receive{what}")
            self._flow(*ends, "message")
        for band in diagram.bands:
            # Nobody is known to have held up the others if not all have entered.
            entry = next((stay.start for stay in band.stays if stay.lane == band.last), math.inf)
            for stay in band.stays:
                if band.last is not None and stay.lane != band.last and stay.stop >= entry:
                    first, last = (band.last, entry, f"last in {band.label}"), f"left {band.label}"
                    self._flow(first, (stay.lane, stay.stop, last), "collective")

    def tracks(self) -> Iterator[dict[str, Any]]:
        """Names of the tracks."""
        for lane, name in enumerate(self._diagram.names):
            yield {"ph": "M", "name": "process_name", "pid": lane, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": lane, "args": {"sort_index": lane}}
            for track, words in ((_WORK, "work and waits"), (_EVENTS, "events")):
                yield {"ph": "M", "name": "thread_name", "pid": lane, "tid": track, "args": {"name": words}}

    def work(self) -> Iterator[dict[str, Any]]:
        """What each process was doing."""
        for span in self._diagram.spans:
            name = f"{span.kind}: {span.label}" if span.label else span.kind
            start, stop = self._at(span.start), self._at(span.stop)
            where = {"pid": span.lane, "tid": _WORK, "ts": start, "dur": stop - start}
            yield {"ph": "X", "cat": span.kind, "name": name, **where}

    def stays(self) -> Iterator[dict[str, Any]]:
        """Stays in collectives; one that is never left has no end."""
        for number, band in enumerate(self._diagram.bands):
            for stay in band.stays:
                common = {"cat": "collective", "name": band.label, "id": f"{number}.{stay.lane}", "pid": stay.lane}
                yield {"ph": "b", "tid": _WORK, "ts": self._at(stay.start), **common}
                if not stay.open:
                    yield {"ph": "e", "tid": _WORK, "ts": self._at(stay.stop), **common}

    def events(self) -> Iterator[dict[str, Any]]:
        """Marks and messages as slices of at most a microsecond, to which flows can be attached."""
        for lane, events in self._events.items():
            events.sort(key=lambda event: event[0])
            for (time, name, category, flow), (following, *_) in pairwise([*events, (math.inf, "", "", {})]):
                where = {"pid": lane, "tid": _EVENTS, "ts": time}
                yield {"ph": "X", "cat": category, "name": name, "dur": min(1.0, following - time), **where}
                if flow:
                    yield {"cat": category, "name": category, **flow, **where}

    def _at(self, time: float) -> float:
        """Microseconds since the start of the diagram."""
        return (time - self._diagram.start) * self._scale

    def _event(self, lane: int, time: float, name: str, category: str, flow: dict[str, Any]) -> None:
        self._events[lane].append((self._at(time), name, category, flow))

    def _flow(self, begin: tuple[int, float, str], end: tuple[int, float, str], category: str) -> None:
        number = next(self._flows)
        self._event(*begin, category, {"ph": "s", "id": number})
        self._event(*end, category, {"ph": "f", "bp": "e", "id": number})
