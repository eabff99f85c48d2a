"""A league as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json

from offbeat.league._league import League
from offbeat.league._records import HOSTS_FILE
from offbeat.league._settings import LeagueSettings
from offbeat.league.report import _cells as cells
from offbeat.runtime.run.stopwatch import KINDS


def json_of(league: League) -> str:
    """Everything."""
    return json.dumps(league.plain(), indent=1, default=str, allow_nan=False) + "\n"


def markdown(league: League) -> str:
    """The verdict, the table and how it came about."""
    rows = [
        cells.full_row(league, row) | {"where the time went": cells.split(row.seconds_by_kind)} for row in league.rows
    ]
    head = list(rows[0])
    lines = [f"# {_title(league)}", "", *(f"{words}  " for words in league.outcome.words)]
    lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(row.values())} |" for row in rows]
    notes = [*cells.fine_print(league), *cells.problems(league), *provenance(league)]
    return "\n".join([*lines, "", *(f"- {words}" for words in notes)]) + "\n"


_PLAIN = (
    *("steps", "step_seconds", "samples", "bytes_sent", "kernel_bytes"),
    *("core_seconds", "startup_seconds", "score", "test_score"),
)


def csv_of(league: League) -> str:
    """One line for each contestant, numbers as they are; what is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spreads = ("time", "relative", "speedup")
    writer.writerow(
        ["strategy", "part", "workers", "rate_factor", "runs", "reached"]
        + [f"{name}_{end}" for name in spreads for end in ("median", "low", "high")]
        + [*_PLAIN, *(f"{kind}_seconds" for kind in KINDS), "place", "failures"]
    )
    for row in league.rows:
        told = row.plain()
        ends = [(told[name] or {}).get(end) for name in spreads for end in ("median", "low", "high")]
        kinds = [(row.seconds_by_kind or {}).get(kind) for kind in KINDS]
        numbers = [*ends, *(told[name] for name in _PLAIN), *kinds]
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
        f"Again: `{LeagueSettings.from_plain(league.asked).command(str(league.folder / HOSTS_FILE))}`",
    ]


def _title(league: League) -> str:
    what = league.asked["what"]
    name = what["script"] if "script" in what else what["task"]["source"]
    return f"League of {name}, {league.asked['workers']} workers"
