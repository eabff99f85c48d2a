"""Medians over seeds with how sure one can be of them. A run that missed the target takes for ever, and counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
LEVEL = 95
"""Per cent of the resampled medians that an interval holds."""
ENOUGH = 3
"""Seeds below which an interval says nothing."""


@dataclass(frozen=True)
class Spread:
    """A median and its bootstrap interval; with infinity where too many runs missed."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The interval's width as a share of the median."""
        return (self.high - self.low) / self.median if math.isfinite(self.high) and self.median else math.inf

    def overlaps(self, other: Spread) -> bool:
        """Whether both could be the same."""
        return self.low <= other.high and other.low <= self.high

    def plain(self) -> dict[str, float | None]:
        """For JSON, which has no infinity: null."""
        return {name: _finite(getattr(self, name)) for name in ("median", "low", "high")}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Spread:
        """From such data."""
        return cls(*(math.inf if data[name] is None else float(data[name]) for name in ("median", "low", "high")))


def spread(values: Sequence[float], seed: int = 0) -> Spread:
    """Of one value for each seed; infinity is a miss, which is slower than anything."""
    if not values:
        return Spread(math.inf, math.inf, math.inf)
    drawn = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(drawn), (RESAMPLES, len(drawn)))
    medians = np.sort(_medians(drawn[picks]))
    edge = (100 - LEVEL) / 200
    low, high = medians[int(edge * RESAMPLES)], medians[int((1 - edge) * RESAMPLES) - 1]
    return Spread(float(_medians(drawn[None])[0]), float(low), float(high))


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float] | None:
    """Seed by seed, so that what a seed makes long or short cancels; None if `under` has always missed.

    Where only one of the two has missed, it was slower by any factor; where both have, neither was.
    """
    if all(math.isinf(value) for value in under):
        return None
    return [_ratio(a, b) for a, b in zip(over, under, strict=True)]


def _ratio(a: float, b: float) -> float:
    return 1.0 if math.isinf(a) and math.isinf(b) else a / max(b, 1e-12)


def _medians(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The middle of each row; of two in the middle their mean, which a miss makes a miss (and no NaN)."""
    ordered = np.sort(rows, axis=1)
    half = ordered.shape[1] // 2
    return ordered[:, half] if ordered.shape[1] % 2 else (ordered[:, half - 1] + ordered[:, half]) / 2


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
