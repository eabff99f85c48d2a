"""From a space-time diagram to shapes: lanes from top to bottom, time from left to right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from offbeat.monitor.diagram.model import LOGICAL, Arrow, Band, Diagram, Line, Mark, Span
from offbeat.monitor.diagram.shapes import KINDS, Drawing, Drawn, Point, Rect, Shape, Text, dot, text_width

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
        self._lanes = lanes
        self._width = width
        self._count = max(1, len(lanes.names))
        self._pitch = min(84.0, max(24.0, 560.0 / self._count))
        self._bar = (0.16 if lanes.axis == LOGICAL else 0.44) * self._pitch
        self._left = _EDGE + 10 + max((text_width(name, "name") for name in lanes.names), default=0.0)
        self._right = width - _EDGE
        self._top = _HEAD + 18.0 * len(lanes.cuts)
        self._bottom = self._top + self._count * self._pitch
        span = lanes.stop - lanes.start
        pad = 0.02 * span if lanes.axis == LOGICAL and span else 0.0
        self._start = lanes.start - pad
        self._scale = (self._right - self._left) / (span + 2 * pad or 1.0)

    def drawing(self) -> Drawing:
        """All of it."""
        notes = list(self._notes())
        height = self._bottom + 42 + 16 * len(notes)
        plot = Rect(self._left, self._top, self._right - self._left, self._bottom - self._top, "paper")
        inside = [*self._grid(), *self._rails(), *self._bands(), *self._spans(), *self._arrows(), *self._marks()]
        for cut in self._lanes.cuts:
            inside += self._cut(cut)
        around = [*self._heading(), *self._names(), *self._ticks(), *notes]
        return Drawing(self._width, height, self._lanes.title, plot, inside, around)

    # -- places -------------------------------------------------------------------------------------------------------

    def _x(self, time: float) -> float:
        return self._left + (time - self._start) * self._scale

    def _y(self, lane: int) -> float:
        """The middle of a lane."""
        return self._top + (lane + 0.5) * self._pitch

    def _kept(self, x: float) -> float:
        """A little outside of the plot at most, since what is cut off need not be drawn."""
        return min(max(x, self._left - 20), self._right + 20)

    # -- around -------------------------------------------------------------------------------------------------------

    def _heading(self) -> Iterator[Drawn]:
        lanes = self._lanes
        yield Text(_EDGE, 26, lanes.title or "Space-time diagram", "title")
        seconds = f"{_seconds(lanes.start, lanes.stop)} since the first event"
        when = f"logical time {lanes.start:g} to {lanes.stop:g}" if lanes.axis == LOGICAL else seconds
        who = "1 process" if len(lanes.names) == 1 else f"{len(lanes.names)} processes"
        yield Text(_EDGE, 44, f"{who}, {lanes.events:,} events, {when}", "words")
        x = _EDGE
        for sample, words in self._legend():
            yield sample.moved(x, 52)
            yield Text(x + 24, 62, words, "words")
            x += 24 + text_width(words, "words") + 18
        for number, cut in enumerate(lanes.cuts):
            yield from self._cut_words(cut, _HEAD + 18.0 * number)

    def _legend(self) -> Iterator[tuple[Shape, str]]:
        lanes = self._lanes
        there = {kind for span in lanes.spans for kind in (span.mix or [span.kind])}
        for kind in KINDS:
            if kind in there:
                yield Shape(Rect(0, 0, 18, 11, kind).points, kind), kind
        if lanes.bands:
            yield Shape(((3, 0), (18, 0), (15, 11), (0, 11)), "band"), "collective"
        if lanes.arrows:
            yield Shape(((0, 9), (18, 2)), "arrow", False, True), "message"
        for kind in dict.fromkeys(mark.kind for mark in lanes.marks if mark.count == 1 or mark.kind != "step"):
            if kind == "step":
                yield Shape(((9, 0), (9, 11)), "step", False), kind
            elif lanes.axis != LOGICAL:
                yield _flag(kind, 9, 10), kind

    def _cut_words(self, cut: Line, y: float) -> Iterator[Drawn]:
        said = "consistent" if cut.consistent else f"not consistent: {cut.words}"
        look = "cut" if cut.consistent else "wrong cut"
        yield Shape(((_EDGE, y + 1), (_EDGE + 18, y + 1)), look, False)
        room = int((self._right - _EDGE - 24) / text_width("x", "cut words"))
        yield Text(_EDGE + 24, y + 5, _cropped(f"cut {cut.label}: {said}", room), f"{look} words")

    def _names(self) -> Iterator[Drawn]:
        for lane, name in enumerate(self._lanes.names):
            yield Text(self._left - 10, self._y(lane) + 4, name, "name", "end")

    def _steps(self) -> list[float]:
        """Where the axis has numbers: at round ones, about ten of them."""
        span = (self._lanes.stop - self._lanes.start) or 1.0
        rough = span / 10
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        step = max(1.0, step) if self._lanes.axis == LOGICAL else step
        first = math.ceil(self._lanes.start / step - 1e-9)
        last = math.floor(self._lanes.stop / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _ticks(self) -> Iterator[Drawn]:
        steps = self._steps()
        small = self._lanes.axis != LOGICAL and self._lanes.stop - self._lanes.start < 0.5
        for time in steps:
            words = f"{time * 1000:.6g} ms" if small else f"{time:.6g}{'' if self._lanes.axis == LOGICAL else ' s'}"
            late = self._x(time) + text_width(words, "words") / 2 > self._right
            yield Text(self._x(time), self._bottom + 18, words, "words", "end" if late else "middle")

    def _notes(self) -> Iterator[Drawn]:
        room = int((self._right - _EDGE) / text_width("x", "words"))
        for number, note in enumerate(self._lanes.notes):
            yield Text(_EDGE, self._bottom + 40 + 16 * number, _cropped(note, room), "words")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _grid(self) -> Iterator[Drawn]:
        for time in self._steps():
            yield Shape(((self._x(time), self._top), (self._x(time), self._bottom)), "grid", False)

    def _rails(self) -> Iterator[Drawn]:
        for lane in range(len(self._lanes.names)):
            y = self._y(lane)
            if self._lanes.axis == LOGICAL:
                yield Shape(((self._left, y), (self._right, y)), "rail", False)
            else:
                yield Rect(self._left, y - self._bar / 2, self._right - self._left, self._bar, "lane")

    def _bands(self) -> Iterator[Drawn]:
        for band in self._lanes.bands:
            if band.count > 1:
                yield self._merged(band)
                continue
            for one, other in pairwise(band.stays):
                upper, lower = self._y(one.lane) + self._bar / 2, self._y(other.lane) - self._bar / 2
                corners = ((one.start, upper), (one.stop, upper), (other.stop, lower), (other.start, lower))
                yield Shape(tuple((self._kept(self._x(time)), y) for time, y in corners), "band", title=band.label)
            yield from self._missing(band)

    def _merged(self, band: Band) -> Rect:
        """Several collectives as one, behind all their lanes."""
        first, last = band.stays[0], band.stays[-1]
        left, top = self._kept(self._x(first.start)), self._y(first.lane)
        return Rect(left, top, self._kept(self._x(first.stop)) - left, self._y(last.lane) - top, "bands", band.label)

    def _missing(self, band: Band) -> Iterator[Drawn]:
        """From the nearest who came to each who never did."""
        for lane in band.missing if band.stays else ():
            near = min(band.stays, key=lambda stay: abs(stay.lane - lane))
            x, side = self._x(near.start), math.copysign(self._bar / 2, lane - near.lane)
            title = f"{self._lanes.names[lane]} has never entered {band.label}"
            yield Shape(((x, self._y(near.lane) + side), (x, self._y(lane) - side)), "missing", False, True, title)

    def _spans(self) -> Iterator[Drawn]:
        for span in self._lanes.spans:
            left, right = self._kept(self._x(span.start)), self._kept(self._x(span.stop))
            top, width = self._y(span.lane) - self._bar / 2, max(right - left, _LEAST)
            title = _title(span) if span.label else ""
            for kind, share in (span.mix or {span.kind: 1.0}).items():
                height = share * self._bar / max(1.0, sum(span.mix.values()))
                yield Rect(left, top, width, height, kind, title)
                top, title = top + height, ""
            if span.open:
                yield Rect(right - 3, self._y(span.lane) - self._bar / 2, 3, self._bar, "open", "has never ended")
            yield from self._span_words(span, max(left, self._left), min(right, self._right))

    def _span_words(self, span: Span, left: float, right: float) -> Iterator[Drawn]:
        words = span.label.partition(" (")[0].partition(" of group")[0] if span.count == 1 else ""
        if words and self._bar >= 14 and text_width(words, "inside") + 8 < right - left:
            yield Text((left + right) / 2, self._y(span.lane) + 4, words, "inside", "middle")

    def _arrows(self) -> Iterator[Drawn]:
        for arrow in self._lanes.arrows:
            yield self._arrow(arrow)

    def _arrow(self, arrow: Arrow) -> Shape:
        away = 4.0 if self._lanes.axis == LOGICAL else self._bar / 2
        side = math.copysign(away, arrow.target - arrow.source)
        start: Point = (self._x(arrow.start), self._y(arrow.source) + side)
        stop: Point = (self._x(arrow.stop), self._y(arrow.target) - side)
        who = f"{self._lanes.names[arrow.source]} to {self._lanes.names[arrow.target]}"
        title = f"{who}: {arrow.label}" if arrow.label else who
        return Shape((start, stop), "arrow", False, True, title)

    def _marks(self) -> Iterator[Drawn]:
        lanes = defaultdict[int, list[Mark]](list)
        for mark in self._lanes.marks:
            x, y = self._x(mark.time), self._y(mark.lane) - self._bar / 2
            if self._lanes.axis == LOGICAL:
                lanes[mark.lane].append(mark)
                yield dot(x, self._y(mark.lane), 4.5, "event", mark.label)
            elif mark.kind == "step":
                if mark.count == 1:
                    yield Shape(((x, y - 4), (x, y + 4)), "step", False)
            else:
                yield _flag(mark.kind, x, y, mark.label)
        for some in lanes.values():
            yield from self._mark_words(some)

    def _mark_words(self, marks: Sequence[Mark]) -> Iterator[Drawn]:
        """What the events of a log are, where there is room for it."""
        for mark, following in zip(marks, [*marks[1:], None], strict=True):
            x = self._x(mark.time)
            room = (self._right if following is None else self._x(following.time)) - x
            letters = int((room - 10) / text_width("x", "inside"))
            if letters >= 5:
                yield Text(x + 3, self._y(mark.lane) - 9, _cropped(mark.label, letters), "inside")

    def _cut(self, cut: Line) -> Iterator[Drawn]:
        xs = [self._x(time) for time in cut.times]
        if not xs or max(xs) < self._left or min(xs) > self._right + 20:
            return
        xs = [min(max(x, self._left + 1), self._right - 1) for x in xs]
        points = [(xs[0], self._top), *((x, self._y(lane)) for lane, x in enumerate(xs)), (xs[-1], self._bottom)]
        title = cut.words or f"cut {cut.label}"
        yield Shape(tuple(points), "halo", False)
        look = "cut" if cut.consistent else "wrong cut"
        yield Shape(tuple(points), look, False, title=title)
        late = xs[0] + text_width(cut.label, "cut words") > self._right
        yield Text(xs[0] + (-5 if late else 5), self._top + 11, cut.label, f"{look} words", "end" if late else "start")


def _flag(kind: str, x: float, y: float, title: str = "") -> Shape:
    """A triangle for what goes wrong, a square for an end, a diamond for what is kept or agreed."""
    if kind in ("end", "leave"):
        return Shape(((x - 3, y - 3), (x + 3, y - 3), (x + 3, y - 9), (x - 3, y - 9)), "ending", title=title)
    if kind in ("checkpoint", "snapshot", "view"):
        return Shape(((x, y), (x - 5, y - 5), (x, y - 10), (x + 5, y - 5)), "kept", title=title)
    return Shape(((x, y), (x - 5, y - 9), (x + 5, y - 9)), "mark", title=title)


def _title(span: Span) -> str:
    return f"{_seconds(span.start, span.stop)}, {span.label if span.mix else f'{span.kind}: {span.label}'}"


def _seconds(start: float, stop: float) -> str:
    small = stop - start < 0.5
    return f"{start * 1000:.1f} to {stop * 1000:.1f} ms" if small else f"{start:.3g} to {stop:.3g} s"


def _cropped(words: str, letters: int) -> str:
    return words if len(words) <= letters else words[: max(1, letters - 1)] + "…"
