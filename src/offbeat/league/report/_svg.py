"""Charts in SVG: curves, stacked bars and dots over axes with round numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from offbeat.monitor.diagram.shapes import PixelScale, ticks
from offbeat.monitor.diagram.svg import element

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#78716c", "#1e293b")


class PlottedLine(NamedTuple):
    """A line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str
    faint: bool = False


class Dot(NamedTuple):
    """A labelled point of a chart."""

    name: str
    x: float
    y: float
    color: str
    edge: bool = False
    """Whether no other dot is better in both directions."""


class _PlotFrame:
    """Two scales, and axes with round numbers."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], from_zero: bool) -> None:
        low, high = min(ys, default=0.0), max(ys, default=1.0)
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        self.x = PixelScale(0.0, max([*xs, 1e-9]) * 1.04, LEFT, WIDTH - RIGHT)
        self.y = PixelScale(0.0 if from_zero else low - margin, high + margin, HEIGHT - BOTTOM, TOP)

    def axes(self, across: str, up: str) -> list[str]:
        parts = _upright(self.x, across, HEIGHT)
        for value in ticks(self.y.low, self.y.high):
            y = self.y(value)
            parts.append(element("line", x1=LEFT, y1=y, x2=WIDTH - RIGHT, y2=y, class_="grid"))
            parts.append(_text(LEFT - 6, y + 4, f"{value:.6g}", "end"))
        turned = f"translate(13 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"
        return [*parts, element("text", escape(up), transform=turned, text_anchor="middle", class_="name")]


def _upright(x: PixelScale, name: str, height: float) -> list[str]:
    """The grid, numbers and name of a horizontal axis."""
    bottom = height - BOTTOM
    parts = [_text((x.first + x.last) / 2, height - 6, name, "middle", class_="name")]
    for value in ticks(x.low, x.high):
        parts.append(element("line", x1=x(value), y1=TOP, x2=x(value), y2=bottom, class_="grid"))
        parts.append(_text(x(value), bottom + 16, f"{value:g}", "middle"))
    return parts


def _text(x: float, y: float, words: str, anchor: str = "start", **more: str) -> str:
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, **more)


def _places(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def curves(lines: Sequence[PlottedLine], across: str, up: str, level: float | None = None) -> str:
    """Lines over common axes, and the target level."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + ([] if level is None else [level])
    frame = _PlotFrame(xs, _without_outliers(ys, level), from_zero=False)
    parts = frame.axes(across, up)
    if level is not None:
        y = frame.y(level)
        parts.append(element("line", x1=LEFT, y1=y, x2=WIDTH - RIGHT, y2=y, class_="target"))
        parts.append(_text(WIDTH - RIGHT - 4, y - 5, f"target {level:g}", "end"))
    for line in lines:
        inside = [(frame.x(x), frame.y(min(max(y, frame.y.low), frame.y.high))) for x, y in line.points]
        look = {"stroke_opacity": "0.25", "stroke_width": "1"} if line.faint else {"stroke_width": "2"}
        title = element("title", escape(line.name))
        parts.append(element("polyline", title, points=_places(inside), fill="none", stroke=line.color, **look))
        if not line.faint and inside:
            x, y = inside[-1]
            parts.append(element("circle", cx=x, cy=y, r=3.2, fill=line.color))
    return _svg(parts)


def _without_outliers(ys: Sequence[float], level: float | None) -> list[float]:
    """Without first scores that are so far off that they would hide everything else."""
    if len(ys) < 8:
        return list(ys)
    cut = len(ys) // 12
    low, *_, high = sorted(ys)[cut : len(ys) - cut]
    near = [y for y in ys if low - 2 * (high - low) <= y <= high + 2 * (high - low)]
    return [*near, *([] if level is None else [level])]


def dots(places: Sequence[Dot], across: str, up: str) -> str:
    """Labelled points over axes from zero; those on the edge are joined."""
    frame = _PlotFrame([dot.x for dot in places], [dot.y for dot in places], from_zero=True)
    parts = frame.axes(across, up)
    edge = sorted((dot for dot in places if dot.edge), key=lambda dot: dot.x)
    joined = _places([(frame.x(dot.x), frame.y(dot.y)) for dot in edge])
    parts.append(element("polyline", points=joined, class_="edge"))
    places = sorted(places, key=lambda dot: (not dot.edge, dot.y))
    taken = [_Box(frame.x(dot.x) - 6, frame.y(dot.y) - 6, 12, 12) for dot in places]
    for dot in places:
        x, y = frame.x(dot.x), frame.y(dot.y)
        parts.append(element("circle", cx=x, cy=y, r=6 if dot.edge else 4.5, fill=dot.color))
        box = _free_place(x, y, 6.1 * len(dot.name), taken)
        taken.append(box)
        parts.append(_text(box.left, box.top + 11, dot.name))
    return _svg(parts)


class _Box(NamedTuple):
    left: float
    top: float
    width: float
    height: float

    def meets(self, other: _Box) -> bool:
        across = self.left < other.left + other.width and other.left < self.left + self.width
        return across and self.top < other.top + other.height and other.top < self.top + self.height

    @property
    def inside(self) -> bool:
        return self.left >= LEFT and self.left + self.width <= WIDTH and self.top >= 0


def _free_place(x: float, y: float, width: float, taken: Sequence[_Box]) -> _Box:
    """Where a label beside a dot overlaps no other; further up or down if necessary."""
    candidates = [
        _Box(left, y - 7 + shift, width, 14)
        for shift in (0, -13, 13, -26, 26, -39, 39)
        for left in (x + 9, x - 9 - width)
    ]
    free = (box for box in candidates if box.inside and not any(box.meets(other) for other in taken))
    return next(free, candidates[0])


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, str], across: str) -> str:
    """A stacked bar for each row, in the order of the colours."""
    most = max((sum(parts.values()) for _, parts in rows), default=1.0) or 1.0
    high = 26
    height = TOP + high * len(rows) + BOTTOM
    scale = PixelScale(0.0, most * 1.02, 190, WIDTH - RIGHT)
    shapes = _upright(scale, across, height)
    for number, (name, parts) in enumerate(rows):
        y, spent = TOP + number * high, 0.0
        label = name if len(name) <= 29 else name[:28] + "…"
        shapes.append(_text(scale.first - 8, y + 17, label, "end"))
        for kind, color in colors.items():
            seconds = parts.get(kind, 0.0)
            x, width = scale(spent), scale(seconds) - scale.first
            title = element("title", escape(f"{name}: {kind} {seconds:.3g} s"))
            shapes.append(element("rect", title, x=x, y=y + 4, width=width, height=high - 8, fill=color))
            spent += seconds
    return _svg(shapes, height)


def _svg(parts: Sequence[str], height: int = HEIGHT) -> str:
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", role="img")
