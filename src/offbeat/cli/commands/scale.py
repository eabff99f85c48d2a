"""`offbeat scale`: measured speed-up, and the laws that it follows, as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from offbeat.cli.options import OutputFormat, ScaleOptions
from offbeat.cli.output import print_json
from offbeat.errors import UsageError
from offbeat.scaling import Scaling, scale
from offbeat.statistics import Estimate

Found = TypeVar("Found")
_WIDE = 200
"""Columns that a table may take: one that is too wide for the terminal is wrapped by it, rather than cut."""


def scale_target(asked: ScaleOptions) -> None:
    """Measure the speed-up, and print it with the laws that it follows."""
    found = measured(scale, vars(asked) | {"workers": _numbers(asked.workers)})
    if asked.output is OutputFormat.json:
        print_json(found.plain())
    else:
        _print(found)


def measured(measure: Callable[..., Found], options: dict[str, Any]) -> Found:
    """What short runs have shown, with what was asked for; how far they are is told on stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    chosen = {name: value for name, value in options.items() if name not in ("what", "output")}

    def tell(text: str) -> None:
        console.print(text, style="dim", markup=False)

    return measure(options["what"], **chosen, tell=tell)


def wide_console() -> Console:
    """Where results with wide tables are printed."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False, width=_WIDE)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--workers {text!r} is not a list of numbers. Write it like 1,2,4.") from error


def _print(found: Scaling) -> None:
    console = wide_console()
    kind = "weak scaling: as large a batch for each worker" if found.weak else "strong scaling: one batch, divided"
    console.print(
        f"{found.strategy} on {found.target}, {kind}; runs of {found.steps:,} steps, {found.threads} thread(s) a "
        f"worker, {found.cores} cores; one worker runs {found.baseline}"
    )
    console.print(_table(found))
    if found.amdahl is not None:
        law = found.amdahl
        console.print(
            f"Amdahl   f = {law.f}: at most {law.limit} times as fast (extrapolated), half of it with {law.half} "
            f"workers ({found.kind(law.half.value)})"
        )
    if found.gunther is not None:
        law = found.gunther
        console.print(
            f"Gunther  sigma = {law.sigma}, kappa = {law.kappa}: peak at {law.peak} workers, {law.peak_speedup} times "
            f"as fast ({found.kind(law.peak.value)})"
        )
    console.print("Intervals are such that 90 of 100 hold the truth, if the law does.", style="dim")
    for warning in found.warnings:
        console.print(f"Mind: {warning}", style="yellow")


def _table(found: Scaling) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("workers", f"{found.unit}/s", "speed-up", "90 %", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for point in found.points:
        notes = ["measured"] + ["too few cores"] * point.crowded + ["superlinear"] * point.superlinear
        table.add_row(
            str(point.workers),
            f"{point.rate:,.0f}" if point.rate >= 100 else f"{point.rate:.3g}",
            f"{point.speedup.value:.2f}",
            _ends(point.speedup) if point.workers > 1 else "",
            f"{100 * point.efficiency:.0f} %",
            ", ".join(notes),
        )
    for one in found.predicted:
        efficiency = f"{100 * one.speedup.value / one.workers:.0f} %"
        table.add_row(str(one.workers), "", f"{one.speedup.value:.2f}", _ends(one.speedup), efficiency, "extrapolated")
    return table


def _ends(found: Estimate) -> str:
    high = "no limit" if found.high == float("inf") else f"{found.high:.2f}"
    return f"{found.low:.2f} to {high}"
