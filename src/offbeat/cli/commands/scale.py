"""`offbeat scale` and `offbeat batch-size`: what short runs measured, and what follows from it, as tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from offbeat.cli.options import BatchSizeOptions, ScaleOptions
from offbeat.cli.output import figures, print_json
from offbeat.errors import UsageError
from offbeat.scaling import BatchSize, Scaling, batch_size, scale
from offbeat.statistics import Estimate

Measured = TypeVar("Measured")
_WIDE = 200  # Columns of a table: the terminal wraps one that is too wide, and no figure is cut.


def scale_target(options: ScaleOptions) -> None:
    """Measure the speed-up, and print it with the laws fitted to it."""
    scaling = _measured(scale, vars(options) | {"workers": _numbers(options.workers)})
    if options.as_json:
        print_json(scaling.plain())
    else:
        print_scaling(scaling)


def _measured(measure: Callable[..., Measured], options: dict[str, Any]) -> Measured:
    """The result of short runs with these options; their progress is printed on stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    others = {name: value for name, value in options.items() if name not in ("what", "output")}

    def tell(text: str) -> None:
        console.print(text, style="dim", markup=False)

    return measure(options["what"], **others, tell=tell)


def _wide_console() -> Console:
    """A console on stdout for wide tables."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False, width=_WIDE)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--workers {text!r} is not a list of numbers. Write it like 1,2,4.") from error


def print_scaling(scaling: Scaling) -> None:
    """Print a table of speed-ups, and the laws."""
    console = _wide_console()
    kind = "weak scaling: the same batch per worker" if scaling.weak else "strong scaling: one batch, split"
    console.print(
        f"{scaling.strategy} on {scaling.target}, {kind}; runs of {scaling.steps:,} steps, {scaling.threads} thread(s) "
        f"per worker, {scaling.cores} cores; one worker runs {scaling.baseline}"
    )
    console.print(_scale_table(scaling))
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


def _scale_table(scaling: Scaling) -> Table:
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


def measure_batch_size(options: BatchSizeOptions) -> None:
    """Measure the noise scale, and print how large a batch may be."""
    result = _measured(batch_size, vars(options))
    if options.as_json:
        print_json(result.plain())
    else:
        print_batch_size(result)


def print_batch_size(result: BatchSize) -> None:
    """Print a table of the stages of the run, and what the last one means."""
    console = _wide_console()
    of = "" if result.examples is None else f" of {result.examples:,}"
    console.print(
        f"{result.target}, measured over {result.steps:,} steps of {result.batch:,.0f}{of} examples on "
        f"{result.workers} workers"
    )
    console.print(_stage_table(result))
    last = result.stages[-1]
    share, batch = 1 / (1 + result.delta), result.largest(last)
    console.print(
        f"In the last stage a batch of up to {_count(batch)} makes almost proportional progress (an example counts "
        f"{100 * share:.0f} % of one alone): work for {_count(result.useful_workers(last))} workers with "
        f"{result.usual / result.workers:,.0f} examples each."
    )
    worth = result.worth(last)
    console.print(
        f"In its own batch of {result.usual:,.0f}, an example counts {100 * worth.value:.0f} % "
        f"[{100 * worth.low:.0f}, {100 * worth.high:.0f}]. Half is lost at {_count(result.largest(last, 1.0))}."
    )
    if result.ways:
        console.print()
        console.print("Ways to raise diversity, by per-example gradients at the end of the run:")
        console.print(_ways(result))
    for warning in result.warnings:
        console.print(f"Mind: {warning}", style="yellow")


def _stage_table(result: BatchSize) -> Table:
    columns = ["steps", "noise scale [90 %]", *(["by examples"] if result.stages[0].checked is not None else [])]
    if result.examples is not None:
        columns.append("diversity")
    table = figures((*columns, "largest batch", "workers"), names=0)
    for stage in result.stages:
        cells = [f"{stage.first:,} to {stage.last:,}", _count(stage.noise)]
        if result.stages[0].checked is not None:
            cells.append("" if stage.checked is None else f"{stage.checked:,.0f}")
        diversity = result.diversity(stage)
        if diversity is not None:
            cells.append(f"{diversity.value:.3g}")
        table.add_row(*cells, _count(result.largest(stage)), _count(result.useful_workers(stage)))
    return table


def _ways(result: BatchSize) -> Table:
    table = figures(("way", "n x diversity", "largest batch", "direction left"))
    for way in result.ways:
        table.add_row(
            way.name, f"{way.diversity:,.1f}", f"{1 + result.delta * way.diversity:,.0f}", f"{100 * way.cosine:.0f} %"
        )
    return table


def _count(estimate: Estimate) -> str:
    return f"{_whole(estimate.value)} [{_whole(estimate.low)}, {_whole(estimate.high)}]"


def _whole(value: float) -> str:
    return "no limit" if math.isinf(value) else f"{value:,.0f}"
