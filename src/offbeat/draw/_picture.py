"""A timeline as shapes: a lane for each participant over virtual time, ports as bars, messages as arrows.

Each lane has three strips: the outgoing port, what the participant does, and the incoming port.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Final

from offbeat.errors import UsageError
from offbeat.monitor.diagram.shapes import (
    Drawing,
    Drawn,
    PixelScale,
    Plot,
    Polyline,
    Rect,
    TextShape,
    text_width,
    ticks,
)
from offbeat.simulate.timeline import Activity, Message, Timeline
from offbeat.simulate.units import seconds_in_words, size_in_words

MOST_LANES: Final = 33
"""32 ranks, or 32 workers and their servers: more lanes cannot be told apart."""
MOST_MESSAGES: Final = 20_000
"""Most arrows of one picture; browsers cannot open a file with more."""
CROWDED: Final = 250
"""Beyond this many, arrows are drawn thin, so that bars stay visible."""
WIDTH: Final = 1280.0
TOP, BOTTOM, RIGHT = 78.0, 44.0, 18.0
LEGEND: Final = (
    ("compute", "computes"),
    ("wait", "waits"),
    ("reduce", "adds up or copies"),
    ("out", "port out: sends"),
    ("in", "port in: receives"),
)
STAGES: Final = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("weights", "gradients of weights"),
    ("idle", "idles"),
    ("out", "port out: sends"),
    ("in", "port in: receives"),
)
"""The legend of a pipeline, in whose bars are the numbers of microbatches."""


def picture(timeline: Timeline, subtitle: str) -> Drawing:
    """The whole picture; refused if it would be unreadable."""
    if len(timeline.lanes) > MOST_LANES:
        raise UsageError(
            f"a picture of {len(timeline.lanes)} lanes cannot be read: draw {MOST_LANES - 1} workers or fewer, or omit "
            f"the picture; the table takes more."
        )
    if len(timeline.messages) > MOST_MESSAGES:
        raise UsageError(
            f"{len(timeline.messages):,} messages are more than {MOST_MESSAGES:,}, the most that one picture can show: "
            f"draw fewer steps or workers, or omit the picture."
        )
    return _Painter(timeline).drawing(subtitle)


class _Painter:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        count = len(timeline.lanes)
        self._lane = 58.0 if count <= 9 else 40.0 if count <= 17 else 27.0
        left = 34.0 + max(text_width(name, "name") for name in timeline.lanes)
        seconds = (timeline.end or 1.0) * 1.01
        self._plot = Plot(PixelScale(0.0, seconds, left, WIDTH - RIGHT), TOP, self._lane, count)
        self._pipeline = any(each.activity is Activity.FORWARD for each in timeline.intervals)
        self._x, self._moments = self._plot.x, ticks(0.0, seconds, 8)

    def drawing(self, subtitle: str) -> Drawing:
        """The whole picture."""
        grid, names = self._plot.grid(self._moments), self._plot.names(self._timeline.lanes)
        inside = [*self._lanes(), *grid, *self._intervals(), *self._ports(), *self._arrows()]
        around = [*names, *self._hosts(), *self._axis(), *self._heading(subtitle)]
        height = self._plot.bottom + BOTTOM
        return Drawing(WIDTH, height, self._timeline.title, self._plot.area, inside, around)

    def _strip(self, lane: int, strip: int) -> tuple[float, float]:
        """Top and height of a strip of a lane: 0 the outgoing port, 1 activity, 2 the incoming port."""
        starts, heights = (0.09, 0.36, 0.67), (0.24, 0.28, 0.24)
        return self._plot.top + self._lane * (lane + starts[strip]), self._lane * heights[strip]

    def _bar(self, lane: int, strip: int, begin: float, end: float, look: str, title: str) -> Rect:
        top, height = self._strip(lane, strip)
        x = self._x(begin)
        wide = self._x(end) - x
        return Rect(x, top, wide - 0.8 if wide > 2.5 else max(wide, 0.6), height, look, title)

    def _lanes(self) -> Iterator[Drawn]:
        for lane in range(len(self._timeline.lanes)):
            top = self._plot.top + self._lane * lane
            yield self._plot.area._replace(y=top + 1, height=self._lane - 2, look="lane")

    def _intervals(self) -> Iterator[Drawn]:
        for each in sorted(self._timeline.intervals, key=lambda each: each.activity is not Activity.WAIT):
            title = f"{self._timeline.lanes[each.lane]}, {each.label}: {seconds_in_words(each.end - each.begin)}"
            look = f"later {each.activity.value}" if each.later else each.activity.value
            if self._pipeline and each.activity is Activity.WAIT:
                look = "idle"
            bar = self._bar(each.lane, 1, each.begin, each.end, look, title)
            yield bar
            if each.activity.computes:
                yield from self._label(bar, each.mark or each.label, margin=-1 if each.mark else 4)

    def _ports(self) -> Iterator[Drawn]:
        for each in self._timeline.messages:
            title = self._caption(each)
            if each.left > each.leaves:
                bar = self._bar(each.source, 0, each.leaves, each.left, "out", title)
                yield bar
                yield from self._label(bar, size_in_words(each.nbytes))
            if each.came > each.comes:
                yield self._bar(each.target, 2, each.comes, each.came, "in", title)

    def _caption(self, each: Message) -> str:
        lanes = self._timeline.lanes
        arrival = "is lost" if math.isnan(each.arrives) else f"arrives at {seconds_in_words(each.arrives)}"
        size = f", {size_in_words(each.nbytes)}" if each.nbytes else ""
        times = f"leaves at {seconds_in_words(each.leaves)}, {arrival}"
        return f"{lanes[each.source]} to {lanes[each.target]}: {each.label}{size}; {times}"

    def _label(self, bar: Rect, words: str, margin: float = 4) -> Iterator[Drawn]:
        if self._lane > 35 and text_width(words, "inside") < bar.width - margin and bar.x > self._plot.left - 1:
            yield TextShape(bar.x + bar.width / 2, bar.y + bar.height / 2 + 3.5, words, "inside", "middle")

    def _arrows(self) -> Iterator[Drawn]:
        crowded = len(self._timeline.messages) > CROWDED or self._lane < 35 or self._pipeline
        look = "thin arrow" if crowded else "arrow"
        for each in self._timeline.messages:
            (top, high), (low, deep) = self._strip(each.source, 0), self._strip(each.target, 2)
            begin = self._x(each.leaves), top + high / 2
            if math.isnan(each.arrives):
                yield from self._lost(begin, each)
            else:
                end = self._x(each.arrives), low + deep / 2
                yield Polyline((begin, end), look, closed=False, head=True, title=self._caption(each))

    def _lost(self, begin: tuple[float, float], each: Message) -> Iterator[Drawn]:
        x, y = begin
        down = 1 if each.target > each.source else -1
        end = x + 12, y + down * self._lane * 0.4
        yield Polyline((begin, end), "missing", closed=False, title=self._caption(each))
        yield TextShape(end[0], end[1] + 4, "x", "wrong cut words", "middle")

    def _hosts(self) -> Iterator[Drawn]:
        """A bracket around the lanes of each host, where some share each."""
        if len(set(self._timeline.hosts)) == len(self._timeline.hosts):
            return
        lanes = range(len(self._timeline.lanes))
        for host, members in groupby(lanes, key=lambda lane: self._timeline.hosts[lane]):
            together = list(members)
            top, bottom = self._plot.y(together[0] - 0.38), self._plot.y(together[-1] + 0.38)
            ends = ((14.0, top), (10.0, top), (10.0, bottom), (14.0, bottom))
            yield Polyline(ends, "rail", closed=False, title=f"host {host}")
            yield TextShape(16, (top + bottom) / 2 + 4, f"host {host}", "words")

    def _axis(self) -> Iterator[Drawn]:
        bottom, right = self._plot.bottom, self._plot.right
        for moment in self._moments:
            near = self._x(moment) > right - 24
            anchor = "start" if not moment else "end" if near else "middle"
            yield TextShape(self._x(moment), bottom + 16, seconds_in_words(moment), "words", anchor)
        yield TextShape(right, bottom + 34, self._timeline.clock, "words", "end")

    def _heading(self, subtitle: str) -> Iterator[Drawn]:
        yield TextShape(14, 24, self._timeline.title, "title")
        yield TextShape(14, 42, subtitle, "words")
        x, looks = 14.0, {each.activity.value for each in self._timeline.intervals}
        for look, words in STAGES if self._pipeline else LEGEND:
            if look == Activity.WEIGHTS.value and look not in looks:
                continue
            yield Rect(x, 53, 20, 11, look)
            yield TextShape(x + 26, 63, words, "words")
            x += 48 + text_width(words, "words")
        yield Polyline(((x, 58.5), (x + 26, 58.5)), "arrow", closed=False, head=True)
        yield TextShape(x + 34, 63, self._about_arrows(), "words")

    def _about_arrows(self) -> str:
        if not self._pipeline:
            return "a message, from its first byte out to its last byte in"
        chunks = any(each.later for each in self._timeline.intervals)
        return f"a message; numbers are microbatches{', a the first chunk, b the next' if chunks else ''}"
