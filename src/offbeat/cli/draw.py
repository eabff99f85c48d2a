"""`offbeat draw`: its options, and the tables that it prints. What is heavy is imported when it is called."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from offbeat.simulate.timeline import Timeline

EPILOG = (
    'Examples: offbeat draw "allreduce(ring)" --workers 8 -o ring.svg [dim]|[/dim] '
    'offbeat draw "server(consistency=ssp(3))" --size 10MB --steps 8 --stragglers "permanent(2)" -o ssp.png '
    '[dim]|[/dim] offbeat draw "all_gather(doubling)" --workers 6 --size 1MB [dim]|[/dim] '
    'offbeat draw "allreduce(hierarchical)" --hosts 2x4 -o hosts.svg [dim]|[/dim] offbeat draw mine.py:my_ring -w 5'
)
SHOWN = 60
"""Rows that are printed; JSON has all."""


class Output(StrEnum):
    """How the rounds are printed."""

    table = "table"
    json = "json"


def draw(
    strategy: Annotated[
        str,
        typer.Argument(
            help="What to draw: a strategy such as [bold]gossip(exponential)[/bold], "
            "[bold]server(consistency=asp)[/bold] or [bold]local(4) + topk(0.01)[/bold]; an algorithm of a collective, "
            "such as [bold]all_gather(ring)[/bold]; or a schedule or contract of machines of your own, "
            "[bold]mine.py:my_ring[/bold]."
        ),
    ],
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", help="How many take part. Default: 4, or the hosts'.")
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            help="Between hosts: rate and latency, e.g. [bold]10Gbit,50us[/bold]; a third part such as "
            "[bold]8GB/s[/bold] says how fast numbers are added up."
        ),
    ] = "10Gbit,50us",
    inside: Annotated[
        str | None, typer.Option(help="Inside a host, written the same. Default: [bold]100Gbit,1us[/bold].")
    ] = None,
    size: Annotated[str, typer.Option(help="Bytes of the model, or of a collective's buffer.")] = "100MB",
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HxW", help="Hosts times workers on each, e.g. [bold]2x4[/bold]. Default: a host for each worker."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to draw. Default: one turn of what is exchanged.")] = None,
    step: Annotated[str, typer.Option(help="What an undisturbed step takes to compute.")] = "40ms",
    stragglers: Annotated[
        str,
        typer.Option(
            help="What makes steps longer, as in `offbeat bench server`: [bold]permanent(2)[/bold], "
            "[bold]transient(0.2, 0.15)[/bold] …"
        ),
    ] = "none",
    collective: Annotated[
        str | None, typer.Option(help="What a schedule of your own is to achieve. Default: all_reduce.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of stragglers, and of machines' chance.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Draw it here: .svg, or .png (which needs matplotlib)."),
    ] = None,
    output: Annotated[
        Output, typer.Option("--format", help="[bold]json[/bold] prints every round, message and interval.")
    ] = Output.table,
) -> None:
    """Draw who sends what to whom when, port by port: any schedule, or a simulated run of servers or machines.

    The same text is drawn here that processes run: schedules and machines of `protocols`, in virtual time.
    """
    from offbeat.cli.output import print_json
    from offbeat.drawing import Scenario, picture, plain, timeline_of
    from offbeat.monitor.diagram.picture import check_name, write
    from offbeat.simulate.network import Network
    from offbeat.simulate.stragglers import Stragglers
    from offbeat.simulate.units import parse_duration, parse_size, seconds_in_words

    if out is not None:
        check_name(out)
    setting = Scenario(
        hosts_of(hosts, workers),
        Network.parse(network, inside),
        parse_size(size),
        steps,
        Stragglers.parse(stragglers, parse_duration(step)),
        seed,
        collective,
    )
    timeline = timeline_of(strategy, setting)
    subtitle = f"{len(setting.hosts)} workers, {size}, {network}: {seconds_in_words(timeline.end)} of virtual time"
    if out is not None:
        write(picture(timeline, subtitle), out)
    if output is Output.json:
        print_json({"picture": None if out is None else str(out), **plain(timeline)})
        return
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
    console.print(f"{timeline.title}: {subtitle}", style="bold")
    _print_tables(console, timeline)
    if out is not None:
        console.print(f"Drawn: {out}")


def hosts_of(text: str | None, workers: int | None) -> tuple[int, ...]:
    """The host of each worker, from `2x4` or from their number alone."""
    if text is None:
        count = 4 if workers is None else workers
        from offbeat import limits

        limits.whole("--workers", count, limits.SIMULATED_RANKS)
        return tuple(range(count))
    match = re.fullmatch(r"\s*(\d{1,5})\s*x\s*(\d{1,5})\s*", text)
    if match is None or not (int(match[1]) and int(match[2])):
        raise UsageError(f"--hosts {text!r} is not a number of hosts times workers on each: write it like 2x4.")
    count, each = int(match[1]), int(match[2])
    if workers is not None and workers != count * each:
        raise UsageError(
            f"--hosts {text} has {count * each} workers, and --workers {workers} were asked for: give one."
        )
    return tuple(number // each for number in range(count * each))


def _print_tables(console: Console, timeline: Timeline) -> None:
    from rich.table import Table

    from offbeat.drawing import port_rows, round_rows
    from offbeat.simulate.units import seconds_in_words, size_in_words

    columns, rows = round_rows(timeline)
    rounds = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        rounds.add_column(
            column, no_wrap=True, justify="right" if column in ("round", "bytes each", "bytes") else "left"
        )
    for row in rows[:SHOWN]:
        rounds.add_row(*row)
    console.print(rounds)
    if len(rows) > SHOWN:
        console.print(f"… {len(rows) - SHOWN:,} more; --format json has all.", style="dim")
    ports = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("port", "sent", "received", "sending", "receiving", "computing", "waiting"):
        ports.add_column(column, no_wrap=True, justify="left" if column == "port" else "right")
    for one in port_rows(timeline)[:SHOWN]:
        times = (one.sending, one.receiving, one.computing, one.waiting)
        ports.add_row(one.name, *map(size_in_words, (one.sent, one.received)), *map(seconds_in_words, times))
    console.print(ports)
