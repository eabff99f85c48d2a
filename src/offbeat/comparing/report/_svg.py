"""Pictures by hand: curves, stacked bars and dots in SVG, with axes that have round numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#78716c", "#1e293b")


@dataclass(frozen=True)
class Curve:
    """A line of a picture."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str
    faint: bool = False


@dataclass(frozen=True)
class Dot:
    """A marked place of a picture."""

    name: str
    x: float
    y: float
    color: str
    edge: bool = False
    """Whether nothing is better in both directions."""


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that span a range."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


class _Frame:
    """From numbers to places."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], from_zero: bool) -> None:
        self.left, self.right = 0.0, max([*xs, 1e-9]) * 1.04
        low, high = min(ys, default=0.0), max(ys, default=1.0)
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        self.low, self.high = (0.0 if from_zero else low - margin), high + margin

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, across: str, up: str) -> list[str]:
        bottom = HEIGHT - BOTTOM
        parts: list[str] = []
        for value in ticks(self.left, self.right):
            x = self.x(value)
            parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" class="grid"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
        for value in ticks(self.low, self.high):
            y = self.y(value)
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(
            f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle" class="name">{escape(across)}</text>'
        )
        turned = f"translate(13 {(TOP + bottom) / 2:.0f}) rotate(-90)"
        parts.append(f'<text transform="{turned}" text-anchor="middle" class="name">{escape(up)}</text>')
        return parts


def curves(lines: Sequence[Curve], across: str, up: str, level: float | None = None) -> str:
    """Lines over common axes, and the level that is to be reached."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + ([] if level is None else [level])
    frame = _Frame(xs, _without_outliers(ys, level), from_zero=False)
    parts = frame.axes(across, up)
    if level is not None:
        y = frame.y(level)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="target"/>')
        parts.append(f'<text x="{WIDTH - RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end">target {level:g}</text>')
    for line in lines:
        inside = [(frame.x(x), frame.y(min(max(y, frame.low), frame.high))) for x, y in line.points]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in inside)
        opacity = 0.25 if line.faint else 0.95
        parts.append(
            f'<polyline points="{places}" fill="none" stroke="{line.color}" stroke-opacity="{opacity}" '
            f'stroke-width="{1 if line.faint else 2}"><title>{escape(line.name)}</title></polyline>'
        )
        if not line.faint and inside:
            x, y = inside[-1]
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{line.color}"/>')
    return _drawn(parts)


def _without_outliers(ys: Sequence[float], level: float | None) -> list[float]:
    """Scores of the first evaluations can be so far off that nothing else would be seen."""
    if len(ys) < 8:
        return list(ys)
    ordered = sorted(ys)
    cut = len(ys) // 12
    kept = ordered[cut : len(ys) - cut]
    spread = kept[-1] - kept[0]
    far = [y for y in ys if kept[0] - 2 * spread <= y <= kept[-1] + 2 * spread]
    return [*far, *([] if level is None else [level])]


def dots(places: Sequence[Dot], across: str, up: str) -> str:
    """Marked places over axes from zero; those on the edge are joined."""
    frame = _Frame([dot.x for dot in places], [dot.y for dot in places], from_zero=True)
    parts = frame.axes(across, up)
    edge = sorted((dot for dot in places if dot.edge), key=lambda dot: dot.x)
    joined = " ".join(f"{frame.x(dot.x):.1f},{frame.y(dot.y):.1f}" for dot in edge)
    parts.append(f'<polyline points="{joined}" class="edge"/>')
    places = sorted(places, key=lambda dot: (not dot.edge, dot.y))
    taken = [_Box(frame.x(dot.x) - 6, frame.y(dot.y) - 6, 12, 12) for dot in places]
    for dot in places:
        x, y = frame.x(dot.x), frame.y(dot.y)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if dot.edge else 4.5}" fill="{dot.color}"/>')
        box = _free_place(x, y, 6.1 * len(dot.name), taken)
        taken.append(box)
        parts.append(f'<text x="{box.left:.1f}" y="{box.top + 11:.1f}">{escape(dot.name)}</text>')
    return _drawn(parts)


@dataclass(frozen=True)
class _Box:
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
    """Beside a dot, where no other name is; further up or down if need be."""
    candidates = [
        _Box(left, y - 7 + shift, width, 14)
        for shift in (0, -13, 13, -26, 26, -39, 39)
        for left in (x + 9, x - 9 - width)
    ]
    free = (box for box in candidates if box.inside and not any(box.meets(other) for other in taken))
    return next(free, candidates[0])


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, str], across: str) -> str:
    """A stacked bar for each row, in the order of the colors."""
    most = max((sum(parts.values()) for _, parts in rows), default=1.0) or 1.0
    left, high = 190, 26
    height = TOP + high * len(rows) + BOTTOM
    wide = WIDTH - left - RIGHT
    drawn: list[str] = []
    for value in ticks(0.0, most * 1.02):
        x = left + value / (most * 1.02) * wide
        drawn.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - BOTTOM}" class="grid"/>')
        drawn.append(f'<text x="{x:.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    for number, (name, parts) in enumerate(rows):
        y = TOP + number * high
        drawn.append(f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(_cut(name))}</text>')
        x = float(left)
        for kind, color in colors.items():
            width = parts.get(kind, 0.0) / (most * 1.02) * wide
            told = f"{name}: {kind} {parts.get(kind, 0.0):.3g} s"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{high - 8}" fill="{color}">'
                f"<title>{escape(told)}</title></rect>"
            )
            x += width
    drawn.append(
        f'<text x="{(left + WIDTH) / 2:.0f}" y="{height - 6}" text-anchor="middle" class="name">{escape(across)}</text>'
    )
    return _drawn(drawn, height)


def _cut(name: str) -> str:
    return name if len(name) <= 29 else name[:28] + "…"


def _drawn(parts: Sequence[str], height: int = HEIGHT) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return head + "".join(parts) + "</svg>"
