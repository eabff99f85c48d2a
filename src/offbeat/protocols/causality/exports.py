"""A computation as other tools read it: a trace for Perfetto, and lines of JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from offbeat.protocols.causality.histories import Computation, Edge, Event, Kind, Place

_MICRO = 1e6


def perfetto(computation: Computation) -> dict[str, Any]:
    """A trace for ui.perfetto.dev or chrome://tracing, to be written as JSON.

    Each process has a track of events, and beside it its stays in collectives, which may overlap. A flow leads to each
    effect from the last of its causes: what it really waited for.
    """
    start = min((event.time for history in computation.histories for event in history), default=0.0)
    records = [*_names(computation)]
    for place in computation.order:
        records += _slice(computation, place, start)
    for process in range(computation.size):
        records += _stays(computation, process, start)
    for number, (cause, effect) in enumerate(_flows(computation)):
        flow = {"cat": "cause", "name": "cause", "id": number}
        records.append({"ph": "s", **flow, **_where(computation, cause, start)})
        records.append({"ph": "f", "bp": "e", **flow, **_where(computation, effect, start)})
    return {"traceEvents": records, "displayTimeUnit": "ms"}


def json_lines(computation: Computation) -> Iterator[str]:
    """Each event as a line of JSON, causes before effects: what it was, its clocks and its direct causes."""
    for place in computation.order:
        known = msgspec.to_builtins(computation.event(place), enc_hook=str)
        entries = {
            "process": computation.processes[place.process],
            "number": place.number,
            **{key: value for key, value in known.items() if value not in (None, "", [], {})},
            "lamport": int(computation.lamports[place.process][place.number]),
            "vector": computation.vector(place),
            "causes": [[computation.processes[i], number] for i, number in computation.causes(place)],
        }
        yield msgspec.json.encode(entries).decode()


def _flows(computation: Computation) -> Iterator[Edge]:
    for join in computation.joins:
        last = max(join.causes, key=lambda cause: (computation.event(cause).time, cause))
        yield from (Edge(last, effect) for effect in join.effects if effect.process != last.process)


def _names(computation: Computation) -> Iterator[Mapping[str, Any]]:
    for process, name in enumerate(computation.processes):
        for record in ("process_name", "thread_name"):
            yield {"ph": "M", "name": record, "pid": process, "tid": 0, "args": {"name": name}}


def _where(computation: Computation, place: Place, start: float) -> dict[str, Any]:
    return {"pid": place.process, "tid": 0, "ts": (computation.event(place).time - start) * _MICRO}


def _title(event: Event) -> str:
    call = f"{event.call.operation} #{event.call.sequence}" if event.call else ""
    return " ".join(part for part in (event.kind, event.what or call) if part)


def _slice(computation: Computation, place: Place, start: float) -> Iterator[Mapping[str, Any]]:
    """An event as a slice of a microsecond, or less if the next one follows sooner, for flows to hold on to."""
    event = computation.event(place)
    history = computation.histories[place.process]
    until = history[place.number].time if place.number < len(history) else event.time + 1.0
    where = _where(computation, place, start)
    details = {"number": place.number, **event.labels, **{f"{kind} seconds": s for kind, s in event.spent.items()}}
    length = max(0.0, min(1.0, (until - event.time) * _MICRO))
    yield {"ph": "X", "cat": str(event.kind), "name": _title(event), "dur": length, "args": details, **where}


def _stays(computation: Computation, process: int, start: float) -> Iterator[Mapping[str, Any]]:
    """From each entry into a collective to its exit; one that is never left has no end."""
    for number, event in enumerate(computation.histories[process], 1):
        if event.call is not None and event.kind in (Kind.ENTER, Kind.EXIT):
            yield {
                "ph": "b" if event.kind is Kind.ENTER else "e",
                "cat": "collective",
                "name": f"{event.call.operation} #{event.call.sequence} of group {event.call.group}",
                "id": f"{process}/{event.call.group}/{event.call.sequence}",
                "args": {"call": str(event.call)},
                **_where(computation, Place(process, number), start),
            }
