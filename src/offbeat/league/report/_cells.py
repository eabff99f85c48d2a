"""Cells and notes that all reports share."""

from __future__ import annotations

import math
from collections.abc import Mapping

from offbeat.league._league import League
from offbeat.league._rows import LeagueRow
from offbeat.statistics import Spread

NEVER = "missed"
NONE = "-"


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


def split(seconds: Mapping[str, float] | None) -> str:
    """`compute 61 %, communicate 20 %`, the largest first."""
    if not seconds:
        return NONE
    total = sum(seconds.values()) or 1.0
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {100 * spent / total:.0f} %" for kind, spent in ranked if spent / total >= 0.005)


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
        "": place(league, row),
    }


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
    startups = [row.startup_seconds for row in league.rows if row.startup_seconds is not None]
    if startups:
        notes.append(f"Start-up is not counted: {min(startups):.2f} to {max(startups):.2f} s a run.")
    return notes


def _range(values: list[float], form: str) -> str:
    """`19`, or `0.31 to 2.04`."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))
