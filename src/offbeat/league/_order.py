"""Which runs a league consists of, and in which order: seed by seed, everybody in turn, with the first one rotating."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.league._contestants import AGAIN, BASELINE, Contestant, EntryReason
from offbeat.league._records import Entry

TUNING_SEED = 10_000
"""How far the seed on which learning rates are tuned is from the first one that counts."""


@dataclass(frozen=True)
class Planned:
    """One run."""

    name: str
    """The contestant."""
    seed: int
    """What fixes its model, data and chance."""
    factor: float
    """What its learning rates are multiplied by."""
    tuning: bool
    """Whether it only serves to choose that factor."""


@dataclass(frozen=True)
class LeaguePlan:
    """Everything that a league would like to run."""

    contestants: tuple[Contestant, ...]
    first_seed: int
    seeds: int
    grid: tuple[float, ...]
    """Factors of the learning rate that are tried for everybody; one factor needs no trying."""

    @property
    def tuned(self) -> list[str]:
        """Who is tuned by itself; the baseline's copy takes what the baseline takes."""
        return [one.name for one in self.contestants if one.part is not EntryReason.again]

    def tuning_rounds(self) -> list[list[Planned]]:
        """A round for each factor, in each of which everybody runs once; those that change the least come first."""
        if len(self.grid) < 2:
            return []
        seed = self.first_seed + TUNING_SEED
        return [
            [Planned(name, seed, factor, True) for name in rotated(self.tuned, number)]
            for number, factor in enumerate(sorted(self.grid, key=_change))
        ]

    def rounds(self, chosen: Mapping[str, float]) -> list[list[Planned]]:
        """A round for each seed."""
        names = [one.name for one in self.contestants]
        return [
            [Planned(name, self.first_seed + number, chosen[name], False) for name in rotated(names, number)]
            for number in range(self.seeds)
        ]

    def chosen(self, entries: Sequence[Entry]) -> dict[str, float]:
        """The best factor of each by the runs that tried them."""
        found: dict[str, float] = {}
        for name in self.tuned:
            tried = [entry for entry in entries if entry.tuning and entry.name == name]
            default = min(self.grid, key=_change, default=1.0)
            found[name] = min(tried, key=quality).factor if tried else default
        return found | {AGAIN: found.get(BASELINE, 1.0)}


def quality(entry: Entry) -> tuple[float, float, float]:
    """Smaller is better: steps to the target, then the best score, then how little the rate was changed.

    Steps, not seconds: the rate does not change what a step takes, so that the first to arrive is the one with the
    fewest steps, and what else the machine did while it ran has no say.
    """
    steps = math.inf if entry.steps_to_target is None else float(entry.steps_to_target)
    score = math.inf if entry.best_score is None else entry.best_score * (1 if entry.lower_is_better else -1)
    return steps, score, _change(entry.factor)


def _change(factor: float) -> float:
    return abs(math.log(factor))


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The same in another order: who comes first changes from round to round."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]
