"""Figures as short as they can be said, the same in every report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from offbeat.league._league import League
from offbeat.league._rows import LeagueRow
from offbeat.statistics import Spread

NEVER = "missed"
NONE = "-"


def with_interval(found: Spread | None) -> str:
    """`0.61 (0.55-0.70)`; what was missed by most is said so."""
    if found is None:
        return NONE
    if math.isinf(found.median):
        return NEVER
    if found.low == found.high:
        return short(found.median)
    high = "∞" if math.isinf(found.high) else short(found.high)
    return f"{short(found.median)} ({short(found.low)}-{high})"


def short(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return NONE
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def megabytes(value: float | None) -> str:
    """Bytes, in megabytes."""
    return NONE if value is None else short(value / 1e6)


def milliseconds(value: float | None) -> str:
    """Seconds, in milliseconds."""
    return NONE if value is None else short(1e3 * value)


def percent(share: float) -> str:
    """A share of the whole."""
    return f"{100 * share:.0f} %"


def place(league: League, row: LeagueRow) -> str:
    """`1st`, `tie` or nothing."""
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
        "ms/step": milliseconds(row.step_seconds),
        "samples": NONE if row.samples is None else f"{row.samples:,.0f}",
        "sent, MB": megabytes(row.bytes_sent),
        "kernel, MB": megabytes(row.kernel_bytes),
        "core-s": short(row.core_seconds),
        "speed-up": with_interval(row.speedup),
        "test": NONE if row.test_score is None else f"{row.test_score:.4g}",
        "": place(league, row),
    }


def problems(league: League) -> list[str]:
    """Who could not take part, and whose runs failed, with the reason."""
    said = [f"{name} cannot be used here: {reason}" for name, reason in league.refused.items()]
    for row in league.rows:
        gone = " It was not run again." if row.name in league.given_up else ""
        said += [f"{row.name} failed: {_first_line(reason)}{gone}" for reason in row.failures]
    spared: dict[str, list[str]] = {}
    for one in league.contestants:
        for sentence in one.left_out:
            spared.setdefault(sentence, []).append(one.name)
    said += [f"No such process, so not disturbed by {text!r}: {', '.join(names)}." for text, names in spared.items()]
    return said


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return line if len(line) <= 300 else line[:297] + "..."


def fine_print(league: League) -> list[str]:
    """How the figures came about: seeds, tuning, resolution, start-up, noise."""
    tuning, asked = league.tuning, league.asked
    seeds = league.seeds
    names = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else ", ".join(map(str, seeds)) or "none"
    said = [
        f"Target {league.target} on validation data; {asked['workers']} workers; seeds {names}, the same for all: "
        f"initial model, order of data. Runs took turns.",
        "Times are training time with evaluations, from measured runs; medians over seeds with 95 % bootstrap "
        "intervals. A run that missed the target counts as infinitely long. vs ddp: seed by seed, so that a seed's "
        "luck cancels.",
    ]
    if tuning["runs"]:
        chosen = ", ".join(f"{name} x{factor:g}" for name, factor in tuning["chosen"].items())
        said.append(
            f"Learning rates times {', '.join(f'{factor:g}' for factor in tuning['grid'])} were tried on a seed of "
            f"their own ({tuning['runs']} runs, {tuning['seconds']:.0f} s): {chosen}."
        )
    else:
        said.append("Learning rates were not tuned: all strategies used the one that is there.")
    found = [row.resolution for row in league.rows if row.resolution]
    if found:
        steps, apart = (sorted(gap[i] for gap in found) for i in (0, 1))
        said.append(
            f"Evaluated every {_range(steps, '.0f')} steps, {_range(apart, '.2f')} s apart: a time to target is no "
            f"finer."
        )
    startups = [row.startup_seconds for row in league.rows if row.startup_seconds is not None]
    if startups:
        said.append(f"Start-up is not counted: {min(startups):.2f} to {max(startups):.2f} s a run.")
    return said


def _range(values: Sequence[float], form: str) -> str:
    """`19`, or `0.31 to 2.04`."""
    ends = dict.fromkeys(f"{value:{form}}" for value in (values[0], values[-1]))
    return " to ".join(ends)
