"""Drawings as files: SVG, written here, and PNG by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

from offbeat.errors import OutputError, UsageError, did_you_mean
from offbeat.monitor.diagram.layout import lay_out
from offbeat.monitor.diagram.model import Diagram
from offbeat.monitor.diagram.shapes import LOOKS, Drawing, Drawn, Point, TextShape

SUFFIXES: Final = (".svg", ".png")
_FONT: Final = "'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif"
_HEAD: Final = 7.0
_SHARP: Final = 2  # PNG pixels per pixel of the drawing.


def check_name(path: Path) -> None:
    """Refuse a file name that does not end in .svg or .png."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path} is not a name for a picture.{did_you_mean(path.suffix, SUFFIXES)}")


def save(diagram: Diagram, path: Path) -> None:
    """Write the picture of a diagram, as SVG or PNG by the file name."""
    write(lay_out(diagram), path)


def write(drawing: Drawing, path: Path) -> None:
    """Write a drawing, as SVG or PNG by the file name."""
    check_name(path)
    try:
        if path.suffix.lower() == ".png":
            _write_png(drawing, path)
        else:
            path.write_text(svg(drawing), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}. Choose another path.") from error


# -- SVG --------------------------------------------------------------------------------------------------------------


def pixels(value: float) -> str:
    """A number rounded to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def element(tag: str, *children: str, **attributes: float | str) -> str:
    """An SVG element. Attribute names have `_` for `-` and may end in one; numbers are pixels."""
    pairs = "".join(
        f" {name.strip('_').replace('_', '-')}={quoteattr(value if isinstance(value, str) else pixels(value))}"
        for name, value in attributes.items()
    )
    return f"<{tag}{pairs}>{''.join(children)}</{tag}>" if children else f"<{tag}{pairs}/>"


def svg(drawing: Drawing) -> str:
    """A drawing as self-contained SVG with tooltips."""
    looks = {shape.look for shape in (*drawing.inside, *drawing.around)}
    width, height = pixels(drawing.width), pixels(drawing.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family={quoteattr(_FONT)} role="img">',
        f"<title>{escape(drawing.title or 'Space-time diagram')}</title>",
        f"<style>{''.join(_css(name) for name in LOOKS if name in looks)}</style>",
        "<defs>",
        *(_pattern(name) for name in LOOKS if name in looks and LOOKS[name].hatch),
        f'<clipPath id="plot"><path d="{_path(drawing.plot.points, True)}"/></clipPath>',
        "</defs>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
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
    head = _path(_arrow_head(*shape.points[-2:]), True)
    return line + element("path", *title, class_=name, d=head, style=f"fill:{look.stroke};stroke:none")


def _path(points: Sequence[Point], closed: bool) -> str:
    return "M" + "L".join(f"{pixels(x)},{pixels(y)}" for x, y in points) + ("Z" if closed else "")


def _arrow_head(start: Point, stop: Point) -> tuple[Point, ...]:
    angle = math.atan2(stop[1] - start[1], stop[0] - start[0])
    sides = (angle + math.pi - 0.4, angle + math.pi + 0.4)
    return stop, *((stop[0] + _HEAD * math.cos(side), stop[1] + _HEAD * math.sin(side)) for side in sides)


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
    from matplotlib.text import Text

    look = LOOKS[shape.look]
    width = 0.72 * look.width
    if isinstance(shape, TextShape):
        side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        halo = [withStroke(linewidth=width, foreground=look.stroke)] if look.stroke else None
        yield Text(
            shape.x, shape.y, shape.words, color=look.fill, fontsize=0.72 * look.size, ha=side,
            weight="bold" if look.bold else "normal", parse_math=False, path_effects=halo,
        )  # fmt: skip
    elif shape.closed:
        colors = {"facecolor": look.fill, "edgecolor": look.hatch or look.stroke, "alpha": look.opacity}
        hatch: Any = {"hatch": "//////"} if look.hatch else {}
        yield Polygon(shape.points, closed=True, linewidth=width if look.stroke else 0.0, **colors, **hatch)
    else:
        xs, ys = zip(*shape.points, strict=True)
        dash: Any = (0, [length / look.width for length in look.dash]) if look.dash else "-"
        yield Line2D(xs, ys, color=look.stroke, linewidth=width, alpha=look.opacity, linestyle=dash)
        if shape.head:
            yield Polygon(_arrow_head(*shape.points[-2:]), closed=True, color=look.stroke, alpha=look.opacity, lw=0)
