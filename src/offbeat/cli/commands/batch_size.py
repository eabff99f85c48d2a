"""`offbeat batch-size`: the gradient noise scale, and how large a batch may be, as tables."""

from __future__ import annotations

import math

from rich.table import Table

from offbeat.cli.commands.scale import measured, wide_console
from offbeat.cli.options import BatchSizeOptions
from offbeat.cli.output import figures, print_json
from offbeat.scaling import BatchSize, batch_size
from offbeat.statistics import Estimate


def measure_batch_size(options: BatchSizeOptions) -> None:
    """Measure the noise scale, and print how large a batch may be."""
    result = measured(batch_size, vars(options))
    if options.as_json:
        print_json(result.plain())
    else:
        _print(result)


def _print(result: BatchSize) -> None:
    console = wide_console()
    of = "" if result.examples is None else f" of {result.examples:,}"
    console.print(
        f"{result.target}, measured over {result.steps:,} steps of {result.batch:,.0f}{of} examples on "
        f"{result.workers} workers"
    )
    console.print(_table(result))
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


def _table(result: BatchSize) -> Table:
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
