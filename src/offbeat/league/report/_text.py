"""A comparison as a table for a terminal, as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json

from rich.table import Table

from offbeat.league._league import League
from offbeat.league._records import HOSTS_FILE
from offbeat.league._settings import LeagueSettings
from offbeat.league.report import _cells as cells
from offbeat.runtime.run.stopwatch import KINDS

WIDTH = 100
"""Columns of the terminal table."""
_SPREADS = ("time", "relative", "speedup")
_PLAIN = (
    *("steps", "step_seconds", "samples", "bytes_sent", "kernel_bytes"),
    *("core_seconds", "startup_seconds", "score", "test_score"),
)


def table(league: League) -> Table:
    """Contestants that can win by time, then the baseline's copy and one worker alone."""
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", width=WIDTH)
    shown.add_column("strategy", overflow="fold", max_width=27)
    for heading in ("to target, s", "vs ddp", "reached", "steps", "ms/step", "sent, MB", "exch.", "speed-up", ""):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in league.rows:
        shown.add_row(
            row.name.replace("[", "\\["),
            cells.with_interval(row.time),
            cells.with_interval(row.relative),
            f"{row.reached}/{row.runs}",
            cells.NONE if row.steps is None else f"{row.steps:.0f}",
            cells.short(row.step_seconds, 1e3),
            cells.short(row.bytes_sent if row.workers > 1 else None, 1e-6),
            f"{100 * row.share('communicate', 'wait'):.0f} %",
            cells.short(None if row.speedup is None else row.speedup.median),
            cells.place(league, row),
            style="bold green" if row.name == league.winner else "" if row.part.eligible else "dim",
        )
    return shown


def json_of(league: League) -> str:
    """Everything."""
    return json.dumps(league.plain(), indent=1, default=str, allow_nan=False) + "\n"


def markdown(league: League) -> str:
    """The verdict, the table and how the figures were measured."""
    rows = [
        cells.full_row(league, row) | {"where the time went": cells.split(row.seconds_by_kind)} for row in league.rows
    ]
    title = f"# Comparison on {league.subject}, {league.asked['workers']} workers"
    lines = [title, "", *(f"{words}  " for words in league.outcome.words)]
    lines += ["", f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    lines += [f"| {' | '.join(row.values())} |" for row in rows]
    notes = [*cells.fine_print(league), *cells.problems(league), *provenance(league)]
    return "\n".join([*lines, "", *(f"- {words}" for words in notes)]) + "\n"


def csv_of(league: League) -> str:
    """One line for each contestant, with unrounded numbers; unknown ones are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ends = [(name, end) for name in _SPREADS for end in ("median", "low", "high")]
    writer.writerow(
        ["strategy", "part", "workers", "rate_factor", "runs", "reached"]
        + [f"{name}_{end}" for name, end in ends]
        + [*_PLAIN, *(f"{kind}_seconds" for kind in KINDS), "place", "failures"]
    )
    for row in league.rows:
        plain = row.plain()
        numbers = [(plain[name] or {}).get(end) for name, end in ends] + [plain[name] for name in _PLAIN]
        numbers += [(row.seconds_by_kind or {}).get(kind) for kind in KINDS]
        writer.writerow(
            [row.name, row.part.value, row.workers, row.factor, row.runs, row.reached]
            + ["" if value is None else value for value in numbers]
            + [cells.place(league, row), " / ".join(row.failures)]
        )
    return text.getvalue()


def provenance(league: League) -> list[str]:
    """What is needed to repeat the comparison."""
    facts = league.facts
    known, data = facts["environment"], facts["data"]
    return [
        f"Commit {facts['commit'] or 'unknown (no repository)'}; offbeat {known['offbeat']}, torch {known['torch']}, "
        f"numpy {known['numpy']}, Python {known['python']}; {known['processor']}, {known['cores']} cores, "
        f"{known['platform']}; begun {known['started']}.",
        f"Data {data['hash'] or 'unknown'}: hash of {data['of']}.",
        f"Repeat with: `{LeagueSettings.from_plain(league.asked).command(str(league.folder / HOSTS_FILE))}`",
    ]
