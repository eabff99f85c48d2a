"""`offbeat draw`: a timeline as a picture, and the tables of its rounds and ports."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from offbeat import limits
from offbeat.cli.options import DrawOptions, TableFormat
from offbeat.cli.output import figures, print_json
from offbeat.draw import Scenario, picture, plain, port_rows, round_rows, subject_of, timeline_of
from offbeat.monitor.diagram.svg import check_name, write
from offbeat.simulate.network import Network
from offbeat.simulate.servers.stragglers import Stragglers
from offbeat.simulate.timeline import Timeline
from offbeat.simulate.units import parse_duration, parse_size, seconds_in_words, size_in_words
from offbeat.strategies import Combined

WORKERS, SIZE, ACTIVATIONS = 4, "100MB", "100KB"
"""Defaults: workers, bytes of a model, and bytes that a microbatch brings from one stage of a pipeline to the next."""
SHOWN = 60
"""Rows that are printed; JSON has all."""


def draw(options: DrawOptions) -> None:
    """Print who sends what to whom and when, and draw it if there is a file for it."""
    if options.picture is not None:
        check_name(options.picture)
    subject = subject_of(options.strategy, options.collective)
    replica = subject.replica_size if isinstance(subject, Combined) and subject.split else None
    workers = options.workers if options.workers is not None else replica or WORKERS
    size = options.size or (SIZE if replica is None else ACTIVATIONS)
    limits.whole("--workers", workers, limits.SIMULATED_RANKS)
    limits.whole("--per-host", options.per_host, limits.SIMULATED_RANKS)
    scenario = Scenario(
        tuple(worker // options.per_host for worker in range(workers)),
        Network.parse(options.network, options.inside),
        parse_size(size),
        options.steps,
        Stragglers.parse(options.stragglers, parse_duration(options.step)),
        options.seed,
        options.collective,
        options.microbatches,
    )
    timeline = timeline_of(options.strategy, scenario, subject)
    where = f"{len(scenario.hosts)} workers, {size}, {options.network}"
    subtitle = f"{where}: {seconds_in_words(timeline.end)} of virtual time"
    if options.picture is not None:
        write(picture(timeline, ". ".join((subtitle, *timeline.notes))), options.picture)
    if options.output is TableFormat.json:
        print_json({"picture": None if options.picture is None else str(options.picture), **plain(timeline)})
        return
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
    console.print(f"{timeline.title}: {subtitle}", style="bold")
    _print_tables(console, timeline)
    for note in timeline.notes:
        console.print(note)
    if options.picture is not None:
        console.print(f"Drawn: {options.picture}")


def _print_tables(console: Console, timeline: Timeline) -> None:
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
    ports = figures(("port", "sent", "received", "sending", "receiving", "computing", "waiting"))
    for port in port_rows(timeline)[:SHOWN]:
        times = (port.sending, port.receiving, port.computing, port.waiting)
        ports.add_row(port.name, *map(size_in_words, (port.sent, port.received)), *map(seconds_in_words, times))
    console.print(ports)
    if timeline.costs:
        console.print(f"Messages and bytes of {timeline.costs_of}:", style="bold")
        costs = figures(("from", "to", "messages", "bytes", "vectors"))
        for row in timeline.costs:
            numbers = (f"{row.messages:,}", f"{row.headers:,}", size_in_words(row.vectors) if row.vectors else "")
            costs.add_row(row.sender, row.receiver, *numbers)
        console.print(costs)
