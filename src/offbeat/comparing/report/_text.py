"""A league as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json

from offbeat.comparing._asked import Asked
from offbeat.comparing._league import League
from offbeat.comparing._rows import Row
from offbeat.comparing.report import _cells as cells
from offbeat.runtime.stopwatch import KINDS


def json_of(league: League) -> str:
    """Everything."""
    return json.dumps(league.plain(), indent=1, default=str, allow_nan=False) + "\n"


def markdown(league: League) -> str:
    """The verdict, the table and how it came about."""
    head = (
        "strategy",
        "rate",
        "to target, s",
        "vs ddp",
        "reached",
        "steps",
        "ms/step",
        "samples",
        "sent, MB",
        "by the kernel, MB",
    )
    head = (*head, "core-s", "speed-up", "test", "where the time went", "")
    lines = [f"# {_title(league)}", ""]
    lines += [f"{words}  " for words in league.outcome.words]
    lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in league.rows:
        lines.append(f"| {' | '.join(_markdown_row(league, row))} |")
    lines += [
        "",
        *(f"- {words}" for words in [*cells.fine_print(league), *cells.problems(league), *provenance(league)]),
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(league: League, row: Row) -> list[str]:
    return [
        f"`{row.name}`",
        f"x{row.factor:g}",
        cells.with_interval(row.time),
        cells.with_interval(row.relative),
        cells.reached(row),
        cells.NONE if row.steps is None else f"{row.steps:.0f}",
        cells.milliseconds(row.step_seconds),
        cells.NONE if row.samples is None else f"{row.samples:,.0f}",
        cells.megabytes(row.bytes_sent),
        cells.megabytes(row.kernel_bytes),
        cells.short(row.core_seconds),
        cells.with_interval(row.speedup),
        cells.NONE if row.test_score is None else f"{row.test_score:.4g}",
        cells.split(row.seconds_by_kind),
        cells.place(league, row),
    ]


def csv_of(league: League) -> str:
    """One line for each contestant, numbers as they are; what is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    plain = (
        "steps",
        "step_seconds",
        "samples",
        "bytes_sent",
        "kernel_bytes",
        "core_seconds",
        "startup_seconds",
        "score",
        "test_score",
    )
    spreads = ("time", "relative", "speedup")
    writer.writerow(
        ["strategy", "part", "workers", "rate_factor", "runs", "reached"]
        + [f"{name}_{end}" for name in spreads for end in ("median", "low", "high")]
        + [*plain, *(f"{kind}_seconds" for kind in KINDS), "place", "failures"]
    )
    for row in league.rows:
        told = row.plain()
        ends = [(told[name] or {}).get(end) for name in spreads for end in ("median", "low", "high")]
        kinds = [(row.seconds_by_kind or {}).get(kind) for kind in KINDS]
        numbers = [*ends, *(told[name] for name in plain), *kinds]
        writer.writerow(
            [row.name, row.part.value, row.workers, row.factor, row.runs, row.reached]
            + ["" if value is None else value for value in numbers]
            + [cells.place(league, row), " / ".join(row.failures)]
        )
    return text.getvalue()


def provenance(league: League) -> list[str]:
    """What is needed to repeat it."""
    facts = league.facts
    known = facts["environment"]
    data = facts["data"]
    return [
        f"Commit {facts['commit'] or 'unknown (no repository)'}; offbeat {known['offbeat']}, torch {known['torch']}, "
        f"numpy {known['numpy']}, Python {known['python']}; {known['processor']}, {known['cores']} cores, "
        f"{known['platform']}; begun {known['started']}.",
        f"Data {data['hash'] or 'unknown'}: hash of {data['of']}.",
        f"Again: `{Asked.from_plain(league.asked).command()}`",
    ]


def _title(league: League) -> str:
    what = league.asked["what"]
    name = what["script"] if "script" in what else what["task"]["source"]
    return f"League of {name}, {league.asked['workers']} workers"
