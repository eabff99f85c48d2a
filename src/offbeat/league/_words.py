"""The verdict of a comparison in words: which strategy won and why, from the figures of the table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offbeat.errors import StrategyError
from offbeat.league._contestants import BASELINE, EntryReason
from offbeat.league._rows import LeagueRow
from offbeat.statistics import ENOUGH
from offbeat.strategies import Local, combined, parse_built_in

_DIFFERENT = 0.05  # Relative difference of two figures that is worth mentioning.


@dataclass(frozen=True)
class LeagueVerdict:
    """The verdict of a comparison."""

    winner: str | None
    """First to the target; None if no strategy reached it."""
    ties: tuple[str, ...]
    """Others whose intervals overlap the winner's."""
    words: tuple[str, ...]
    """Sentences: the winner, the reason, and caveats."""


def outcome(rows: Sequence[LeagueRow], warnings: Sequence[str] = ()) -> LeagueVerdict:
    """The verdict on a table."""
    ranked = ranking(rows)
    if not ranked or math.isinf(ranked[0].time.median):
        return LeagueVerdict(None, (), (_nobody(rows), *warnings))
    winner, *others = ranked
    chance = winner.runs < ENOUGH  # Then intervals say nothing.
    ties = tuple(row.name for row in others if row.reached and (chance or row.judged.overlaps(winner.judged)))
    words = [_who(winner, ties)]
    # The winner is compared with the baseline, or, if that won, with the second.
    known = (row for row in rows if row.part is EntryReason.baseline and row.step_seconds)
    other = next(iter(others if winner.part is EntryReason.baseline else known), None)
    if other is not None:
        words.append(_why(winner, other))
    words += [*_versus_single(winner, rows), *_noise(rows)]
    if chance:
        count = f"{winner.runs} seed{'s' if winner.runs > 1 else ''}"
        words.append(f"Only {count}: the order may be chance. Use {ENOUGH} or more.")
    return LeagueVerdict(winner.name, ties, (*words, *warnings))


def ranking(rows: Sequence[LeagueRow]) -> list[LeagueRow]:
    """Contestants that can win, the first to the target first."""
    able = [row for row in rows if row.part.eligible and row.runs]
    return sorted(able, key=lambda row: (row.judged.median, row.judged.high, row.time.median))


def _why(winner: LeagueRow, other: LeagueRow) -> str:
    """Time is steps times time per step: which of the two made the difference, and where a step saves its time."""
    if not (winner.step_seconds and other.step_seconds and winner.steps and other.steps):
        return f"Why it was faster than {other.name} is not known: a run of one of them left no figures."
    step, steps = winner.step_seconds / other.step_seconds, winner.steps / other.steps
    words = f"{winner.name}: its step takes {step:.2f}x of {other.name}'s{_because(winner, other, step)}"
    if abs(steps - 1) <= _DIFFERENT:
        return f"{words}, for as many steps."
    return f"{words}, {'for' if (steps > 1) == (step < 1) else 'and it needs'} {steps:.2f}x the steps."


def _because(winner: LeagueRow, other: LeagueRow, step: float) -> str:
    """Where a step is shorter or longer, if anywhere, and what the strategy does about it."""
    if abs(step - 1) <= _DIFFERENT:
        return ""
    mine, theirs = _per_step(winner), _per_step(other)
    kinds = dict.fromkeys([*mine, *theirs])  # Only pipelines have bubbles.
    less = {kind: mine.get(kind, 0.0) - theirs.get(kind, 0.0) for kind in kinds}
    kind = min(less, key=lambda kind: less[kind] * (1 if step < 1 else -1))
    saved = f"{kind} {1e3 * mine.get(kind, 0.0):.2g} ms of a step against {1e3 * theirs.get(kind, 0.0):.2g} ms"
    busy = ("communicate", "wait")
    shares = f"; exchanging is {100 * winner.share(*busy):.0f} % of its time against {100 * other.share(*busy):.0f} %"
    try:
        when = combined(parse_built_in(winner.strategy)).when
    except StrategyError:
        when = None  # A user-defined strategy: reading a comparison must not run the code that its file names.
    habit = f"it exchanges every {when.period} steps; " if isinstance(when, Local) else ""
    return f" ({habit}mostly {saved}{shares})"


def _per_step(row: LeagueRow) -> dict[str, float]:
    spent = {kind: value for kind, value in (row.seconds_by_kind or {}).items() if kind != "evaluate"}
    total = sum(spent.values()) or 1.0
    return {kind: value / total * (row.step_seconds or 0.0) for kind, value in spent.items()}


def _who(winner: LeagueRow, ties: Sequence[str]) -> str:
    time = f"{winner.time.median:.2f} s to the target ({winner.reached} of {winner.runs} runs reached it)"
    if winner.relative is not None and winner.part is not EntryReason.baseline:
        time += f", {winner.relative.median:.2f}x of {BASELINE}'s time{_interval(winner)}"
    if not ties:
        return f"{winner.name} won: {time}."
    reason = "their intervals overlap" if winner.runs >= ENOUGH else "with so few seeds they cannot be told apart"
    return f"A tie of {', '.join([winner.name, *ties])}: {reason}. {winner.name} was first: {time}."


def _interval(row: LeagueRow) -> str:
    high = "never" if math.isinf(row.judged.high) else f"{row.judged.high:.2f}"
    return f" ({row.judged.low:.2f} to {high})" if row.runs >= ENOUGH else ""


def _nobody(rows: Sequence[LeagueRow]) -> str:
    scored = [row for row in rows if row.score is not None and row.part.eligible]
    if not scored:
        return "No strategy reached the target: no run ended well."
    scores = ", ".join(f"{row.name} {row.score:.4g}" for row in scored[:4])
    return f"No strategy reached the target in most runs. Best scores: {scores}. Lower the target or raise the budget."


def _versus_single(winner: LeagueRow, rows: Sequence[LeagueRow]) -> Iterator[str]:
    single = next((row for row in rows if row.part is EntryReason.single), None)
    if single is None or winner.speedup is None or math.isinf(single.time.median):
        return
    seconds = f"{single.time.median:.2f} s"
    if winner.speedup.high < 1:
        yield (
            f"But one worker alone is faster: {seconds}. Here distributing does not pay; it needs a larger model or "
            f"batch."
        )
    elif winner.speedup.low <= 1:
        yield f"One worker alone is as fast, within the spread: {seconds}."
    else:
        pays = f"Distributing pays here: {winner.speedup.median:.2f}x as fast as one worker alone ({seconds})"
        mine, theirs = 1e3 * (winner.step_seconds or 0.0), 1e3 * (single.step_seconds or 0.0)
        why = f", because a step takes {mine:.3g} ms instead of {theirs:.3g} ms" if 0 < mine < theirs else ""
        yield f"{pays}{why}."


def _noise(rows: Sequence[LeagueRow]) -> Iterator[str]:
    again = next((row for row in rows if row.part is EntryReason.again), None)
    if again is not None and again.relative is not None and math.isfinite(again.relative.high):
        percent = 100 * abs(again.relative.median - 1)
        yield f"Noise: {BASELINE} run twice differs by {percent:.0f} %{_interval(again)}."
