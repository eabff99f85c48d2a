"""From the events of a run to its space-time diagram: everything is looked up once, then any window is cut out of it.

Events too many to be told apart are merged, and the diagram says so. Numbers are kept as columns, so that a window of a
hundred thousand events is answered while somebody zooms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from offbeat.errors import UsageError
from offbeat.monitor.cutting import crossed
from offbeat.monitor.history import history_of
from offbeat.monitor.lanes import LOGICAL, MANY, SECONDS, Arrow, Band, Lanes, Mark, Span, Stay
from offbeat.monitor.scenery import (
    Piece,
    arrows,
    failures,
    first_time,
    logical,
    marks,
    numbered,
    pieces,
    seconds,
    split,
)
from offbeat.monitor.stays import Meeting, Stretch, held, held_in, meetings
from offbeat.protocols.causality.cuts import Cut
from offbeat.protocols.causality.histories import Computation
from offbeat.runtime.stamps import Stamp

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHAPES: Final = 2000
"""About how many shapes of each sort a diagram has before they are merged."""
_COARSE: Final = 100
"""A lane is divided into at least so many columns."""


class Scene:
    """A run, to be looked at in windows."""

    def __init__(
        self,
        run: Computation,
        title: str = "",
        *,
        stretches: Sequence[Sequence[Stretch] | None] | None = None,
        more_marks: Iterable[Mark] = (),
        notes: Iterable[str] = (),
    ) -> None:
        """Look everything up; `stretches` say when each process was held up, if that is known better than by `run`."""
        self.run = run
        self.title = title
        self.notes = tuple(notes)
        self.axis = SECONDS if any(event.time for history in run.histories for event in history) else LOGICAL
        self.origin = first_time(run) if self.axis == SECONDS else 0.0
        self.times = seconds(run, self.origin) if self.axis == SECONDS else logical(run)
        self.start = 0.0 if self.axis == SECONDS else 1.0
        extra = list(more_marks)
        ends = [float(times[-1]) for times in self.times if times.size] + [mark.time for mark in extra]
        self.stop = max(ends, default=self.start)
        met = meetings(run, self.times)
        waits = held(run, self.times, met) if stretches is None else stretches
        self._lanes = [_Lane(self._pieces(process, waits[process])) for process in range(run.size)]
        self._bands = _Bands(list(met.values()), run.processes, self.stop)
        self._arrows = _Arrows(list(arrows(run, self.times)))
        self._marks = _Marks([*marks(run, self.times, self.axis), *extra])

    @classmethod
    def of(
        cls,
        stamps: Mapping[int, Sequence[Stamp]],
        title: str = "",
        dropped: int = 0,
        servers: Mapping[str, Sequence[Stamp]] | None = None,
    ) -> Scene:
        """What the workers of a run have written down, and its servers."""
        run = history_of(stamps, servers)
        origin = first_time(run)
        waits = held_in(stamps, run, origin, meetings(run, seconds(run, origin)))
        notes = [f"{dropped:,} older events were written over."] if dropped else []
        return cls(run, title, stretches=waits, more_marks=failures(stamps, run, origin), notes=notes)

    def lanes(
        self, window: tuple[float, float] | None = None, cuts: Mapping[str, Cut] | None = None, shapes: int = SHAPES
    ) -> Lanes:
        """What lies in a window, with about so many shapes of each sort at most; `cuts` are drawn by their names."""
        start, stop = window or (self.start, self.stop)
        if start > stop:
            raise UsageError(f"a window from {start:g} to {stop:g} ends before it begins: give the earlier time first.")
        view = _View(start, stop, max(_COARSE, shapes // max(1, self.run.size)), shapes)
        return Lanes(
            self.title,
            self.axis,
            start,
            stop,
            self.run.processes,
            tuple(self._spans(view)),
            tuple(self._arrows.within(view)),
            tuple(self._bands.within(view)),
            tuple(self._marks.within(view)),
            tuple(crossed(self.run, self.times, name, cut) for name, cut in (cuts or {}).items()),
            sum(int(((times >= start) & (times <= stop)).sum()) for times in self.times),
            self.origin,
            (*self.notes, *view.notes()),
        )

    def _pieces(self, process: int, waits: Sequence[Stretch] | None) -> list[Piece]:
        if self.axis == LOGICAL:
            return list(split(waits or (), self.stop))
        return pieces(self.run.histories[process], self.times[process].tolist(), waits, self.stop)

    def _spans(self, view: _View) -> Iterator[Span]:
        ranges = [view.range(lane.starts, lane.stops) for lane in self._lanes]
        many = sum(stop - start for start, stop in ranges) > view.shapes
        for number, (lane, (start, stop)) in enumerate(zip(self._lanes, ranges, strict=True)):
            for first, last in lane.grouped(start, stop, view) if many else ((i, i + 1) for i in range(start, stop)):
                if last - first > 1:
                    view.merged["spans"] += last - first
                yield lane.span(number, first, last)


class _View:
    """A window, how finely it is drawn, and what had to be merged for that."""

    def __init__(self, start: float, stop: float, columns: int, shapes: int) -> None:
        self.start = start
        self.stop = stop
        self.shapes = shapes
        self.width = (stop - start) / columns or 1.0
        """What is shorter cannot be told apart from its neighbour."""
        self.merged = {"spans": 0, "collectives": 0, "messages": 0, "marks": 0}

    def range(self, starts: Floats, stops: Floats) -> tuple[int, int]:
        """The first of some spans in order that is in the window, and the first behind it."""
        return int(np.searchsorted(stops, self.start, "right")), int(np.searchsorted(starts, self.stop, "left"))

    def column(self, times: Floats) -> Ints:
        """Which column of the drawing each time falls into."""
        return np.floor((times - self.start) / self.width).astype(np.int64)

    def thinned(self, name: str, found: Ints, keys: Sequence[Ints], each: int = 1) -> list[list[int]]:
        """What is drawn together: each by itself, or, if that were too many shapes, all that have the same keys."""
        if len(found) * each <= self.shapes:
            return [[index] for index in found.tolist()]
        order = found[np.lexsort([key[found] for key in keys])]
        same = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
        groups = [group.tolist() for group in np.split(order, np.flatnonzero(~same) + 1)]
        self.merged[name] += sum(len(group) for group in groups if len(group) > 1)
        return groups

    def notes(self) -> Iterator[str]:
        """What was merged, in words."""
        told = [f"{count:,} {name}" for name, count in self.merged.items() if count]
        if told:
            yield f"Too many for this window, and drawn together: {', '.join(told)}. A smaller window shows them."


class _Lane:
    """The spans of a lane."""

    def __init__(self, found: Sequence[Piece]) -> None:
        self._pieces = found
        self.starts = np.array([piece.start for piece in found])
        self.stops = np.array([piece.stop for piece in found])
        self._spent = {kind: self._sums(kind) for kind in sorted({piece.kind for piece in found})}

    def _sums(self, kind: str) -> Floats:
        """How much time of a kind there was before each span."""
        own = np.array([piece.kind == kind for piece in self._pieces])
        return np.concatenate([[0.0], np.cumsum((self.stops - self.starts) * own)])

    def grouped(self, start: int, stop: int, view: _View) -> list[tuple[int, int]]:
        """Spans from one to another, those in each other's neighbourhood that are too short put together."""
        if start >= stop:
            return []
        starts, stops = self.starts[start:stop], self.stops[start:stop]
        short = stops - starts < view.width
        column = view.column(starts)
        apart = ~(short[1:] & short[:-1] & (column[1:] == column[:-1]))
        edges = [start, *(np.flatnonzero(apart) + start + 1).tolist(), stop]
        return list(pairwise(edges))

    def span(self, lane: int, first: int, last: int) -> Span:
        """One span, or some as one."""
        one, end = self._pieces[first], self._pieces[last - 1]
        if last - first == 1:
            return Span(lane, one.kind, one.start, one.stop, str(one.what), open=one.open)
        lengths = {kind: float(sums[last] - sums[first]) for kind, sums in self._spent.items()}
        total = sum(lengths.values()) or 1.0
        mix = {kind: length / total for kind, length in lengths.items() if length > 0}
        told = ", ".join(f"{kind} {share:.0%}" for kind, share in mix.items())
        kind = MANY if len(mix) > 1 else one.kind
        return Span(lane, kind, one.start, end.stop, f"{last - first:,} spans: {told}", last - first, mix, end.open)


class _Bands:
    """The collectives of a run, by their beginning."""

    def __init__(self, met: Sequence[Meeting], names: Sequence[str], end: float) -> None:
        self._met = sorted((one for one in met if one.entries), key=lambda one: min(one.entries.values()))
        self._index = {name: number for number, name in enumerate(names)}
        self._end = end
        self._starts = np.array([min(one.entries.values()) for one in self._met])
        self._stops = np.array([self._over(one) for one in self._met])
        self._members = np.array(numbered([",".join(one.call.members) for one in self._met]), np.int64)

    def within(self, view: _View) -> Iterator[Band]:
        """The collectives in a window."""
        found = np.flatnonzero((self._stops >= view.start) & (self._starts <= view.stop))
        long = self._stops - self._starts >= view.width
        # A long one is never merged: its own number is its column.
        column = np.where(long, -1 - np.arange(len(long)), view.column(self._starts))
        for group in view.thinned("collectives", found, (self._members, column), max(1, len(self._index) - 1)):
            yield self._band(group[0]) if len(group) == 1 else self._merged(group)

    def _over(self, one: Meeting) -> float:
        return self._end if one.entries.keys() - one.exits.keys() else max(one.exits.values())

    def _band(self, index: int) -> Band:
        one = self._met[index]
        stays = [
            Stay(lane, start, one.exits.get(lane, self._end), lane not in one.exits)
            for lane, start in sorted(one.entries.items())
        ]
        members = [self._index[name] for name in one.call.members if name in self._index]
        missing = tuple(lane for lane in members if lane not in one.entries and lane not in one.lost)
        last = None if missing or one.lost or len(stays) < 2 else max(one.entries, key=one.entries.__getitem__)
        return Band(str(one.call), tuple(stays), last, missing)

    def _merged(self, group: list[int]) -> Band:
        start, stop = float(self._starts[group].min()), float(self._stops[group].max())
        lanes = sorted({lane for index in group for lane in self._met[index].entries})
        stays = tuple(Stay(lane, start, stop) for lane in lanes)
        return Band(f"{len(group):,} collectives", stays, count=len(group))


class _Arrows:
    """The messages of a run."""

    def __init__(self, rows: Sequence[Arrow]) -> None:
        self._rows = rows
        self._starts = np.array([row.start for row in rows])
        self._stops = np.array([row.stop for row in rows])
        self._ways = np.array(numbered([f"{row.source} {row.target}" for row in rows]), np.int64)

    def within(self, view: _View) -> Iterator[Arrow]:
        """The messages in a window; of those too many between the same two, one stands for the others."""
        found = np.flatnonzero((self._stops >= view.start) & (self._starts <= view.stop))
        for group in view.thinned("messages", found, (self._ways, view.column(self._starts))):
            one, count = self._rows[group[0]], len(group)
            yield one if count == 1 else structs.replace(one, label=f"{count:,} messages", count=count)


class _Marks:
    """The marks of a run."""

    def __init__(self, rows: Sequence[Mark]) -> None:
        self._rows = rows
        self._times = np.array([row.time for row in rows])
        self._kinds = np.array(numbered([f"{row.lane} {row.kind}" for row in rows]), np.int64)

    def within(self, view: _View) -> Iterator[Mark]:
        """The marks in a window; of those too many of a kind, one stands for the others."""
        found = np.flatnonzero((self._times >= view.start) & (self._times <= view.stop))
        for group in view.thinned("marks", found, (self._kinds, view.column(self._times))):
            one, count = self._rows[group[0]], len(group)
            yield one if count == 1 else structs.replace(one, label=f"{count:,} times {one.kind}", count=count)
