"""A comparison as a table for a terminal, as Markdown, CSV and JSON; cells and notes that all reports share."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence

from rich.table import Table

from offbeat.errors import StrategyError
from offbeat.league._contestants import EntryReason
from offbeat.league._league import HOSTS_FILE, League
from offbeat.league._rows import LeagueRow
from offbeat.league._settings import LeagueSettings
from offbeat.runtime.run.report import kinds_in_words
from offbeat.runtime.run.stopwatch import BUBBLE, KINDS
from offbeat.statistics import Spread
from offbeat.strategies import combined, parse_built_in
from offbeat.strategies.federated.strategy import Federated

NEVER = "missed"
NONE = "-"
WIDTH = 100
"""Columns of the terminal table."""
_SPREADS = ("time", "relative", "speedup")
_PLAIN = (
    *("steps", "step_seconds", "samples", "bytes_sent", "kernel_bytes"),
    *("core_seconds", "startup_seconds", "score", "test_score", "epsilon", "client_seconds"),
)


def table(league: League) -> Table:
    """Contestants that can win by time, then the baseline's copy and one worker alone.

    The privacy that they spend takes the place of the share of exchanges, as there is no room for both.
    """
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", width=WIDTH)
    shown.add_column("strategy", overflow="fold", max_width=27)
    last = "epsilon" if is_private(league) else "exch."
    for heading in ("to target, s", "vs ddp", "reached", "steps", "ms/step", "sent, MB", last, "speed-up", ""):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in league.rows:
        shown.add_row(
            row.name.replace("[", "\\["),
            with_interval(row.time),
            with_interval(row.relative),
            f"{row.reached}/{row.runs}",
            NONE if row.steps is None else f"{row.steps:.0f}",
            short(row.step_seconds, 1e3),
            short(row.bytes_sent if row.workers > 1 else None, 1e-6),
            short(row.epsilon) if is_private(league) else f"{100 * row.share('communicate', 'wait'):.0f} %",
            short(None if row.speedup is None else row.speedup.median),
            place(league, row),
            style="bold green" if row.name == league.winner else "" if row.part.eligible else "dim",
        )
    return shown


def json_of(league: League) -> str:
    """Everything."""
    return json.dumps(league.plain(), indent=1, default=str, allow_nan=False) + "\n"


def markdown(league: League) -> str:
    """The verdict, the table and how the figures were measured."""
    rows = [
        full_row(league, row) | {"where the time went": kinds_in_words(row.seconds_by_kind or {}) or NONE}
        for row in league.rows
    ]
    title = f"# Comparison on {league.subject}, {league.asked['workers']} workers"
    lines = [title, "", *(f"{words}  " for words in league.outcome.words)]
    lines += ["", f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    lines += [f"| {' | '.join(row.values())} |" for row in rows]
    notes = [*fine_print(league), *problems(league), *provenance(league)]
    return "\n".join([*lines, "", *(f"- {words}" for words in notes)]) + "\n"


def csv_of(league: League) -> str:
    """One line for each contestant, with unrounded numbers; unknown ones are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = (*KINDS, BUBBLE) if any(BUBBLE in (row.seconds_by_kind or {}) for row in league.rows) else KINDS
    ends = [(name, end) for name in _SPREADS for end in ("median", "low", "high")]
    writer.writerow(
        ["strategy", "part", "workers", "rate_factor", "runs", "reached"]
        + [f"{name}_{end}" for name, end in ends]
        + [*_PLAIN, *(f"{kind}_seconds" for kind in known), "place", "failures"]
    )
    for row in league.rows:
        plain = row.plain()
        numbers = [(plain[name] or {}).get(end) for name, end in ends] + [plain[name] for name in _PLAIN]
        numbers += [(row.seconds_by_kind or {}).get(kind) for kind in known]
        writer.writerow(
            [row.name, row.part.value, row.workers, row.factor, row.runs, row.reached]
            + ["" if value is None else value for value in numbers]
            + [place(league, row), " / ".join(row.failures)]
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


def with_interval(spread: Spread | None) -> str:
    """`0.61 (0.55-0.70)`, or `missed` if most runs missed the target."""
    if spread is None:
        return NONE
    if math.isinf(spread.median):
        return NEVER
    if spread.low == spread.high:
        return short(spread.median)
    high = "∞" if math.isinf(spread.high) else short(spread.high)
    return f"{short(spread.median)} ({short(spread.low)}-{high})"


def short(value: float | None, unit: float = 1.0) -> str:
    """A value times `unit` with three digits."""
    if value is None:
        return NONE
    value *= unit
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def place(league: League, row: LeagueRow) -> str:
    """`won`, `tie` or nothing."""
    if row.name == league.winner:
        return "tie" if league.ties else "won"
    return "tie" if row.name in league.ties else ""


def full_row(league: League, row: LeagueRow) -> dict[str, str]:
    """Every column that a page has room for, by its heading."""
    return {
        "strategy": row.name,
        "rate": f"x{row.factor:g}",
        "to target, s": with_interval(row.time),
        "vs ddp": with_interval(row.relative),
        "reached": f"{row.reached} of {row.runs}",
        "steps": NONE if row.steps is None else f"{row.steps:.0f}",
        "ms/step": short(row.step_seconds, 1e3),
        "samples": NONE if row.samples is None else f"{row.samples:,.0f}",
        "sent, MB": short(row.bytes_sent, 1e-6),
        "kernel, MB": short(row.kernel_bytes, 1e-6),
        "core-s": short(row.core_seconds),
        "speed-up": with_interval(row.speedup),
        "test": NONE if row.test_score is None else f"{row.test_score:.4g}",
        **({"epsilon": short(row.epsilon)} if is_private(league) else {}),
        "": place(league, row),
    }


def is_private(league: League) -> bool:
    """Whether any contestant accounts for privacy."""
    return any(row.epsilon is not None for row in league.rows)


def problems(league: League) -> list[str]:
    """Strategies that could not take part or whose runs failed, with the reason."""
    notes = [f"{name} cannot be used here: {reason}" for name, reason in league.refused.items()]
    for row in league.rows:
        gone = " It was not run again." if row.name in league.given_up else ""
        for reason in row.failures:
            line = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
            notes.append(f"{row.name} failed: {line if len(line) <= 300 else line[:297] + '...'}{gone}")
    spared: dict[str, list[str]] = {}
    for contestant in league.contestants:
        for sentence in contestant.left_out:
            spared.setdefault(sentence, []).append(contestant.name)
    notes += [f"No such process, so not disturbed by {text!r}: {', '.join(names)}." for text, names in spared.items()]
    return notes


def fine_print(league: League) -> list[str]:
    """How the figures were measured: seeds, tuning, resolution, start-up, noise."""
    tuning, seeds = league.tuning, league.seeds
    names = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else ", ".join(map(str, seeds)) or "none"
    notes = [
        f"Target {league.target} on validation data; {league.asked['workers']} workers; seeds {names}, the same for "
        f"all: initial model, order of data. Runs took turns.",
        "Times are training time with evaluations, from measured runs; medians over seeds with 95 % bootstrap "
        "intervals. A run that missed the target counts as infinitely long. vs ddp: seed by seed, so that a seed's "
        "luck cancels.",
    ]
    if tuning["runs"]:
        chosen = ", ".join(f"{name} x{factor:g}" for name, factor in tuning["chosen"].items())
        notes.append(
            f"Learning rates times {', '.join(f'{factor:g}' for factor in tuning['grid'])} were tried on a separate "
            f"seed ({tuning['runs']} runs, {tuning['seconds']:.0f} s): {chosen}."
        )
    else:
        notes.append("Learning rates were not tuned: all strategies used the given one.")
    gaps = [row.resolution for row in league.rows if row.resolution]
    if gaps:
        steps, apart = (_range([gap[i] for gap in gaps], form) for i, form in enumerate((".0f", ".2f")))
        notes.append(f"Evaluated every {steps} steps, {apart} s apart: a time to target is no finer.")
    notes += [note for row in league.rows for note in _of_rounds(row, league.rows)]
    startups = [row.startup_seconds for row in league.rows if row.startup_seconds is not None]
    if startups:
        notes.append(f"Start-up is not counted: {min(startups):.2f} to {max(startups):.2f} s a run.")
    return notes


def _of_rounds(row: LeagueRow, rows: Sequence[LeagueRow]) -> Iterator[str]:
    """What the figures of a federated contestant are about: rounds, clients and their links."""
    try:
        exchange = combined(parse_built_in(row.strategy)).exchange
    except StrategyError:  # A user-defined strategy: reading a comparison must not run the code that its file names.
        return
    if not isinstance(exchange, Federated) or row.samples is None:
        return
    base = next((other for other in rows if other.part is EntryReason.baseline and other.samples), None)
    against = "" if base is None else f" against {base.samples:,.0f} of {base.name} in {base.steps:,.0f} steps"
    yield (
        f"{row.name}: a step is a round of about {exchange.plan().needed:,} clients, {row.samples:,.0f} examples in "
        f"{row.steps:,.0f} rounds{against}; sent is what clients and server would send each other; seconds are those "
        f"of the workers, which simulate the clients."
    )
    if exchange.speeds is not None and row.client_seconds is not None:
        until = "to the target" if row.reached > row.runs / 2 else "until its end"
        yield f"{row.name}: in the clients' own, simulated time it took {row.client_seconds:,.4g} s {until}."


def _range(values: list[float], form: str) -> str:
    """`19`, or `0.31 to 2.04`."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))
