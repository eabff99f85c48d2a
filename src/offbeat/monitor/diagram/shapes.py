"""Shapes in pixels that pictures are made of, their styles, the scale of an axis and a plot with one lane per process.

The colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart; waits are also
hatched, so that they show in black and white.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

Point = tuple[float, float]


class ShapeStyle(NamedTuple):
    """Colours, line and font of one kind of shape."""

    fill: str | None = None
    stroke: str | None = None  # Outline; of text, a halo.
    width: float = 1.0
    opacity: float = 1.0
    dash: tuple[float, ...] = ()
    hatch: str | None = None  # Colour of hatching on top of the fill.
    size: float = 11.0  # Font size in pixels.
    bold: bool = False


class Polyline(NamedTuple):
    """A polygon, or, if not closed, a line, optionally with an arrow head."""

    points: tuple[Point, ...]
    look: str
    closed: bool = True
    head: bool = False
    title: str = ""  # Tooltip.

    def moved(self, x: float, y: float) -> Polyline:
        """A translated copy."""
        return self._replace(points=tuple((a + x, b + y) for a, b in self.points))


class Rect(NamedTuple):
    """A rectangle by its upper left corner; usable as a polygon."""

    x: float
    y: float
    width: float
    height: float
    look: str
    title: str = ""
    closed = True
    head = False

    @property
    def points(self) -> tuple[Point, ...]:
        """Its corners."""
        right, bottom = self.x + self.width, self.y + self.height
        return (self.x, self.y), (right, self.y), (right, bottom), (self.x, bottom)


class TextShape(NamedTuple):
    """A line of text; `anchor` is `start`, `middle` or `end`."""

    x: float
    y: float
    words: str
    look: str
    anchor: str = "start"


Drawn = Rect | Polyline | TextShape


class Drawing(NamedTuple):
    """A picture: shapes that are clipped to the plot, and shapes around and above it."""

    width: float
    height: float
    title: str
    plot: Rect
    inside: list[Drawn]
    around: list[Drawn]


def dot(x: float, y: float, radius: float, look: str, title: str = "") -> Polyline:
    """A circle, approximated by 16 corners."""
    angles = [math.tau * part / 16 for part in range(16)]
    return Polyline(tuple((x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles), look, title=title)


BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
INK: Final = "#24292f"
GREY: Final = "#6e7781"

KINDS: Final[Mapping[str, ShapeStyle]] = {
    "compute": ShapeStyle(SKY),
    "wait": ShapeStyle("#FBE7BF", hatch=ORANGE),
    "communicate": ShapeStyle(GREEN),
    "failed": ShapeStyle(VERMILLION),
    "stuck": ShapeStyle("#FBD9C9", hatch=VERMILLION),
    "input": ShapeStyle(PURPLE),
    "evaluate": ShapeStyle(YELLOW),
    "other": ShapeStyle("#C9CED4"),
    "microbatch forward": ShapeStyle("#4C8BC4"),
    "microbatch backward": ShapeStyle(ORANGE),
    "microbatch weights": ShapeStyle("#9C5FB0"),
}  # How a process spends its time.
LOOKS: Final[Mapping[str, ShapeStyle]] = {
    **KINDS,
    "paper": ShapeStyle("#ffffff"),
    "lane": ShapeStyle("#f1f3f5"),
    "rail": ShapeStyle(stroke="#adb5bd", width=1.5),
    "grid": ShapeStyle(stroke="#dfe3e8", width=1.0),
    "band": ShapeStyle(BLUE, BLUE, 0.6, 0.28),
    "bands": ShapeStyle(BLUE, None, 0.6, 0.14),
    "missing": ShapeStyle(stroke=VERMILLION, width=1.4, dash=(2.0, 3.0)),
    "arrow": ShapeStyle(INK, INK, 1.1, 0.85),
    "thin arrow": ShapeStyle(INK, INK, 0.7, 0.4),
    "out": ShapeStyle(GREEN, "#ffffff", 0.5),
    "in": ShapeStyle(BLUE, "#ffffff", 0.5),
    "reduce": ShapeStyle(PURPLE),
    "idle": ShapeStyle("#d0d7de"),
    "forward": ShapeStyle(SKY),
    "backward": ShapeStyle(YELLOW),
    "weights": ShapeStyle(PURPLE),
    "later forward": ShapeStyle("#C3E3F6"),
    "later backward": ShapeStyle("#FAF7C5"),
    "step": ShapeStyle(stroke=INK, width=1.2),
    "mark": ShapeStyle(VERMILLION, "#ffffff", 0.8),
    "ending": ShapeStyle(INK, "#ffffff", 0.8),
    "kept": ShapeStyle(BLUE, "#ffffff", 0.8),
    "event": ShapeStyle(BLUE, "#ffffff", 1.0),
    "open": ShapeStyle(VERMILLION),
    "halo": ShapeStyle(stroke="#ffffff", width=5.0, opacity=0.9),
    "cut": ShapeStyle(stroke=BLACK, width=2.0),
    "wrong cut": ShapeStyle(stroke=VERMILLION, width=2.2, dash=(7.0, 4.0)),
    "title": ShapeStyle(INK, size=15.0, bold=True),
    "name": ShapeStyle(INK, size=12.0),
    "words": ShapeStyle(GREY, size=11.0),
    "inside": ShapeStyle(INK, "#ffffff", 2.5, size=10.0),
    "cut words": ShapeStyle(BLACK, "#ffffff", 2.5, size=11.0, bold=True),
    "wrong cut words": ShapeStyle(VERMILLION, "#ffffff", 2.5, size=11.0, bold=True),
}  # By name, as in the `look` of shapes.


def text_width(words: str, look: str) -> float:
    """Approximate width of a text in pixels."""
    return 0.56 * LOOKS[look].size * len(words)


def ticks(low: float, high: float, about: int = 5, whole: bool = False) -> list[float]:
    """About the given number of round values inside a range; integers if `whole`."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(1.0, step) if whole else step
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class PixelScale(NamedTuple):
    """Maps values between `low` and `high` to pixels between `first` and `last`."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return self.first + (value - self.low) / ((self.high - self.low) or 1.0) * (self.last - self.first)


class Plot(NamedTuple):
    """One lane per process from top to bottom, time from left to right."""

    x: PixelScale  # Maps times to pixels.
    top: float
    pitch: float  # Distance between the middles of neighbouring lanes.
    lanes: int

    @property
    def left(self) -> float:
        """Left edge."""
        return self.x.first

    @property
    def right(self) -> float:
        """Right edge."""
        return self.x.last

    @property
    def bottom(self) -> float:
        """Lower edge of the last lane."""
        return self.top + self.lanes * self.pitch

    @property
    def area(self) -> Rect:
        """The whole plot."""
        return Rect(self.left, self.top, self.right - self.left, self.bottom - self.top, "paper")

    def y(self, lane: float) -> float:
        """The middle of a lane."""
        return self.top + (lane + 0.5) * self.pitch

    def names(self, names: Iterable[str]) -> Iterator[TextShape]:
        """The lanes' names, to their left."""
        for lane, name in enumerate(names):
            yield TextShape(self.left - 10, self.y(lane) + 4, name, "name", "end")

    def grid(self, moments: Iterable[float]) -> Iterator[Polyline]:
        """A vertical line through all lanes at each of these times."""
        for moment in moments:
            yield Polyline(((self.x(moment), self.top), (self.x(moment), self.bottom)), "grid", False)
