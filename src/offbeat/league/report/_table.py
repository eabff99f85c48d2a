"""The table of a league on a terminal, no wider than 100 columns."""

from __future__ import annotations

from rich.table import Table

from offbeat.league._contestants import EntryReason
from offbeat.league._league import League
from offbeat.league.report import _cells as cells

WIDTH = 100


def table(league: League) -> Table:
    """Who can win by time, then the copy of the baseline and one worker alone."""
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", width=WIDTH)
    shown.add_column("strategy", overflow="fold", max_width=27)
    for heading in ("to target, s", "vs ddp", "reached", "steps", "ms/step", "sent, MB", "exch.", "speed-up", ""):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in league.rows:
        sent = row.bytes_sent if row.workers > 1 else None
        shown.add_row(
            row.name.replace("[", "\\["),
            cells.with_interval(row.time),
            cells.with_interval(row.relative),
            f"{row.reached}/{row.runs}",
            cells.NONE if row.steps is None else f"{row.steps:.0f}",
            cells.milliseconds(row.step_seconds),
            cells.megabytes(sent),
            cells.percent(row.share("communicate", "wait")),
            cells.short(None if row.speedup is None else row.speedup.median),
            cells.place(league, row),
            style=_style(league, row.name, row.part),
        )
    return shown


def _style(league: League, name: str, part: EntryReason) -> str:
    if name == league.winner:
        return "bold green"
    return "dim" if part in (EntryReason.again, EntryReason.single) else ""
