"""`offbeat batch-size`: noise in gradients, and how large a batch may be, as tables."""

from __future__ import annotations

import math

from rich.table import Table

from offbeat.cli.commands.scale import measured, wide_console
from offbeat.cli.options import BatchSizeOptions, OutputFormat
from offbeat.cli.output import print_json
from offbeat.scaling import BatchSize, batch_size
from offbeat.statistics import Estimate


def measure_batch_size(asked: BatchSizeOptions) -> None:
    """Measure the noise, and print how large a batch may be."""
    found = measured(batch_size, vars(asked))
    if asked.output is OutputFormat.json:
        print_json(found.plain())
    else:
        _print(found)


def _print(found: BatchSize) -> None:
    console = wide_console()
    of = "" if found.examples is None else f" of {found.examples:,}"
    console.print(
        f"{found.target}, measured over {found.steps:,} steps of {found.batch:,.0f}{of} examples on {found.workers} "
        f"workers"
    )
    console.print(_table(found))
    last = found.stages[-1]
    share, batch = 1 / (1 + found.delta), found.largest(last)
    console.print(
        f"In the last stage a batch of up to {_count(batch)} makes almost proportional progress (an example counts "
        f"{100 * share:.0f} % of one alone): work for {_count(found.useful_workers(last))} workers with "
        f"{found.usual / found.workers:,.0f} examples each."
    )
    worth = found.worth(last)
    console.print(
        f"In the batch of {found.usual:,.0f} that it has, an example counts {100 * worth.value:.0f} % "
        f"[{100 * worth.low:.0f}, {100 * worth.high:.0f}]. Half is lost at {_count(found.largest(last, 1.0))}."
    )
    if found.ways:
        console.print()
        console.print("Ways to raise diversity, at the end of the run, by gradients of single examples:")
        console.print(_ways(found))
    for warning in found.warnings:
        console.print(f"Mind: {warning}", style="yellow")


def _table(found: BatchSize) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = ["steps", "noise scale [90 %]", *(["by examples"] if found.stages[0].checked is not None else [])]
    if found.examples is not None:
        columns.append("diversity")
    for name in (*columns, "largest batch", "workers"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in found.stages:
        cells = [f"{stage.first:,} to {stage.last:,}", _count(stage.noise)]
        if found.stages[0].checked is not None:
            cells.append("" if stage.checked is None else f"{stage.checked:,.0f}")
        diversity = found.diversity(stage)
        if diversity is not None:
            cells.append(f"{diversity.value:.3g}")
        table.add_row(*cells, _count(found.largest(stage)), _count(found.useful_workers(stage)))
    return table


def _ways(found: BatchSize) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("way", no_wrap=True)
    for name in ("n x diversity", "largest batch", "direction left"):
        table.add_column(name, justify="right", no_wrap=True)
    for way in found.ways:
        table.add_row(
            way.name, f"{way.diversity:,.1f}", f"{1 + found.delta * way.diversity:,.0f}", f"{100 * way.cosine:.0f} %"
        )
    return table


def _count(found: Estimate) -> str:
    return f"{_whole(found.value)} [{_whole(found.low)}, {_whole(found.high)}]"


def _whole(value: float) -> str:
    return "no limit" if math.isinf(value) else f"{value:,.0f}"
