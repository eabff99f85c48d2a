"""From the events of a run to its space-time diagram: a scene is indexed once, then any window is cut out of it.

Events too many to tell apart are merged, and the diagram says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
from msgspec import structs

from offbeat.errors import UsageError
from offbeat.monitor.diagram import intervals
from offbeat.monitor.diagram.cuts import line_of
from offbeat.monitor.diagram.intervals import INTERVAL, KINDS, NO_CALL, CallGroups, Window, apart, layered
from offbeat.monitor.diagram.model import LOGICAL, MANY, SECONDS, Arrow, Band, Diagram, Moment, Span, Stay
from offbeat.monitor.diagram.waits import Floats, Lane, Names, Table, joined, lane_of, stays_of
from offbeat.monitor.history import STEPS, history_of
from offbeat.monitor.intake.clocks import lane_notes
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.cuts import Cut
from offbeat.protocols.causality.histories import Computation, Edge, Event, EventKind, EventPosition
from offbeat.runtime.events.machines import MachineRecord
from offbeat.runtime.events.recorder import Stamp

SHAPES: Final = 2000  # Approximate number of shapes of each sort in a diagram before they are merged.
_COARSE: Final = 100  # Minimum number of columns that a lane is divided into.
_OWN: Final[Mapping[str, int]] = {
    "computing": intervals.COMPUTE, "compute": intervals.COMPUTE, "unknown": intervals.COMPUTE,
    "exchanging": intervals.COMMUNICATE, "communicate": intervals.COMMUNICATE, "wait": intervals.WAIT,
    "input": intervals.INPUT, "evaluating": intervals.EVALUATE, "evaluate": intervals.EVALUATE,
}  # fmt: skip
"""Interval kinds of the kinds of time that events and stamps name."""


class Scene:
    """A run, indexed so that windows of it can be drawn."""

    def __init__(
        self,
        run: Computation,
        title: str = "",
        *,
        stamps: Mapping[int, Sequence[Stamp]] | None = None,
        notes: Iterable[str] = (),
        machines: Sequence[str] = (),
    ) -> None:
        """Index a run; `stamps` are the workers' own records, where they say more than `run`."""
        self.run, self.title, self.notes, self.machines = run, title, tuple(notes), tuple(machines)
        times = [event.time for history in run.histories for event in history]
        self.axis = SECONDS if any(times) else LOGICAL
        self.start = 0.0 if self.axis == SECONDS else 1.0
        self.origin = min(times) if self.axis == SECONDS else 0.0
        self.times = [self._times(process) for process in range(run.size)]
        self._names = Names()
        lanes = [lane_of(worker_name(rank), own, self._names) for rank, own in (stamps or {}).items()]
        self._calls = CallGroups(self._stays(None if stamps is None else lanes), self._names, run.processes)
        self._computed = intervals.computations(lanes)
        for column in ("start", "stop"):
            self._computed[column] -= self.origin
        failed = self._calls.stays[self._calls.stays["failed"]]
        ends = [float(times[-1]) for times in self.times if times.size] + failed["ended"].tolist()
        self.stop = max(ends, default=self.start)
        self._window = Window(self._intervals(run.size if stamps is None else len(stamps)), run.size)
        self._bands = self._collectives()
        self._arrows = [self._arrow(edge) for edge in messages(run)]
        self._marks = [*self._moments(), *self._failures(failed)]

    @classmethod
    def of(
        cls,
        stamps: Mapping[int, Sequence[Stamp]],
        title: str = "",
        dropped: int = 0,
        servers: Mapping[str, Sequence[Stamp]] | None = None,
        machines: Sequence[MachineRecord] = (),
    ) -> Scene:
        """From the records of a run's workers and servers, and the machines that they were on."""
        notes = [f"{dropped:,} older events were overwritten."] if dropped else []
        run = history_of(stamps, servers)
        return cls(run, title, stamps=stamps, notes=notes, machines=lane_notes(run.processes, machines))

    def diagram(
        self, window: tuple[float, float] | None = None, cuts: Mapping[str, Cut] | None = None, shapes: int = SHAPES
    ) -> Diagram:
        """A window of the run, with about `shapes` shapes of each sort at most; `cuts` are drawn by their names."""
        start, stop = window or (self.start, self.stop)
        if start > stop:
            raise UsageError(f"a window from {start:g} to {stop:g} ends before it begins: give the earlier time first.")
        view = _View(start, stop, max(_COARSE, shapes // max(1, self.run.size)), shapes)
        return Diagram(
            title=self.title,
            axis=self.axis,
            start=start,
            stop=stop,
            names=self.run.processes,
            spans=tuple(self._spans(view)),
            arrows=tuple(self._messages(view)),
            bands=tuple(self._meetings(view)),
            marks=tuple(self._marked(view)),
            cuts=tuple(line_of(self.run, self.times, name, cut) for name, cut in (cuts or {}).items()),
            events=sum(int(((times >= start) & (times <= stop)).sum()) for times in self.times),
            origin=self.origin,
            machines=self.machines,
            notes=(*self.notes, *view.notes()),
        )

    # -- index --------------------------------------------------------------------------------------------------------

    def _times(self, process: int) -> Floats:
        if self.axis == LOGICAL:
            return self.run.lamports[process][1:].astype(float)
        times = np.array([event.time - self.origin for event in self.run.histories[process]], float)
        # An event that was recorded a little late is not before the previous one.
        return np.maximum.accumulate(times) if times.size else times

    def _stays(self, known: Sequence[Lane] | None) -> Table:
        if known is None:
            return stays_of(self.run, self.times, self._names)
        stays = joined(known)
        for column in ("begun", "waited", "ended"):
            stays[column] -= self.origin
        # Steps on servers are collectives that only the run as a whole shows; waits in them were recorded.
        steps = stays_of(self.run, self.times, self._names, {STEPS})
        steps["waited"] = np.inf
        return np.concatenate([stays, steps])

    def _intervals(self, workers: int) -> Table:
        """The calls of each worker, and between them its own work; of a server neither is known."""
        calls = intervals.intervals(self._calls, self.stop, live=False)
        calls = calls[calls["kind"] != intervals.UNDER_WAY]
        lanes: list[Table] = [calls[:0]]
        for lane in range(workers):
            history, times = self.run.histories[lane], self.times[lane].tolist()
            rows = _own(history, times, lane) if self.axis == SECONDS else []
            above = np.concatenate([own[own["lane"] == lane] for own in (calls, self._computed)])
            lanes.append(layered(np.array(rows, INTERVAL), apart(above)))
        return np.concatenate(lanes)

    def _arrow(self, edge: Edge) -> Arrow:
        label = self.run.event(edge.cause).what or self.run.event(edge.effect).what
        sent, received = (float(self.times[process][number - 1]) for process, number in edge)
        return Arrow(edge.cause.process, edge.effect.process, sent, received, label)

    def _moments(self) -> Iterator[Moment]:
        """Steps, checkpoints, faults, ends; by logical time every event."""
        for lane, history in enumerate(self.run.histories):
            for event, time in zip(history, self.times[lane].tolist(), strict=True):
                if self.axis == LOGICAL:
                    yield Moment(lane, "event", time, event.what or str(event.call or event.kind))
                elif event.kind is EventKind.LOCAL:
                    yield Moment(lane, event.what.partition(" ")[0] or "event", time, event.what)

    def _failures(self, failed: Table) -> Iterator[Moment]:
        for stay in failed:
            label = self._names.labels[int(stay["label"])].what
            yield Moment(int(stay["lane"]), "fail", float(stay["ended"]), f"failed: {label} #{stay['sequence']}")

    def _collectives(self) -> list[tuple[int, float, float, int]]:
        """Of each collective: number, start, stop and channel."""
        starts = self._calls.reduced(np.minimum, "begun")
        stops = np.minimum(self._calls.reduced(np.maximum, "ended"), self.stop)
        channels = self._calls.reduced(np.minimum, "channel")
        rows = zip(range(len(self._calls)), starts.tolist(), stops.tolist(), channels.tolist(), strict=True)
        return [row for row in rows if self._names.channels[row[3]].collective]

    # -- contents of a window -----------------------------------------------------------------------------------------

    def _spans(self, view: _View) -> Iterator[Span]:
        alone, merged = self._window.seen(view.start, view.stop, view.columns, view.shapes)
        for row in alone[np.lexsort((alone["start"], alone["lane"]))]:
            label = self._numbered(row) if row["call"] != NO_CALL or row["kind"] >= intervals.FORWARD else ""
            kind, start, stop = KINDS[row["kind"]], float(row["start"]), float(row["stop"])
            yield Span(int(row["lane"]), kind, start, stop, label, open=bool(row["open"]))
        view.merged["spans"] += int(merged["count"].sum())
        ordered = merged[np.lexsort((merged["start"], merged["lane"]))]
        for (lane, start), group in groupby(ordered, key=lambda row: (int(row["lane"]), float(row["start"]))):
            rows = list(group)
            mix = {KINDS[row["kind"]]: float(row["share"]) for row in rows}
            count = sum(int(row["count"]) for row in rows)
            words = ", ".join(f"{kind} {share:.0%}" for kind, share in mix.items())
            yield Span(lane, MANY, start, float(rows[0]["stop"]), f"{count:,} spans: {words}", count, mix)

    def _numbered(self, row: Any) -> str:
        return self._names.labels[int(row["label"])].numbered(int(row["sequence"]))

    def _messages(self, view: _View) -> Iterator[Arrow]:
        rows, keys = self._arrows, [row.source * self.run.size + row.target for row in self._arrows]
        for group in view.thinned("messages", [row.start for row in rows], [row.stop for row in rows], keys):
            row, count = rows[group[0]], len(group)
            yield row if count == 1 else structs.replace(row, label=f"{count:,} messages", count=count)

    def _marked(self, view: _View) -> Iterator[Moment]:
        rows = self._marks
        numbers = {name: number for number, name in enumerate(dict.fromkeys(row.kind for row in rows))}
        times, keys = [row.time for row in rows], [row.lane * len(numbers) + numbers[row.kind] for row in rows]
        for group in view.thinned("marks", times, times, keys):
            row, count = rows[group[0]], len(group)
            yield row if count == 1 else structs.replace(row, label=f"{count:,} times {row.kind}", count=count)

    def _meetings(self, view: _View) -> Iterator[Band]:
        _, starts, stops, channels = zip(*self._bands, strict=True) if self._bands else ((), (), (), ())
        # A long one is never merged: it has a key of its own.
        keys = [
            channel if stop - start < view.width else -1 - number
            for number, (start, stop, channel) in enumerate(zip(starts, stops, channels, strict=True))
        ]
        for group in view.thinned("collectives", starts, stops, keys, max(1, self.run.size - 1)):
            yield self._band(self._bands[group[0]][0]) if len(group) == 1 else self._merged(group)

    def _band(self, call: int) -> Band:
        rows = self._calls.of(call)
        stays = tuple(
            Stay(
                int(row["lane"]), float(row["begun"]), min(float(row["ended"]), self.stop), bool(np.isinf(row["ended"]))
            )
            for row in np.sort(rows, order="lane")
        )
        members = self._names.channels[int(rows[0]["channel"])].members
        absent = {lane for lane, name in enumerate(self.run.processes) if name in members} - set(rows["lane"].tolist())
        missing = tuple(sorted(lane for lane in absent if not self._came_later(lane, rows[0])))
        last = int(rows[-1]["lane"]) if not absent and len(rows) > 1 else None
        return Band(self._numbered(rows[0]), stays, last, missing)

    def _came_later(self, lane: int, stay: Any) -> bool:
        """Whether a process entered a later call: then it entered this one, and the record was overwritten."""
        stays = self._calls.stays
        own = (stays["lane"] == lane) & (stays["channel"] == stay["channel"])
        return bool((stays["sequence"][own] > stay["sequence"]).any())

    def _merged(self, group: Sequence[int]) -> Band:
        numbers, starts, stops, _ = zip(*(self._bands[index] for index in group), strict=True)
        lanes = sorted({lane for number in numbers for lane in self._calls.of(number)["lane"].tolist()})
        stays = tuple(Stay(lane, min(starts), max(stops)) for lane in lanes)
        return Band(f"{len(group):,} collectives", stays, count=len(group))


class _View:
    """A window, its resolution, and the number of shapes merged for it."""

    def __init__(self, start: float, stop: float, columns: int, shapes: int) -> None:
        self.start, self.stop, self.columns, self.shapes = start, stop, columns, shapes
        self.width = (stop - start) / columns or 1.0  # Anything shorter cannot be told apart from its neighbour.
        self.merged = {"spans": 0, "collectives": 0, "messages": 0, "marks": 0}

    def thinned(
        self, name: str, starts: Sequence[float], stops: Sequence[float], keys: Sequence[int], each: int = 1
    ) -> list[list[int]]:
        """Indices to be drawn together: each alone, or, if too many, those that start in the same column.

        Args:
            name: What is thinned, for the notes.
            starts: When each begins.
            stops: When each ends.
            keys: Only those with the same key are drawn together.
            each: Number of shapes that each takes.

        """
        begun, over, key = np.array(starts, float), np.array(stops, float), np.array(keys, np.int64)
        inside = np.flatnonzero((over >= self.start) & (begun <= self.stop))
        if len(inside) * each <= self.shapes:
            return [[index] for index in inside.tolist()]
        column = np.floor((begun - self.start) / self.width).astype(np.int64)
        order = inside[np.lexsort((column[inside], key[inside]))]
        same = (key[order][1:] == key[order][:-1]) & (column[order][1:] == column[order][:-1])
        groups = [group.tolist() for group in np.split(order, np.flatnonzero(~same) + 1)]
        self.merged[name] += sum(len(group) for group in groups if len(group) > 1)
        return groups

    def notes(self) -> Iterator[str]:
        """What was merged, in words."""
        merged = [f"{count:,} {name}" for name, count in self.merged.items() if count]
        if merged:
            yield f"Too many for this window, and drawn together: {', '.join(merged)}. A smaller window shows them."


def _own(history: Sequence[Event], times: Sequence[float], lane: int) -> list[tuple[Any, ...]]:
    """How the time between events was spent, with neighbours of the same kind joined."""
    rows: list[tuple[float, float, int]] = []
    for event, start, stop in zip(history[1:], times[:-1], times[1:], strict=True):
        for kind, begin, end in _shares(event.spent, start, stop):
            if rows and rows[-1][2] == kind and rows[-1][1] == begin:
                rows[-1] = (rows[-1][0], end, kind)
            elif begin < end:
                rows.append((begin, end, kind))
    return [(start, stop, NO_CALL, 0, 1, 1.0, 0, lane, kind, False) for start, stop, kind in rows]


def _shares(spent: Mapping[str, float], start: float, stop: float) -> Iterator[tuple[int, float, float]]:
    """The kinds of time between two events, one after another: their true order is not known."""
    if not spent:
        yield intervals.COMPUTE, start, stop
        return
    scale = min(1.0, (stop - start) / (sum(spent.values()) or 1.0))
    at = start
    for kind, length in spent.items():
        yield _OWN.get(kind, intervals.OTHER), at, at + scale * length
        at += scale * length
    yield intervals.OTHER, min(at, stop), stop


def messages(run: Computation) -> Iterator[Edge]:
    """An edge from each send to its receipt; of a log, from each event to those that learned of it first."""
    for join in run.joins:
        if run.event(join.effects[0]).kind is EventKind.EXIT and run.event(join.causes[0]).kind is EventKind.ENTER:
            continue  # A collective is a band.
        for effect in join.effects:
            causes = [cause for cause in join.causes if cause.process != effect.process]
            for cause in causes if len(causes) < 2 else _nearest(run, causes):
                yield Edge(cause, effect)


def _nearest(run: Computation, causes: Sequence[EventPosition]) -> list[EventPosition]:
    """Without causes that are known through another."""
    return [cause for cause in causes if not any(run.happened_before(cause, other) for other in causes)]
