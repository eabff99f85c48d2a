"""Lays out a space-time diagram as shapes: lanes from top to bottom, time from left to right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from offbeat.monitor.diagram.model import LOGICAL, Arrow, Band, CutLine, Diagram, Moment, Span
from offbeat.monitor.diagram.shapes import (
    KINDS,
    Drawing,
    Drawn,
    PixelScale,
    Plot,
    Polyline,
    Rect,
    TextShape,
    dot,
    text_width,
    ticks,
)
from offbeat.monitor.diagram.waits import WORKS

WIDTH: Final = 1200.0
_EDGE: Final = 18.0
_HEAD: Final = 76.0
_LEAST: Final = 0.4  # Minimum width of a shape in pixels, so that nothing disappears.


def lay_out(diagram: Diagram, width: float = WIDTH) -> Drawing:
    """The picture of a diagram at this width; its height follows from the number of lanes."""
    layout = _Layout(diagram, width)
    height = layout.plot.bottom + 42 + 16 * len(diagram.notes)
    return Drawing(width, height, diagram.title, layout.plot.area, list(layout.inside()), list(layout.around()))


class _Layout:
    def __init__(self, diagram: Diagram, width: float) -> None:
        self._diagram = diagram
        self._logical = diagram.axis == LOGICAL
        pitch = min(84.0, max(24.0, 560.0 / max(1, len(diagram.names))))
        self._bar = (0.16 if self._logical else 0.44) * pitch
        words = [text_width(name, "name") for name in diagram.names]
        words += [text_width(machine, "words") for machine in diagram.machines]
        left = _EDGE + 10 + max(words, default=0.0)
        pad = 0.02 * (diagram.stop - diagram.start) if self._logical else 0.0
        time = PixelScale(diagram.start - pad, diagram.stop + pad, left, width - _EDGE)
        self.plot = Plot(time, _HEAD + 18.0 * len(diagram.cuts), pitch, max(1, len(diagram.names)))
        self._x, self._y = self.plot.x, self.plot.y
        self._ticks = ticks(diagram.start, diagram.stop, 10, whole=self._logical)

    def _clipped(self, time: float) -> float:
        """The pixel of a time, at most a little outside of the plot."""
        return min(max(self._x(time), self.plot.left - 20), self.plot.right + 20)

    # -- around the lanes: heading, legend, names, axis, notes ---------------------------------------------------------

    def around(self) -> Iterator[Drawn]:
        """Everything that is not clipped to the plot."""
        yield from self._heading()
        yield from self.plot.names(self._diagram.names)
        yield from self._machines()
        small = not self._logical and self._diagram.stop - self._diagram.start < 0.5
        for time in self._ticks:
            words = f"{time * 1000:.6g} ms" if small else f"{time:.6g}{'' if self._logical else ' s'}"
            late = self._x(time) + text_width(words, "words") / 2 > self.plot.right
            yield TextShape(self._x(time), self.plot.bottom + 18, words, "words", "end" if late else "middle")
        room = int((self.plot.right - _EDGE) / text_width("x", "words"))
        for number, note in enumerate(self._diagram.notes):
            yield TextShape(_EDGE, self.plot.bottom + 40 + 16 * number, _cropped(note, room), "words")

    def _machines(self) -> Iterator[Drawn]:
        """The machine of each lane under its name, and a line where another one begins."""
        for lane, machine in enumerate(self._diagram.machines):
            yield TextShape(self.plot.left - 10, self._y(lane) + 17, machine, "words", "end")
            if lane and machine != self._diagram.machines[lane - 1]:
                y = (self._y(lane - 1) + self._y(lane)) / 2
                yield Polyline(((_EDGE, y), (self.plot.right, y)), "rail", False)

    def _heading(self) -> Iterator[Drawn]:
        diagram = self._diagram
        yield TextShape(_EDGE, 26, diagram.title or "Space-time diagram", "title")
        seconds = f"{_seconds(diagram.start, diagram.stop)} since the first event"
        when = f"logical time {diagram.start:g} to {diagram.stop:g}" if self._logical else seconds
        count = "1 process" if len(diagram.names) == 1 else f"{len(diagram.names)} processes"
        yield TextShape(_EDGE, 44, f"{count}, {diagram.events:,} events, {when}", "words")
        x = _EDGE
        for sample, words in self._legend():
            yield sample.moved(x, 52)
            yield TextShape(x + 24, 62, words, "words")
            x += 24 + text_width(words, "words") + 18
        room = int((self.plot.right - _EDGE - 24) / text_width("x", "cut words"))
        for number, cut in enumerate(diagram.cuts):
            y, look = _HEAD + 18.0 * number, _cut_look(cut)
            verdict = "consistent" if cut.consistent else f"not consistent: {cut.words}"
            yield Polyline(((_EDGE, y + 1), (_EDGE + 18, y + 1)), look, False)
            yield TextShape(_EDGE + 24, y + 5, _cropped(f"cut {cut.label}: {verdict}", room), f"{look} words")

    def _legend(self) -> Iterator[tuple[Polyline, str]]:
        diagram = self._diagram
        present = {kind for span in diagram.spans for kind in (span.mix or [span.kind])}
        for kind in (kind for kind in KINDS if kind in present):
            yield Polyline(Rect(0, 0, 18, 11, kind).points, kind), kind
        if diagram.bands:
            yield Polyline(((3, 0), (18, 0), (15, 11), (0, 11)), "band"), "collective"
        if diagram.arrows:
            yield Polyline(((0, 9), (18, 2)), "arrow", False, True), "message"
        for kind in dict.fromkeys(mark.kind for mark in diagram.marks if mark.count == 1 or mark.kind != "step"):
            if kind == "step":
                yield Polyline(((9, 0), (9, 11)), "step", False), kind
            elif not self._logical:
                yield _flag(kind, 9, 10), kind

    # -- in and between the lanes --------------------------------------------------------------------------------------

    def inside(self) -> Iterator[Drawn]:
        """Everything that is clipped to the plot, from back to front."""
        yield from self.plot.grid(self._ticks)
        for lane in range(len(self._diagram.names)):
            y = self._y(lane)
            if self._logical:
                yield Polyline(((self.plot.left, y), (self.plot.right, y)), "rail", False)
            else:
                yield self.plot.area._replace(y=y - self._bar / 2, height=self._bar, look="lane")
        for band in self._diagram.bands:
            yield from self._merged(band) if band.count > 1 else self._band(band)
        for span in self._diagram.spans:
            yield from self._span(span)
        for arrow in self._diagram.arrows:
            yield self._arrow(arrow)
        yield from self._marks()
        for cut in self._diagram.cuts:
            yield from self._cut(cut)

    def _merged(self, band: Band) -> Iterator[Drawn]:
        first, last = band.stays[0], band.stays[-1]
        left, top = self._clipped(first.start), self._y(first.lane)
        yield Rect(left, top, self._clipped(first.stop) - left, self._y(last.lane) - top, "bands", band.label)

    def _band(self, band: Band) -> Iterator[Drawn]:
        for one, other in pairwise(band.stays):
            upper, lower = self._y(one.lane) + self._bar / 2, self._y(other.lane) - self._bar / 2
            corners = ((one.start, upper), (one.stop, upper), (other.stop, lower), (other.start, lower))
            yield Polyline(tuple((self._clipped(time), y) for time, y in corners), "band", title=band.label)
        for lane in band.missing if band.stays else ():
            near = min(band.stays, key=lambda stay: abs(stay.lane - lane))
            x, side = self._x(near.start), math.copysign(self._bar / 2, lane - near.lane)
            title = f"{self._diagram.names[lane]} has never entered {band.label}"
            yield Polyline(((x, self._y(near.lane) + side), (x, self._y(lane) - side)), "missing", False, True, title)

    def _span(self, span: Span) -> Iterator[Drawn]:
        left, right = self._clipped(span.start), self._clipped(span.stop)
        top, width = self._y(span.lane) - self._bar / 2, max(right - left, _LEAST)
        label = span.label if span.mix else f"{span.kind}: {span.label}"
        title = f"{_seconds(span.start, span.stop)}, {label}" if span.label else ""
        for kind, share in (span.mix or {span.kind: 1.0}).items():
            height = share * self._bar / max(1.0, sum(span.mix.values()))
            yield Rect(left, top, width, height, kind, title)
            top, title = top + height, ""
        if span.open:
            yield Rect(right - 3, self._y(span.lane) - self._bar / 2, 3, self._bar, "open", "has never ended")
        left, right = max(left, self.plot.left), min(right, self.plot.right)
        words = _inside(span)
        if words and self._bar >= 14 and text_width(words, "inside") + 8 < right - left:
            yield TextShape((left + right) / 2, self._y(span.lane) + 4, words, "inside", "middle")

    def _arrow(self, arrow: Arrow) -> Polyline:
        side = math.copysign(4.0 if self._logical else self._bar / 2, arrow.target - arrow.source)
        start = (self._x(arrow.start), self._y(arrow.source) + side)
        stop = (self._x(arrow.stop), self._y(arrow.target) - side)
        ends = f"{self._diagram.names[arrow.source]} to {self._diagram.names[arrow.target]}"
        return Polyline((start, stop), "arrow", False, True, f"{ends}: {arrow.label}" if arrow.label else ends)

    def _marks(self) -> Iterator[Drawn]:
        lanes = defaultdict[int, list[Moment]](list)
        for mark in self._diagram.marks:
            x, y = self._x(mark.time), self._y(mark.lane) - self._bar / 2
            if self._logical:
                lanes[mark.lane].append(mark)
                yield dot(x, self._y(mark.lane), 4.5, "event", mark.label)
            elif mark.kind != "step":
                yield _flag(mark.kind, x, y, mark.label)
            elif mark.count == 1:
                yield Polyline(((x, y - 4), (x, y + 4)), "step", False)
        for marks in lanes.values():  # Labels of a log's events, where there is room.
            for mark, following in zip(marks, [*marks[1:], None], strict=True):
                x, end = self._x(mark.time), self.plot.right if following is None else self._x(following.time)
                characters = int((end - x - 10) / text_width("x", "inside"))
                if characters >= 5:
                    yield TextShape(x + 3, self._y(mark.lane) - 9, _cropped(mark.label, characters), "inside")

    def _cut(self, cut: CutLine) -> Iterator[Drawn]:
        xs = [self._x(time) for time in cut.times]
        if not xs or max(xs) < self.plot.left or min(xs) > self.plot.right + 20:
            return
        xs = [min(max(x, self.plot.left + 1), self.plot.right - 1) for x in xs]
        middles = [(x, self._y(lane)) for lane, x in enumerate(xs)]
        points = ((xs[0], self.plot.top), *middles, (xs[-1], self.plot.bottom))
        yield Polyline(points, "halo", False)
        yield Polyline(points, _cut_look(cut), False, title=cut.words or f"cut {cut.label}")
        late = xs[0] + text_width(cut.label, "cut words") > self.plot.right
        x, anchor = (xs[0] - 5, "end") if late else (xs[0] + 5, "start")
        yield TextShape(x, self.plot.top + 11, cut.label, f"{_cut_look(cut)} words", anchor)


def _inside(span: Span) -> str:
    """What is written into a span: the name of its call; of what a stage computed, the microbatch."""
    if span.count > 1:
        return ""
    if span.kind in WORKS:
        return span.label.partition("#")[2].partition(" ")[0]
    return span.label.partition(" (")[0].partition(" of group")[0]


def _cut_look(cut: CutLine) -> str:
    return "cut" if cut.consistent else "wrong cut"


def _flag(kind: str, x: float, y: float, title: str = "") -> Polyline:
    """A square for an end, a diamond for a checkpoint or an agreement, a triangle for a fault."""
    if kind in ("end", "leave"):
        return Polyline(((x - 3, y - 3), (x + 3, y - 3), (x + 3, y - 9), (x - 3, y - 9)), "ending", title=title)
    if kind in ("checkpoint", "snapshot", "view"):
        return Polyline(((x, y), (x - 5, y - 5), (x, y - 10), (x + 5, y - 5)), "kept", title=title)
    return Polyline(((x, y), (x - 5, y - 9), (x + 5, y - 9)), "mark", title=title)


def _seconds(start: float, stop: float) -> str:
    small = stop - start < 0.5
    return f"{start * 1000:.1f} to {stop * 1000:.1f} ms" if small else f"{start:.3g} to {stop:.3g} s"


def _cropped(words: str, characters: int) -> str:
    return words if len(words) <= characters else words[: max(1, characters - 1)] + "…"
