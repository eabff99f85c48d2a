"""A measurement as a table and as a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

COLORS = {"offbeat": "#2563eb", "gloo": "#f59e0b", "mpi": "#10b981"}
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def in_bytes(size: int) -> str:
    """A size with its unit: 4 KiB, 25 MiB."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def in_seconds(seconds: float) -> str:
    """A time with three digits and a unit."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def table(result: Mapping[str, Any]) -> Table:
    """Sizes down, peers across: each peer's time, and its ratio to the first one's."""
    from rich.table import Table

    first, *others = result["peers"]
    shown = Table(title=f"{result['operation']} of {result['dtype']}, {result['ranks']} ranks on this machine")
    for heading in ("size", *result["peers"], *(f"{name} / {first}" for name in others)):
        shown.add_column(heading, justify="right")
    noisy = any("noise" in row for row in result["rows"])
    if noisy:
        shown.add_column("gloo again / gloo", justify="right", style="dim")
    for row in result["rows"]:
        times = [in_seconds(row["seconds"][name]) for name in result["peers"]]
        ratios = [_spread(row["ratios"][f"{name} / {first}"]) for name in others]
        shown.add_row(in_bytes(row["bytes"]), *times, *ratios, *([_spread(row["noise"])] if noisy else []))
    return shown


def _spread(spread: Mapping[str, float]) -> str:
    # Brackets would be read as markup.
    return f"{spread['median']:.3g}x ({spread['low']:.2g} to {spread['high']:.2g})"


def picture(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time against size, both logarithmic, one panel for each result."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a picture needs matplotlib: pip install matplotlib, or omit the picture") from error
    figure = Figure(figsize=(0.8 + 4.6 * len(results), 4.2), layout="constrained")
    panels: Any = figure.subplots(1, len(results), sharey=True, squeeze=False)
    for panel, result in zip(panels[0], results, strict=True):
        _panel(panel, result)
    panels[0][0].set_ylabel("time of one call, slowest rank")
    figure.savefig(path, dpi=130)


def _tick(seconds: float, _: int) -> str:
    return in_seconds(seconds)


def _panel(axes: Any, result: Mapping[str, Any]) -> None:
    sizes = [row["bytes"] for row in result["rows"]]
    for name in result["peers"]:
        times = [row["seconds"][name] for row in result["rows"]]
        axes.plot(sizes, times, marker="o", markersize=4, color=COLORS.get(name), label=name)
    axes.set(xscale="log", yscale="log", xlabel="size of each rank's float32 tensor")
    title = f"{result['operation']}, {result['ranks']} ranks, {result['environment']['cores']} cores"
    axes.set_title(title, fontsize=10)
    axes.set_xticks(sizes, [in_bytes(size) for size in sizes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(_tick)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
