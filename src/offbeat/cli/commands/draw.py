"""`offbeat draw`, and the tables that it prints. What is heavy is imported when it is called."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from offbeat.cli.from_settings import command_from
from offbeat.cli.options import DrawOptions, TableFormat
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


@command_from(DrawOptions, leading=("workers", "network", "size", "hosts"))
def draw(given: dict[str, Any]) -> None:
    """Draw who sends what to whom and when: any strategy or schedule, or a simulated run of servers or machines.

    The same text is drawn here that processes run: schedules and machines of `protocols`, in virtual time.
    """
    from offbeat.cli.output import print_json
    from offbeat.draw import Scenario, picture, plain, timeline_of
    from offbeat.monitor.diagram.svg import check_name, write
    from offbeat.simulate.network import Network
    from offbeat.simulate.servers.stragglers import Stragglers
    from offbeat.simulate.units import parse_duration, parse_size, seconds_in_words

    asked = DrawOptions(**given)
    if asked.out is not None:
        check_name(asked.out)
    scenario = Scenario(
        hosts_of(asked.hosts, asked.workers),
        Network.parse(asked.network, asked.inside),
        parse_size(asked.size),
        asked.steps,
        Stragglers.parse(asked.stragglers, parse_duration(asked.step)),
        asked.seed,
        asked.collective,
    )
    timeline = timeline_of(asked.strategy, scenario)
    where = f"{len(scenario.hosts)} workers, {asked.size}, {asked.network}"
    subtitle = f"{where}: {seconds_in_words(timeline.end)} of virtual time"
    if asked.out is not None:
        write(picture(timeline, subtitle), asked.out)
    if asked.output is TableFormat.json:
        print_json({"picture": None if asked.out is None else str(asked.out), **plain(timeline)})
        return
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
    console.print(f"{timeline.title}: {subtitle}", style="bold")
    _print_tables(console, timeline)
    if asked.out is not None:
        console.print(f"Drawn: {asked.out}")


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

    from offbeat.draw import port_rows, round_rows
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
