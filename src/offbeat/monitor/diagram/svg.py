"""Drawings as files: SVG, written here; PNG, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

from offbeat.errors import OutputError, UsageError, did_you_mean
from offbeat.monitor.diagram.layout import drawn
from offbeat.monitor.diagram.model import Diagram
from offbeat.monitor.diagram.plot import element, pixels
from offbeat.monitor.diagram.shapes import LOOKS, Drawing, Drawn, Point, ShapeStyle, TextShape

SUFFIXES: Final = (".svg", ".png")
_FONT: Final = "'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif"
_HEAD: Final = 7.0
_SHARP: Final = 2
"""Pixels of a PNG for each pixel of the drawing."""


def check_name(path: Path) -> None:
    """Refuse a name whose ending does not say what kind of picture to make."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path} is not a name for a picture.{did_you_mean(path.suffix, SUFFIXES)}")


def save(lanes: Diagram, path: Path) -> None:
    """Write the picture of a diagram; the name's ending says as what."""
    write(drawn(lanes), path)


def write(drawing: Drawing, path: Path) -> None:
    """Write a drawing; the name's ending says as what."""
    check_name(path)
    try:
        if path.suffix.lower() == ".png":
            _write_png(drawing, path)
        else:
            path.write_text(svg(drawing), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}. Give another place.") from error


def svg(drawing: Drawing) -> str:
    """A drawing as SVG: one file, nothing fetched, and words where somebody points."""
    looks = {shape.look for shape in (*drawing.inside, *drawing.around)}
    size = f"{pixels(drawing.width)} {pixels(drawing.height)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{pixels(drawing.width)}" '
        f'height="{pixels(drawing.height)}" font-family={quoteattr(_FONT)} role="img">',
        f"<title>{escape(drawing.title or 'Space-time diagram')}</title>",
        f"<style>{''.join(_css(name) for name in LOOKS if name in looks)}</style>",
        "<defs>",
        *(_pattern(name) for name in LOOKS if name in looks and LOOKS[name].hatch),
        f'<clipPath id="plot"><path d="{_path(drawing.plot.points, True)}"/></clipPath>',
        "</defs>",
        f'<rect width="{pixels(drawing.width)}" height="{pixels(drawing.height)}" fill="#fff"/>',
        '<g clip-path="url(#plot)">',
        *(_element(shape) for shape in drawing.inside),
        "</g>",
        *(_element(shape) for shape in drawing.around),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _class(name: str) -> str:
    return name.replace(" ", "-")


def _css(name: str) -> str:
    look = LOOKS[name]
    fill = f"url(#hatch-{_class(name)})" if look.hatch else look.fill or "none"
    parts = [f"fill:{fill}"]
    if look.stroke:
        parts += [f"stroke:{look.stroke}", f"stroke-width:{look.width:g}"]
    if look.opacity < 1:
        parts.append(f"opacity:{look.opacity:g}")
    if look.dash:
        parts.append(f"stroke-dasharray:{' '.join(map(pixels, look.dash))}")
    return f".{_class(name)}{{{';'.join(parts)}}}"


def _pattern(name: str) -> str:
    look = LOOKS[name]
    return (
        f'<pattern id="hatch-{_class(name)}" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="5" height="5" fill="{look.fill}"/>'
        f'<rect width="2.2" height="5" fill="{look.hatch}"/></pattern>'
    )


def _element(shape: Drawn) -> str:
    name, look = _class(shape.look), LOOKS[shape.look]
    if isinstance(shape, TextShape):
        more = {"font_weight": "600"} if look.bold else {}
        more |= {"paint_order": "stroke"} if look.stroke else {}
        more |= {} if shape.anchor == "start" else {"text_anchor": shape.anchor}
        return element("text", escape(shape.words), class_=name, x=shape.x, y=shape.y, font_size=look.size, **more)
    title = [element("title", escape(shape.title))] if shape.title else []
    more = {} if shape.closed else {"style": "fill:none"}
    line = element("path", *title, class_=name, d=_path(shape.points, shape.closed), **more)
    if not shape.head:
        return line
    head = _path(arrow_head(*shape.points[-2:]), True)
    return line + element("path", *title, class_=name, d=head, style=f"fill:{look.stroke};stroke:none")


def _path(points: Sequence[Point], closed: bool) -> str:
    return "M" + "L".join(f"{pixels(x)},{pixels(y)}" for x, y in points) + ("Z" if closed else "")


def arrow_head(start: Point, stop: Point) -> tuple[Point, Point, Point]:
    """The three corners of a head at the end of a line."""
    angle = math.atan2(stop[1] - start[1], stop[0] - start[0])
    back = [(angle + turn, _HEAD) for turn in (math.pi - 0.4, math.pi + 0.4)]
    left, right = ((stop[0] + length * math.cos(way), stop[1] + length * math.sin(way)) for way, length in back)
    return stop, left, right


# -- PNG --------------------------------------------------------------------------------------------------------------


def _write_png(drawing: Drawing, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Polygon
    except ImportError as error:
        raise UsageError("PNG needs matplotlib: pip install 'offbeat[draw]', or name the picture .svg.") from error
    figure: Any = Figure((drawing.width / 100, drawing.height / 100), dpi=100 * _SHARP)
    FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    plot: Any = Polygon(drawing.plot.points, closed=True)
    plot.set_transform(axes.transData)
    for order, shape in enumerate((*drawing.inside, *drawing.around)):
        for artist in _artists(shape):
            artist.set_zorder(order)
            axes.add_artist(artist)
            if order < len(drawing.inside):
                artist.set_clip_path(plot)
    figure.savefig(path, format="png", facecolor="white")


def _artists(shape: Drawn) -> Iterator[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Polygon
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text as Words

    look = LOOKS[shape.look]
    if isinstance(shape, TextShape):
        sides = {"start": "left", "middle": "center", "end": "right"}
        weight = "bold" if look.bold else "normal"
        size = 0.72 * look.size
        yield Words(
            shape.x, shape.y, shape.words, color=look.fill, fontsize=size, ha=sides[shape.anchor], weight=weight,
            parse_math=False, path_effects=[withStroke(linewidth=0.72 * look.width, foreground=look.stroke)]
            if look.stroke else None,
        )  # fmt: skip
    elif shape.closed:
        yield Polygon(shape.points, closed=True, **_filled(look))
    else:
        xs, ys = zip(*shape.points, strict=True)
        dash: Any = (0, [length / look.width for length in look.dash]) if look.dash else "-"
        width = 0.72 * look.width
        yield Line2D(xs, ys, color=look.stroke, linewidth=width, alpha=look.opacity, linestyle=dash)
        if shape.head:
            yield Polygon(arrow_head(*shape.points[-2:]), closed=True, color=look.stroke, alpha=look.opacity, lw=0)


def _filled(look: ShapeStyle) -> dict[str, Any]:
    edge = look.hatch or look.stroke
    width = 0.72 * look.width if look.stroke else 0.0
    kept = {"facecolor": look.fill, "edgecolor": edge, "linewidth": width, "alpha": look.opacity}
    return kept | ({"hatch": "//////"} if look.hatch else {})
