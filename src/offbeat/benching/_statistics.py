"""Ratios of times that were measured in turn, with how sure of them one can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
WITHIN = 1.05
"""A bar holds only if the median is no further from it than this, however wide the interval."""

Times = Sequence[float]
"""Seconds, one entry per block; blocks of the same number were measured next to each other."""


@dataclass(frozen=True)
class Spread:
    """A median and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def plain(self) -> dict[str, float]:
        """The three numbers, for JSON."""
        return asdict(self)


def ratio(over: Times, under: Times, seed: int = 0) -> Spread:
    """The ratio of medians; blocks are drawn again in pairs, because what disturbs one disturbs its neighbour."""
    return geometric_mean([(over, under)], seed)


def geometric_mean(pairs: Sequence[tuple[Times, Times]], seed: int = 0) -> Spread:
    """The geometric mean of several ratios of medians, each over blocks of its own."""
    random = np.random.default_rng(seed)
    middle = 0.0
    resampled: NDArray[np.float64] = np.zeros(RESAMPLES)
    for over, under in pairs:
        a, b = np.asarray(over), np.asarray(under)
        picks = random.integers(0, len(a), (RESAMPLES, len(a)))
        middle += float(np.log(np.median(a) / np.median(b))) / len(pairs)
        resampled += np.log(np.median(a[picks], axis=1) / np.median(b[picks], axis=1)) / len(pairs)
    low, high = np.exp(np.percentile(resampled, [2.5, 97.5]))
    return Spread(float(np.exp(middle)), float(low), float(high))


def holds(found: Spread, *, at_least: float | None = None, at_most: float | None = None) -> bool:
    """Whether a bar is reached: by the better end of the interval, and by the median to within 5 %."""
    enough = at_least is None or (found.high >= at_least and found.median * WITHIN >= at_least)
    little = at_most is None or (found.low <= at_most and found.median <= at_most * WITHIN)
    return enough and little
