"""`offbeat scale`: measured speed-up, and the laws fitted to it, as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from offbeat.cli.options import ScaleOptions
from offbeat.cli.output import figures, print_json
from offbeat.errors import UsageError
from offbeat.scaling import Scaling, scale
from offbeat.statistics import Estimate

Measured = TypeVar("Measured")
_WIDE = 200
"""Columns of a table: the terminal wraps one that is too wide, and no figure is cut."""


def scale_target(options: ScaleOptions) -> None:
    """Measure the speed-up, and print it with the laws fitted to it."""
    scaling = measured(scale, vars(options) | {"workers": _numbers(options.workers)})
    if options.as_json:
        print_json(scaling.plain())
    else:
        _print(scaling)


def measured(measure: Callable[..., Measured], options: dict[str, Any]) -> Measured:
    """The result of short runs with these options; their progress is printed on stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    others = {name: value for name, value in options.items() if name not in ("what", "output")}

    def tell(text: str) -> None:
        console.print(text, style="dim", markup=False)

    return measure(options["what"], **others, tell=tell)


def wide_console() -> Console:
    """A console on stdout for wide tables."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False, width=_WIDE)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--workers {text!r} is not a list of numbers. Write it like 1,2,4.") from error


def _print(scaling: Scaling) -> None:
    console = wide_console()
    kind = "weak scaling: the same batch per worker" if scaling.weak else "strong scaling: one batch, split"
    console.print(
        f"{scaling.strategy} on {scaling.target}, {kind}; runs of {scaling.steps:,} steps, {scaling.threads} thread(s) "
        f"per worker, {scaling.cores} cores; one worker runs {scaling.baseline}"
    )
    console.print(_table(scaling))
    if scaling.amdahl is not None:
        law = scaling.amdahl
        console.print(
            f"Amdahl   f = {law.f}: at most {law.limit} times as fast (extrapolated), half of it with {law.half} "
            f"workers ({scaling.kind(law.half.value)})"
        )
    if scaling.gunther is not None:
        law = scaling.gunther
        console.print(
            f"Gunther  sigma = {law.sigma}, kappa = {law.kappa}: peak at {law.peak} workers, {law.peak_speedup} times "
            f"as fast ({scaling.kind(law.peak.value)})"
        )
    console.print("Intervals are 90 % confidence intervals, if the law holds.", style="dim")
    for warning in scaling.warnings:
        console.print(f"Mind: {warning}", style="yellow")


def _table(scaling: Scaling) -> Table:
    table = figures(("workers", f"{scaling.unit}/s", "speed-up", "90 %", "efficiency"), names=0)
    table.add_column("", no_wrap=True)
    for point in scaling.points:
        notes = ["measured"] + ["too few cores"] * point.crowded + ["superlinear"] * point.superlinear
        table.add_row(
            str(point.workers),
            f"{point.rate:,.0f}" if point.rate >= 100 else f"{point.rate:.3g}",
            f"{point.speedup.value:.2f}",
            _ends(point.speedup) if point.workers > 1 else "",
            f"{100 * point.efficiency:.0f} %",
            ", ".join(notes),
        )
    for point in scaling.predicted:
        efficiency = f"{100 * point.speedup.value / point.workers:.0f} %"
        cells = (f"{point.speedup.value:.2f}", _ends(point.speedup), efficiency, "extrapolated")
        table.add_row(str(point.workers), "", *cells)
    return table


def _ends(speedup: Estimate) -> str:
    high = "no limit" if speedup.high == float("inf") else f"{speedup.high:.2f}"
    return f"{speedup.low:.2f} to {high}"
