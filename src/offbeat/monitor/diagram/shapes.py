"""What pictures are made of: a few shapes in pixels, and how each sort of them looks.

The colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart; waiting is hatched,
too, so that it is seen in black and white.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

Point = tuple[float, float]


class ShapeStyle(NamedTuple):
    """How a sort of shape looks."""

    fill: str | None = None
    stroke: str | None = None
    """Around it; around letters, a halo."""
    width: float = 1.0
    opacity: float = 1.0
    dash: tuple[float, ...] = ()
    hatch: str | None = None
    """A colour to hatch the fill with."""
    size: float = 11.0
    """Of letters, in pixels."""
    bold: bool = False


class Polyline(NamedTuple):
    """A polygon, or, if it is not closed, a line, which may have a head."""

    points: tuple[Point, ...]
    look: str
    closed: bool = True
    head: bool = False
    title: str = ""
    """What is said when somebody points at it."""

    def moved(self, x: float, y: float) -> Polyline:
        """The same elsewhere."""
        return self._replace(points=tuple((a + x, b + y) for a, b in self.points))


class Rect(NamedTuple):
    """A rectangle by its upper left corner: a polygon, too."""

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
    """Words, of which the anchor is at a point: their `start`, `middle` or `end`."""

    x: float
    y: float
    words: str
    look: str
    anchor: str = "start"


Drawn = Rect | Polyline | TextShape


class Drawing(NamedTuple):
    """A whole picture: what is cut off at the edges of the plot, and what is around and above it."""

    width: float
    height: float
    title: str
    plot: Rect
    inside: list[Drawn]
    around: list[Drawn]


def dot(x: float, y: float, radius: float, look: str, title: str = "") -> Polyline:
    """A circle, as far as the eye can tell."""
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
}
"""The kinds of time."""
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
}
"""By name, as shapes refer to them."""


def text_width(words: str, look: str) -> float:
    """About how wide words are, in pixels."""
    return 0.56 * LOOKS[look].size * len(words)
