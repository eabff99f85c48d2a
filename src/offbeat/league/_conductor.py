"""Plays a league's runs one after the other: what is done is not done again, and the budget is kept.

Knows neither processes nor files: a run is a function, so that all of this can be tried without any.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from offbeat.league._order import LeaguePlan, Planned
from offbeat.league._records import Entry

TRIES = 2
"""Failures after which a contestant that has never ended well is not run again."""


class Conductor:
    """The runs of a league, as far as they have got."""

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
        """The runs that have ended, earlier ones too."""
        self.undone: list[str] = []
        """What was left out for want of time, in words."""
        self._run, self._budget, self._clock, self._changed = run, budget, clock, changed
        self._start = clock()

    def go(self) -> None:
        """Tune everybody, then play seed by seed, until all is done or the budget is spent."""
        self.undone = []
        for number, planned in enumerate(self._tuning()):
            # Something must be left for a seed that counts.
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
        """Those who failed in every run, often enough."""
        needed = max(TRIES, len(self.plan.grid) if len(self.plan.grid) > 1 else 0)
        found: list[str] = []
        for one in self.plan.contestants:
            own = [entry for entry in self.entries if entry.name == one.name]
            if len(own) >= needed and all(entry.reason is not None for entry in own):
                found.append(one.name)
        return found

    def left(self) -> list[Planned]:
        """The runs that are still to do, if time allows."""
        planned = [one for round_ in self._tuning() for one in round_]
        planned += [one for round_ in self.plan.rounds(self.plan.chosen(self.entries)) for one in round_]
        return self._open(planned)

    def estimate(self, planned: Sequence[Planned]) -> float:
        """Seconds that runs will take, by what the same contestants took before."""
        everybody = [entry.wall_seconds for entry in self.entries]
        if not everybody:
            return 0.0
        typical = statistics.median(everybody)
        own: dict[str, list[float]] = {}
        for entry in self.entries:
            own.setdefault(entry.name, []).append(entry.wall_seconds)
        # The lower of two: the very first run has waited for imports.
        return sum(statistics.median_low(own[one.name]) if one.name in own else typical for one in planned)

    def _tuning(self) -> list[list[Planned]]:
        """Rates are chosen once: when a run that counts has been made with them, no more are tried."""
        return [] if any(not entry.tuning for entry in self.entries) else self.plan.tuning_rounds()

    def _open(self, planned: Sequence[Planned]) -> list[Planned]:
        done = {entry.key for entry in self.entries}
        # Of seeds that were run before a rate was chosen anew nothing is repeated either.
        counted = {(entry.name, entry.seed) for entry in self.entries if not entry.tuning}
        out = set(self.given_up)
        return [
            one
            for one in planned
            if (one.name, one.seed, one.factor, one.tuning) not in done
            and (one.tuning or (one.name, one.seed) not in counted)
            and one.name not in out
        ]

    def _play(self, planned: Sequence[Planned], sure: bool) -> bool:
        """Run what is open of a round; False if time ran out in the middle. The first of its kind is always ended."""
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
        self.undone.append(f"The budget of {self._budget:g} s was spent: {what}, for everybody alike.")
