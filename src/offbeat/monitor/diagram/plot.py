"""What all pictures are drawn with: round numbers for axes, scales from numbers to pixels, lanes, elements of SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from offbeat.monitor.diagram.shapes import Polyline, Rect, TextShape


def ticks(low: float, high: float, about: int = 5, whole: bool = False) -> list[float]:
    """Round numbers inside a range, about so many; `whole` ones are integers."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(1.0, step) if whole else step
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class PixelScale(NamedTuple):
    """From numbers between `low` and `high` to pixels between `first` and `last`."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        """The pixel of a number."""
        return self.first + (value - self.low) / ((self.high - self.low) or 1.0) * (self.last - self.first)

    def kept(self, value: float) -> float:
        """A number that is not outside."""
        return min(max(value, self.low), self.high)


class Plot(NamedTuple):
    """A lane for each process from top to bottom, and time from left to right."""

    x: PixelScale
    """Pixels of moments."""
    top: float
    pitch: float
    """From the middle of a lane to the middle of the next."""
    lanes: int

    @property
    def left(self) -> float:
        """Where time begins."""
        return self.x.first

    @property
    def right(self) -> float:
        """Where time ends."""
        return self.x.last

    @property
    def bottom(self) -> float:
        """Below the last lane."""
        return self.top + self.lanes * self.pitch

    @property
    def area(self) -> Rect:
        """All of it."""
        return Rect(self.left, self.top, self.right - self.left, self.bottom - self.top, "paper")

    def y(self, lane: float) -> float:
        """The middle of a lane."""
        return self.top + (lane + 0.5) * self.pitch

    def names(self, names: Iterable[str]) -> Iterator[TextShape]:
        """Who the lanes are of, on their left."""
        for lane, name in enumerate(names):
            yield TextShape(self.left - 10, self.y(lane) + 4, name, "name", "end")

    def grid(self, moments: Iterable[float]) -> Iterator[Polyline]:
        """A line down through all lanes at each of these moments."""
        for moment in moments:
            yield Polyline(((self.x(moment), self.top), (self.x(moment), self.bottom)), "grid", False)


def pixels(value: float) -> str:
    """A number with one decimal at most: a tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")


def element(tag: str, *children: str, **attributes: float | str) -> str:
    """An element of SVG. Names of attributes have `_` for `-`, and may end in one; numbers are pixels."""
    said = "".join(
        f" {name.strip('_').replace('_', '-')}={quoteattr(value if isinstance(value, str) else pixels(value))}"
        for name, value in attributes.items()
    )
    return f"<{tag}{said}>{''.join(children)}</{tag}>" if children else f"<{tag}{said}/>"
