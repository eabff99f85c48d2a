"""Figures with intervals: bootstraps, Student's quantiles and non-negative least squares, by scipy.

scipy is imported where it is used: it takes longer to import than most commands take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
CONFIDENCE = 0.9
"""Probability that the interval of an estimate holds the truth."""
LEVEL = 95
"""Percentage of the resampled medians inside an interval."""
ENOUGH = 3
"""Seeds below which an interval says nothing."""
WITHIN = 1.05
"""A bar holds only if the median is within this factor of it, however wide the interval."""

Floats = NDArray[np.float64]
Times = Sequence[float]
"""Seconds per block; blocks with the same number were measured next to each other."""


class JsonData:
    """A dataclass that converts to JSON data, with None for infinity, which JSON lacks."""

    def plain(self) -> dict[str, Any]:
        """All fields as JSON data."""
        return finite(asdict(self))  # pyright: ignore[reportArgumentType]


def finite(value: Any) -> Any:
    """JSON data with None in place of infinities and NaN, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Spread(JsonData):
    """A median and its bootstrap interval; infinite where too many runs missed a target."""

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

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Estimate(JsonData):
    """A figure and its confidence interval."""

    value: float
    low: float
    high: float

    def mapped(self, rising: Callable[[float], float]) -> Estimate:
        """The estimate of a quantity that rises with this one."""
        return Estimate(rising(self.value), rising(self.low), rising(self.high))

    def __str__(self) -> str:
        value, low, high = ("no limit" if x == math.inf else f"{x:.3g}" for x in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]"


def spread(values: Sequence[float], seed: int = 0) -> Spread:
    """The median of one value per seed; infinity is a miss, slower than anything."""
    if not values:
        return Spread(math.inf, math.inf, math.inf)
    medians = _resampled(np.median, [values], seed)
    return Spread(float(np.median(values)), *_ends(medians))


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float] | None:
    """Ratios seed by seed, so that a seed's luck cancels; None if `under` has always missed.

    Where only one of the two has missed, it was slower by any factor; where both have, neither was.
    """
    if all(math.isinf(value) for value in under):
        return None
    pairs = zip(over, under, strict=True)
    return [1.0 if math.isinf(a) and math.isinf(b) else a / max(b, 1e-12) for a, b in pairs]


def ratio(over: Times, under: Times, seed: int = 0) -> Spread:
    """The ratio of medians; blocks are resampled in pairs, because what disturbs one disturbs its neighbour."""
    return geometric_mean([(over, under)], seed)


def geometric_mean(pairs: Sequence[tuple[Times, Times]], seed: int = 0) -> Spread:
    """The geometric mean of several ratios of medians, each over blocks of its own."""

    def logs(a: Floats, b: Floats, axis: int = -1) -> Floats:
        return np.log(np.median(a, axis=axis) / np.median(b, axis=axis))

    middle = np.mean([logs(np.asarray(a), np.asarray(b)) for a, b in pairs])
    resampled = np.mean([_resampled(logs, pair, seed + number) for number, pair in enumerate(pairs)], axis=0)
    return Spread(float(np.exp(middle)), *_ends(np.exp(resampled)))


def paired_ratio(over: Sequence[float], under: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The ratio of two rates measured in turn: the geometric mean over the turns, by Student's distribution.

    A single turn says nothing about its error: then the interval is unbounded.
    """
    logs = np.log(np.asarray(over, dtype=np.float64) / np.asarray(under, dtype=np.float64))
    value = math.exp(float(logs.mean()))
    if len(logs) < 2:
        return Estimate(value, 0.0, math.inf)
    reach = student(confidence, len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Estimate(value, value * math.exp(-reach), value * math.exp(min(reach, 700.0)))


def holds(spread: Spread, *, at_least: float | None = None, at_most: float | None = None) -> bool:
    """Whether a bar is reached: by the better end of the interval, and by the median to within 5 %."""
    enough = at_least is None or (spread.high >= at_least and spread.median * WITHIN >= at_least)
    little = at_most is None or (spread.low <= at_most and spread.median <= at_most * WITHIN)
    return enough and little


def student(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's distribution at this confidence and number of degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))


def not_negative(columns: Floats) -> Floats:
    """The x >= 0 for which columns @ x is nearest to ones."""
    from scipy.optimize import nnls

    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0
    return nnls(columns / scale, np.ones(len(columns)))[0] / scale


def furthest(excess: Callable[[float], float], inside: float, end: float) -> float:
    """The value furthest from `inside` towards `end` at which `excess` is not positive."""
    from scipy.optimize import brentq

    if end == math.inf:
        end = max(2 * inside, 1e-3)
        while excess(end) <= 0:
            end *= 2
            if end > 1e6:
                return math.inf
    return end if excess(end) <= 0 else float(cast("float", brentq(excess, inside, end, xtol=1e-12)))


def _resampled(statistic: Callable[..., Any], samples: Sequence[Sequence[float]], seed: int) -> Floats:
    """The statistic of resamples, in pairs if there are two samples."""
    from scipy.stats import bootstrap

    if len(samples[0]) < 2:
        return np.full(RESAMPLES, statistic(*map(np.asarray, samples)))
    with np.errstate(invalid="ignore"):  # Misses are infinite.
        return bootstrap(
            [np.asarray(sample, np.float64) for sample in samples], statistic, n_resamples=RESAMPLES, paired=True,
            vectorized=True, method="percentile", rng=np.random.default_rng(seed),
        ).bootstrap_distribution  # fmt: skip


def _ends(resampled: Floats) -> tuple[float, float]:
    """Both ends of the interval: resampled values, so that a miss stays infinite."""
    edge = (100 - LEVEL) / 200
    low, high = np.quantile(resampled, [edge, 1 - edge], method="inverted_cdf")
    return float(low), float(high)
