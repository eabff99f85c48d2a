"""Who won and why, in words, from the figures of the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.errors import StrategyError
from offbeat.league._contestants import BASELINE, EntryReason
from offbeat.league._rows import LeagueRow
from offbeat.statistics import ENOUGH
from offbeat.strategies import Local, combined, parse_built_in

_DIFFERENT = 0.05
"""A share by which two figures must differ to be worth words."""


@dataclass(frozen=True)
class LeagueVerdict:
    """What a league says."""

    winner: str | None
    """First to the target; None if nobody reached it."""
    ties: tuple[str, ...]
    """Others whose intervals overlap the winner's."""
    words: tuple[str, ...]
    """Sentences: who, why, and what to be careful about."""


def outcome(rows: Sequence[LeagueRow], warnings: Sequence[str] = ()) -> LeagueVerdict:
    """The verdict over a table."""
    ranked = ranking(rows)
    if not ranked or math.isinf(ranked[0].time.median):
        return LeagueVerdict(None, (), (_nobody(rows), *warnings))
    winner, *others = ranked
    chance = winner.runs < ENOUGH  # Then intervals say nothing.
    ties = tuple(row.name for row in others if row.reached and (chance or row.judged.overlaps(winner.judged)))
    against = _against(winner, rows, ranked)
    words = [_who(winner, ties)]
    if against is not None:
        words.append(why(winner, against))
    words += [*_alone(winner, rows), *_noise(rows), *_few(winner), *warnings]
    return LeagueVerdict(winner.name, ties, tuple(words))


def ranking(rows: Sequence[LeagueRow]) -> list[LeagueRow]:
    """Those who can win, the first to the target first."""
    able = [row for row in rows if row.eligible and row.runs]
    return sorted(able, key=lambda row: (row.judged.median, row.judged.high, row.time.median))


def why(winner: LeagueRow, other: LeagueRow) -> str:
    """Time is steps times what a step takes: which of the two made the difference, and where a step saves its time."""
    if not (winner.step_seconds and other.step_seconds and winner.steps and other.steps):
        return f"Why it was faster than {other.name} is not known: a run of one of them left no figures."
    step, steps = winner.step_seconds / other.step_seconds, winner.steps / other.steps
    parts = [f"{winner.name}: its step takes {step:.2f}x of {other.name}'s{_because(winner, other, step)}"]
    if abs(steps - 1) <= _DIFFERENT:
        parts.append("for as many steps")
    else:
        parts.append(f"{'for' if (steps > 1) == (step < 1) else 'and it needs'} {steps:.2f}x the steps")
    return ", ".join(parts) + "."


def _because(winner: LeagueRow, other: LeagueRow, step: float) -> str:
    """Where a step is shorter or longer, if anywhere, and what the strategy does about it."""
    if abs(step - 1) <= _DIFFERENT:
        return ""
    mine, theirs = _per_step(winner), _per_step(other)
    shorter = step < 1
    kinds = sorted(mine, key=lambda kind: (mine[kind] - theirs[kind]) * (1 if shorter else -1))
    kind = kinds[0]
    saved = f"{kind} {1e3 * mine[kind]:.2g} ms of a step against {1e3 * theirs[kind]:.2g} ms"
    busy = ("communicate", "wait")
    shares = f"; exchanging is {100 * winner.share(*busy):.0f} % of its time against {100 * other.share(*busy):.0f} %"
    return f" ({_habit(winner)}mostly {saved}{shares})"


def _per_step(row: LeagueRow) -> dict[str, float]:
    spent = {kind: value for kind, value in (row.seconds_by_kind or {}).items() if kind != "evaluate"}
    total = sum(spent.values()) or 1.0
    return {kind: value / total * (row.step_seconds or 0.0) for kind, value in spent.items()}


def _habit(row: LeagueRow) -> str:
    try:
        when = combined(parse_built_in(row.strategy)).when
    except StrategyError:
        return ""  # A strategy of somebody's own: reading a league must not run the code that its file names.
    return f"it exchanges every {when.period} steps; " if isinstance(when, Local) else ""


def _who(winner: LeagueRow, ties: Sequence[str]) -> str:
    first = f"{winner.name} was first: {_time(winner)}"
    if not ties:
        return first.replace(" was first", " won") + "."
    reason = "their intervals overlap" if winner.runs >= ENOUGH else "with so few seeds nobody can be told apart"
    return f"A tie of {', '.join([winner.name, *ties])}: {reason}. {first}."


def _time(row: LeagueRow) -> str:
    said = f"{row.time.median:.2f} s to the target ({row.reached} of {row.runs} runs reached it)"
    if row.relative is None or row.part is EntryReason.baseline:
        return said
    interval = f" ({_interval(row)})" if row.runs >= ENOUGH else ""
    return f"{said}, {row.relative.median:.2f}x of {BASELINE}'s time{interval}"


def _interval(row: LeagueRow) -> str:
    high = "never" if math.isinf(row.judged.high) else f"{row.judged.high:.2f}"
    return f"{row.judged.low:.2f} to {high}"


def _against(winner: LeagueRow, rows: Sequence[LeagueRow], ranked: Sequence[LeagueRow]) -> LeagueRow | None:
    """Whom the winner is explained by: the baseline, or whoever came second to it."""
    if winner.part is EntryReason.baseline:
        return ranked[1] if len(ranked) > 1 else None
    return next((row for row in rows if row.part is EntryReason.baseline and row.step_seconds), None)


def _nobody(rows: Sequence[LeagueRow]) -> str:
    scored = [row for row in rows if row.score is not None and row.eligible]
    if not scored:
        return "Nobody reached the target: no run of any strategy ended well."
    said = ", ".join(f"{row.name} {row.score:.4g}" for row in scored[:4])
    return f"Nobody reached the target in most of its runs. Best scores: {said}. Lower the target or raise the budget."


def _alone(winner: LeagueRow, rows: Sequence[LeagueRow]) -> list[str]:
    lone = next((row for row in rows if row.part is EntryReason.single), None)
    if lone is None or winner.speedup is None or math.isinf(lone.time.median):
        return []
    if winner.speedup.high < 1:
        return [
            f"But one worker alone is faster: {lone.time.median:.2f} s. Here distributing does not pay; it needs a "
            f"larger model or batch."
        ]
    if winner.speedup.low <= 1:
        return [f"One worker alone is as fast, within the spread: {lone.time.median:.2f} s."]
    pays = (
        f"Distributing pays here: {winner.speedup.median:.2f}x as fast as one worker alone ({lone.time.median:.2f} s)"
    )
    if winner.step_seconds and lone.step_seconds and winner.step_seconds < lone.step_seconds:
        pays += f", because a step takes {1e3 * winner.step_seconds:.3g} ms instead of {1e3 * lone.step_seconds:.3g} ms"
    return [f"{pays}."]


def _noise(rows: Sequence[LeagueRow]) -> list[str]:
    again = next((row for row in rows if row.part is EntryReason.again), None)
    if again is None or again.relative is None or not math.isfinite(again.relative.high):
        return []
    interval = f" ({_interval(again)})" if again.runs >= ENOUGH else ""
    return [f"Noise: {BASELINE} run twice differs by {100 * abs(again.relative.median - 1):.0f} %{interval}."]


def _few(winner: LeagueRow) -> list[str]:
    if winner.runs >= ENOUGH:
        return []
    count = f"{winner.runs} seed{'s' if winner.runs > 1 else ''}"
    return [f"Only {count}: the order may be chance. Use {ENOUGH} or more."]
