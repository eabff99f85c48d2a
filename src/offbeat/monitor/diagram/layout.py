"""From a space-time diagram to shapes: lanes from top to bottom, time from left to right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from offbeat.monitor.diagram.model import LOGICAL, Arrow, Band, CutLine, Diagram, Moment, Span
from offbeat.monitor.diagram.plot import PixelScale, Plot, ticks
from offbeat.monitor.diagram.shapes import KINDS, Drawing, Drawn, Point, Polyline, Rect, TextShape, dot, text_width

WIDTH: Final = 1200.0
_EDGE: Final = 18.0
_HEAD: Final = 76.0
_LEAST: Final = 0.4
"""Pixels that anything is wide at least: what has happened is seen."""


def drawn(lanes: Diagram, width: float = WIDTH) -> Drawing:
    """The picture of a diagram, as wide as asked for; its height follows from the number of lanes."""
    return _Sheet(lanes, width).drawing()


class _Sheet:
    """Where everything is."""

    def __init__(self, lanes: Diagram, width: float) -> None:
        self.lanes, self.width = lanes, width
        self.logical = lanes.axis == LOGICAL
        pitch = min(84.0, max(24.0, 560.0 / max(1, len(lanes.names))))
        self.bar = (0.16 if self.logical else 0.44) * pitch
        left = _EDGE + 10 + max((text_width(name, "name") for name in lanes.names), default=0.0)
        pad = 0.02 * (lanes.stop - lanes.start) if self.logical else 0.0
        time = PixelScale(lanes.start - pad, lanes.stop + pad, left, width - _EDGE)
        self.plot = Plot(time, _HEAD + 18.0 * len(lanes.cuts), pitch, max(1, len(lanes.names)))
        self.moments = ticks(lanes.start, lanes.stop, 10, whole=self.logical)
        """Where the axis has numbers."""

    def kept(self, time: float) -> float:
        """A little outside of the plot at most, since what is cut off need not be drawn."""
        return min(max(self.plot.x(time), self.plot.left - 20), self.plot.right + 20)

    def drawing(self) -> Drawing:
        """All of it."""
        frame, contents = _Frame(self), _Contents(self)
        height = self.plot.bottom + 42 + 16 * len(self.lanes.notes)
        inside, around = list(contents.shapes()), list(frame.shapes())
        return Drawing(self.width, height, self.lanes.title, self.plot.area, inside, around)


class _Frame:
    """What is around the lanes: heading, legend, names, moments, notes."""

    def __init__(self, sheet: _Sheet) -> None:
        self._sheet, self._lanes, self._plot = sheet, sheet.lanes, sheet.plot

    def shapes(self) -> Iterator[Drawn]:
        """All of it."""
        yield from self._heading()
        yield from self._plot.names(self._lanes.names)
        yield from self._ticks()
        room = int((self._plot.right - _EDGE) / text_width("x", "words"))
        for number, note in enumerate(self._lanes.notes):
            yield TextShape(_EDGE, self._plot.bottom + 40 + 16 * number, _cropped(note, room), "words")

    def _heading(self) -> Iterator[Drawn]:
        lanes = self._lanes
        yield TextShape(_EDGE, 26, lanes.title or "Space-time diagram", "title")
        seconds = f"{_seconds(lanes.start, lanes.stop)} since the first event"
        when = f"logical time {lanes.start:g} to {lanes.stop:g}" if self._sheet.logical else seconds
        who = "1 process" if len(lanes.names) == 1 else f"{len(lanes.names)} processes"
        yield TextShape(_EDGE, 44, f"{who}, {lanes.events:,} events, {when}", "words")
        x = _EDGE
        for sample, words in self._legend():
            yield sample.moved(x, 52)
            yield TextShape(x + 24, 62, words, "words")
            x += 24 + text_width(words, "words") + 18
        for number, cut in enumerate(lanes.cuts):
            yield from self._cut_words(cut, _HEAD + 18.0 * number)

    def _legend(self) -> Iterator[tuple[Polyline, str]]:
        lanes = self._lanes
        there = {kind for span in lanes.spans for kind in (span.mix or [span.kind])}
        for kind in KINDS:
            if kind in there:
                yield Polyline(Rect(0, 0, 18, 11, kind).points, kind), kind
        if lanes.bands:
            yield Polyline(((3, 0), (18, 0), (15, 11), (0, 11)), "band"), "collective"
        if lanes.arrows:
            yield Polyline(((0, 9), (18, 2)), "arrow", False, True), "message"
        for kind in dict.fromkeys(mark.kind for mark in lanes.marks if mark.count == 1 or mark.kind != "step"):
            if kind == "step":
                yield Polyline(((9, 0), (9, 11)), "step", False), kind
            elif not self._sheet.logical:
                yield _flag(kind, 9, 10), kind

    def _cut_words(self, cut: CutLine, y: float) -> Iterator[Drawn]:
        said = "consistent" if cut.consistent else f"not consistent: {cut.words}"
        look = "cut" if cut.consistent else "wrong cut"
        yield Polyline(((_EDGE, y + 1), (_EDGE + 18, y + 1)), look, False)
        room = int((self._plot.right - _EDGE - 24) / text_width("x", "cut words"))
        yield TextShape(_EDGE + 24, y + 5, _cropped(f"cut {cut.label}: {said}", room), f"{look} words")

    def _ticks(self) -> Iterator[Drawn]:
        small = not self._sheet.logical and self._lanes.stop - self._lanes.start < 0.5
        for time in self._sheet.moments:
            words = f"{time * 1000:.6g} ms" if small else f"{time:.6g}{'' if self._sheet.logical else ' s'}"
            late = self._plot.x(time) + text_width(words, "words") / 2 > self._plot.right
            yield TextShape(self._plot.x(time), self._plot.bottom + 18, words, "words", "end" if late else "middle")


class _Contents:
    """What is in the lanes and between them."""

    def __init__(self, sheet: _Sheet) -> None:
        self._sheet, self._lanes, self._plot = sheet, sheet.lanes, sheet.plot
        self._x, self._y, self._bar = self._plot.x, self._plot.y, sheet.bar

    def shapes(self) -> Iterator[Drawn]:
        """All of it, from the back to the front."""
        yield from self._plot.grid(self._sheet.moments)
        yield from self._rails()
        yield from self._bands()
        for span in self._lanes.spans:
            yield from self._span(span)
        for arrow in self._lanes.arrows:
            yield self._arrow(arrow)
        yield from self._marks()
        for cut in self._lanes.cuts:
            yield from self._cut(cut)

    def _rails(self) -> Iterator[Drawn]:
        for lane in range(len(self._lanes.names)):
            y = self._y(lane)
            if self._sheet.logical:
                yield Polyline(((self._plot.left, y), (self._plot.right, y)), "rail", False)
            else:
                yield self._plot.area._replace(y=y - self._bar / 2, height=self._bar, look="lane")

    def _bands(self) -> Iterator[Drawn]:
        for band in self._lanes.bands:
            if band.count > 1:
                yield self._merged(band)
                continue
            for one, other in pairwise(band.stays):
                upper, lower = self._y(one.lane) + self._bar / 2, self._y(other.lane) - self._bar / 2
                corners = ((one.start, upper), (one.stop, upper), (other.stop, lower), (other.start, lower))
                yield Polyline(tuple((self._sheet.kept(time), y) for time, y in corners), "band", title=band.label)
            yield from self._missing(band)

    def _merged(self, band: Band) -> Rect:
        """Several collectives as one, behind all their lanes."""
        first, last = band.stays[0], band.stays[-1]
        left, top = self._sheet.kept(first.start), self._y(first.lane)
        return Rect(left, top, self._sheet.kept(first.stop) - left, self._y(last.lane) - top, "bands", band.label)

    def _missing(self, band: Band) -> Iterator[Drawn]:
        """From the nearest who came to each who never did."""
        for lane in band.missing if band.stays else ():
            near = min(band.stays, key=lambda stay: abs(stay.lane - lane))
            x, side = self._x(near.start), math.copysign(self._bar / 2, lane - near.lane)
            title = f"{self._lanes.names[lane]} has never entered {band.label}"
            yield Polyline(((x, self._y(near.lane) + side), (x, self._y(lane) - side)), "missing", False, True, title)

    def _span(self, span: Span) -> Iterator[Drawn]:
        left, right = self._sheet.kept(span.start), self._sheet.kept(span.stop)
        top, width = self._y(span.lane) - self._bar / 2, max(right - left, _LEAST)
        title = _title(span) if span.label else ""
        for kind, share in (span.mix or {span.kind: 1.0}).items():
            height = share * self._bar / max(1.0, sum(span.mix.values()))
            yield Rect(left, top, width, height, kind, title)
            top, title = top + height, ""
        if span.open:
            yield Rect(right - 3, self._y(span.lane) - self._bar / 2, 3, self._bar, "open", "has never ended")
        yield from self._span_words(span, max(left, self._plot.left), min(right, self._plot.right))

    def _span_words(self, span: Span, left: float, right: float) -> Iterator[Drawn]:
        words = span.label.partition(" (")[0].partition(" of group")[0] if span.count == 1 else ""
        if words and self._bar >= 14 and text_width(words, "inside") + 8 < right - left:
            yield TextShape((left + right) / 2, self._y(span.lane) + 4, words, "inside", "middle")

    def _arrow(self, arrow: Arrow) -> Polyline:
        away = 4.0 if self._sheet.logical else self._bar / 2
        side = math.copysign(away, arrow.target - arrow.source)
        start: Point = (self._x(arrow.start), self._y(arrow.source) + side)
        stop: Point = (self._x(arrow.stop), self._y(arrow.target) - side)
        who = f"{self._lanes.names[arrow.source]} to {self._lanes.names[arrow.target]}"
        title = f"{who}: {arrow.label}" if arrow.label else who
        return Polyline((start, stop), "arrow", False, True, title)

    def _marks(self) -> Iterator[Drawn]:
        lanes = defaultdict[int, list[Moment]](list)
        for mark in self._lanes.marks:
            x, y = self._x(mark.time), self._y(mark.lane) - self._bar / 2
            if self._sheet.logical:
                lanes[mark.lane].append(mark)
                yield dot(x, self._y(mark.lane), 4.5, "event", mark.label)
            elif mark.kind == "step":
                if mark.count == 1:
                    yield Polyline(((x, y - 4), (x, y + 4)), "step", False)
            else:
                yield _flag(mark.kind, x, y, mark.label)
        for some in lanes.values():
            yield from self._mark_words(some)

    def _mark_words(self, marks: Sequence[Moment]) -> Iterator[Drawn]:
        """What the events of a log are, where there is room for it."""
        for mark, following in zip(marks, [*marks[1:], None], strict=True):
            x = self._x(mark.time)
            room = (self._plot.right if following is None else self._x(following.time)) - x
            letters = int((room - 10) / text_width("x", "inside"))
            if letters >= 5:
                yield TextShape(x + 3, self._y(mark.lane) - 9, _cropped(mark.label, letters), "inside")

    def _cut(self, cut: CutLine) -> Iterator[Drawn]:
        xs = [self._x(time) for time in cut.times]
        if not xs or max(xs) < self._plot.left or min(xs) > self._plot.right + 20:
            return
        xs = [min(max(x, self._plot.left + 1), self._plot.right - 1) for x in xs]
        middles = [(x, self._y(lane)) for lane, x in enumerate(xs)]
        points = [(xs[0], self._plot.top), *middles, (xs[-1], self._plot.bottom)]
        title = cut.words or f"cut {cut.label}"
        yield Polyline(tuple(points), "halo", False)
        look = "cut" if cut.consistent else "wrong cut"
        yield Polyline(tuple(points), look, False, title=title)
        late = xs[0] + text_width(cut.label, "cut words") > self._plot.right
        yield TextShape(
            xs[0] + (-5 if late else 5), self._plot.top + 11, cut.label, f"{look} words", "end" if late else "start"
        )


def _flag(kind: str, x: float, y: float, title: str = "") -> Polyline:
    """A triangle for what goes wrong, a square for an end, a diamond for what is kept or agreed."""
    if kind in ("end", "leave"):
        return Polyline(((x - 3, y - 3), (x + 3, y - 3), (x + 3, y - 9), (x - 3, y - 9)), "ending", title=title)
    if kind in ("checkpoint", "snapshot", "view"):
        return Polyline(((x, y), (x - 5, y - 5), (x, y - 10), (x + 5, y - 5)), "kept", title=title)
    return Polyline(((x, y), (x - 5, y - 9), (x + 5, y - 9)), "mark", title=title)


def _title(span: Span) -> str:
    return f"{_seconds(span.start, span.stop)}, {span.label if span.mix else f'{span.kind}: {span.label}'}"


def _seconds(start: float, stop: float) -> str:
    small = stop - start < 0.5
    return f"{start * 1000:.1f} to {stop * 1000:.1f} ms" if small else f"{start:.3g} to {stop:.3g} s"


def _cropped(words: str, letters: int) -> str:
    return words if len(words) <= letters else words[: max(1, letters - 1)] + "…"
