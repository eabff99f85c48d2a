"""Plans the runs of a comparison and makes them in order: finished runs are not repeated, and the budget is kept.

Runs go seed by seed, all contestants in turn, with a different first one in each round. Knows neither processes nor
files: a run is a function, so that all of this can be tested without any.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offbeat.league._contestants import AGAIN, BASELINE, Contestant, EntryReason
from offbeat.league._records import Entry, Planned

TRIES = 2
"""Failures after which a contestant that has never succeeded is not run again."""
TUNING_SEED = 10_000
"""Distance of the seed on which learning rates are tuned from the first seed that counts."""


@dataclass(frozen=True)
class LeaguePlan:
    """All runs of a comparison, if the budget allows."""

    contestants: tuple[Contestant, ...]
    first_seed: int
    seeds: int
    grid: tuple[float, ...]
    """Factors of the learning rate to try for each contestant; a single factor needs no trial."""

    @property
    def tuned(self) -> list[str]:
        """Contestants that are tuned; the baseline's copy uses the baseline's factor."""
        return [one.name for one in self.contestants if one.part is not EntryReason.again]

    def tuning_rounds(self) -> list[list[Planned]]:
        """A round for each factor, those nearest to 1 first; in each, all contestants run once."""
        factors = sorted(self.grid, key=_change) if len(self.grid) > 1 else []
        seed = self.first_seed + TUNING_SEED
        return [
            [Planned(name, seed, factor, True) for name in _rotated(self.tuned, number)]
            for number, factor in enumerate(factors)
        ]

    def rounds(self, factors: Mapping[str, float]) -> list[list[Planned]]:
        """A round for each seed."""
        names = [one.name for one in self.contestants]
        return [
            [Planned(name, self.first_seed + number, factors[name], False) for name in _rotated(names, number)]
            for number in range(self.seeds)
        ]

    def chosen(self, entries: Sequence[Entry]) -> dict[str, float]:
        """The best factor of each contestant by its tuning runs."""
        default = min(self.grid, key=_change, default=1.0)
        tried = {name: [entry for entry in entries if entry.tuning and entry.name == name] for name in self.tuned}
        factors = {name: min(own, key=quality).factor if own else default for name, own in tried.items()}
        return factors | {AGAIN: factors.get(BASELINE, 1.0)}


def quality(entry: Entry) -> tuple[float, float, float]:
    """Smaller is better: steps (not seconds, which depend on the machine) to the target, best score, factor near 1."""
    steps = math.inf if entry.steps_to_target is None else float(entry.steps_to_target)
    score = math.inf if entry.best_score is None else entry.best_score * (1 if entry.lower_is_better else -1)
    return steps, score, _change(entry.factor)


def _change(factor: float) -> float:
    return abs(math.log(factor))


def _rotated(names: Sequence[str], by: int) -> list[str]:
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


class Conductor:
    """The runs of a comparison, as far as they have got."""

    def __init__(
        self,
        plan: LeaguePlan,
        entries: Sequence[Entry],
        run: Callable[[Planned], Entry],
        *,
        budget: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self.entries = list(entries)
        """Finished runs, including those of earlier parts."""
        self.undone: list[str] = []
        """What was skipped for lack of time, in words."""
        self._run, self._budget, self._clock, self._changed = run, budget, clock, changed
        self._start = clock()

    def go(self) -> None:
        """Tune all contestants, then run seed by seed, until all is done or the budget is spent."""
        self.undone = []
        for number, planned in enumerate(self._tuning()):
            # Leave time for a seed that counts.
            if number and not self._affordable(planned, times=2):
                self._cut(f"only {number} of {len(self.plan.grid)} learning rates were tried")
                break
            self._play(planned, sure=not number)
        rounds = self.plan.rounds(self.plan.chosen(self.entries))
        for number, planned in enumerate(rounds):
            whole = (not number or self._affordable(planned)) and self._play(planned, sure=not number)
            if not whole:
                self._cut(f"only {number} of {len(rounds)} seeds were run")
                return

    @property
    def given_up(self) -> list[str]:
        """Contestants that failed in every run, often enough."""
        needed = max(TRIES, len(self.plan.grid) if len(self.plan.grid) > 1 else 0)
        reasons = {one.name: [e.reason for e in self.entries if e.name == one.name] for one in self.plan.contestants}
        return [name for name, own in reasons.items() if len(own) >= needed and None not in own]

    def left(self) -> list[Planned]:
        """The remaining runs, if time allows."""
        rounds = [*self._tuning(), *self.plan.rounds(self.plan.chosen(self.entries))]
        return self._open([planned for round_ in rounds for planned in round_])

    def estimate(self, planned: Sequence[Planned]) -> float:
        """Seconds that runs will take, by earlier runs of the same contestants."""
        if not self.entries:
            return 0.0
        typical = statistics.median(entry.wall_seconds for entry in self.entries)
        own: dict[str, list[float]] = {}
        for entry in self.entries:
            own.setdefault(entry.name, []).append(entry.wall_seconds)
        # The lower of two: the very first run has waited for imports.
        return sum(statistics.median_low(own[one.name]) if one.name in own else typical for one in planned)

    def _tuning(self) -> list[list[Planned]]:
        """Rates are chosen once: after the first run that counts, no more are tried."""
        return [] if any(not entry.tuning for entry in self.entries) else self.plan.tuning_rounds()

    def _open(self, planned: Sequence[Planned]) -> list[Planned]:
        done = {entry.key for entry in self.entries}
        # Seeds that were run with another factor are not repeated either.
        counted = {(entry.name, entry.seed) for entry in self.entries if not entry.tuning}
        out = set(self.given_up)
        return [
            one
            for one in planned
            if one.key not in done and (one.tuning or (one.name, one.seed) not in counted) and one.name not in out
        ]

    def _play(self, planned: Sequence[Planned], sure: bool) -> bool:
        """Make the open runs of a round; False if time ran out, unless the round is `sure` to be finished."""
        for one in self._open(planned):
            if one.name in self.given_up:
                continue
            if not sure and self._budget is not None and self._spent() >= self._budget:
                return False
            self.entries.append(self._run(one))
            self._changed()
        return True

    def _affordable(self, planned: Sequence[Planned], times: int = 1) -> bool:
        open_ = self._open(planned)
        return self._budget is None or not open_ or self._spent() + times * self.estimate(open_) <= self._budget

    def _spent(self) -> float:
        return self._clock() - self._start

    def _cut(self, what: str) -> None:
        self.undone.append(f"The budget of {self._budget:g} s was spent: {what}, for all strategies alike.")
