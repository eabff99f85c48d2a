"""Scaling laws: Amdahl's and Gunther's, and fits of both to measured rates, with intervals.

Work per second on p workers is X(p) = X(1) S(p). Both laws are p/S(p) = 1 + sigma (p - 1) + kappa p (p - 1), where
Amdahl has kappa = 0 and sigma = 1 - f. So a fit is non-negative linear least squares, with errors relative to the
measured rates, and the rate of one worker is fitted along with the rest.

An interval holds every value with which the law, its other parameters chosen optimally, fits not much worse than the
best: the sum of squares may grow by the factor 1 + t^2/(n - k), t from Student's distribution for n rates and k
parameters. The allowed values form a convex set, because the condition is that a vector linear in them stays within an
angle of another; so bounds can be bracketed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from offbeat.errors import UsageError
from offbeat.statistics import CONFIDENCE, Estimate, Floats, JsonData, furthest, not_negative, student

_GRID = 81  # Values of each parameter on the grid of allowed pairs.
_FLAT = 1e-12  # A sum of squares that is only rounding.


def amdahl(p: ArrayLike, f: float) -> Floats:
    """Speed-up on p workers where the share f of the work can be divided: 1 / ((1 - f) + f / p)."""
    return 1 / ((1 - f) + f / np.asarray(p, dtype=np.float64))


def gunther(p: ArrayLike, sigma: float, kappa: float) -> Floats:
    """Speed-up on p workers under contention sigma and coherency kappa: p / (1 + sigma (p-1) + kappa p (p-1))."""
    p = np.asarray(p, dtype=np.float64)
    return p / (1 + sigma * (p - 1) + kappa * p * (p - 1))


def amdahl_limit(f: float) -> float:
    """The speed-up that no number of workers exceeds."""
    return math.inf if f >= 1 else 1 / (1 - f)


def amdahl_half(f: float) -> float:
    """The half-performance point: how many workers give half of that."""
    return math.inf if f >= 1 else f / (1 - f)


def gunther_peak(sigma: float, kappa: float) -> float:
    """How many workers give the largest speed-up: sqrt((1 - sigma) / kappa), but one at least."""
    return math.inf if kappa <= 0 and sigma < 1 else max(1.0, math.sqrt((1 - sigma) / max(kappa, 1e-300)))


@dataclass(frozen=True)
class Amdahl(JsonData):
    """Amdahl's law, fitted."""

    f: Estimate  # The share of the work that can be divided.
    scatter: float  # Root mean square of the measured rates' relative distance from the law.

    @property
    def limit(self) -> Estimate:
        """The speed-up that no number of workers exceeds."""
        return self.f.mapped(amdahl_limit)

    @property
    def half(self) -> Estimate:
        """The half-performance point."""
        return self.f.mapped(amdahl_half)

    def speedup(self, p: float) -> Estimate:
        """Predicted speed-up on p workers."""
        return self.f.mapped(lambda f: float(amdahl(p, f)))

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return super().plain() | {"limit": self.limit.plain(), "half": self.half.plain()}


@dataclass(frozen=True)
class Gunther:
    """Gunther's law, fitted."""

    sigma: Estimate  # Contention for shared resources.
    kappa: Estimate  # Coherency: cost of every pair of workers.
    scatter: float  # Root mean square of the measured rates' relative distance from the law.
    allowed: Floats  # Pairs of sigma and kappa that the measured rates allow, one per row; the best first.

    @property
    def peak(self) -> Estimate:
        """How many workers give the largest speed-up."""
        return self._over(gunther_peak)

    @property
    def peak_speedup(self) -> Estimate:
        """The largest speed-up."""
        return self._over(_at_peak)

    def speedup(self, p: float) -> Estimate:
        """Predicted speed-up on p workers."""
        return self._over(lambda sigma, kappa: float(gunther(p, sigma, kappa)))

    def _over(self, figure: Callable[[float, float], float]) -> Estimate:
        values = [figure(float(sigma), float(kappa)) for sigma, kappa in self.allowed]
        return Estimate(values[0], min(values), max(values))

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sigma": self.sigma.plain(),
            "kappa": self.kappa.plain(),
            "peak": self.peak.plain(),
            "peak_speedup": self.peak_speedup.plain(),
            "scatter": self.scatter,
        }


def fit_amdahl(workers: Sequence[int], rates: Sequence[float], confidence: float = CONFIDENCE) -> Amdahl:
    """Fit Amdahl's law to rates: work per second, one for each run on `workers` workers, in any order."""
    p, y = _measured(workers, rates, 2, "Amdahl's")
    best = not_negative(np.column_stack([y, y * p]))
    serial = float(best[1] / max(best.sum(), 1e-300))

    def misses(sigma: float) -> float:
        return _misses((y * (1 + sigma * (p - 1)))[:, np.newaxis])

    least = misses(serial)
    enough = least * _slack(len(p) - 2, confidence) + _FLAT
    low = furthest(lambda value: misses(value) - enough, serial, 0.0)
    high = furthest(lambda value: misses(value) - enough, serial, 1.0)
    return Amdahl(Estimate(1 - serial, 1 - high, 1 - low), math.sqrt(least / len(p)))


def fit_gunther(workers: Sequence[int], rates: Sequence[float], confidence: float = CONFIDENCE) -> Gunther:
    """Fit Gunther's law to rates: work per second, one for each run on `workers` workers, in any order."""
    p, y = _measured(workers, rates, 3, "Gunther's")
    pairs = p * (p - 1)
    best = not_negative(np.column_stack([y, y * p, y * pairs]))
    alone = max(float(best[0] + best[1]), 1e-300)
    sigma, kappa = float(best[1]) / alone, float(best[2]) / alone

    def misses_sigma(value: float) -> float:
        return _misses(np.column_stack([y * (1 + value * (p - 1)), y * pairs]))

    def misses_kappa(value: float) -> float:
        return _misses(np.column_stack([y * (1 + value * pairs), y * (p + value * pairs)]))

    least = _misses(np.column_stack([y, y * p, y * pairs]))
    enough = least * _slack(len(p) - 3, confidence) + _FLAT
    sigmas = [furthest(lambda value: misses_sigma(value) - enough, sigma, end) for end in (0.0, 1.0)]
    kappas = [furthest(lambda value: misses_kappa(value) - enough, kappa, end) for end in (0.0, math.inf)]
    allowed = _allowed(p, y, enough, (sigma, kappa), sigmas, kappas)
    scatter = math.sqrt(least / len(p))
    return Gunther(Estimate(sigma, *sigmas), Estimate(kappa, *kappas), scatter, allowed)


def _measured(workers: Sequence[int], rates: Sequence[float], kinds: int, whose: str) -> tuple[Floats, Floats]:
    """Numbers of workers, and rates per worker, scaled to about 1."""
    if len(workers) != len(rates):
        raise UsageError(f"{len(workers)} numbers of workers and {len(rates)} rates: a fit needs one rate for each.")
    if not all(count >= 1 for count in workers) or not all(0 < rate < math.inf for rate in rates):
        raise UsageError(f"{list(workers)} workers at rates {list(rates)}: a fit needs 1 or more, and rates above 0.")
    if len(set(workers)) < kinds:
        raise UsageError(
            f"{whose} law has {kinds} unknowns with the rate of one worker, and {len(set(workers))} numbers of workers "
            f"cannot tell them apart. Measure {kinds} or more."
        )
    p = np.asarray(workers, dtype=np.float64)
    y = np.asarray(rates, dtype=np.float64) / p
    return p, y / y.mean()


def _misses(columns: Floats) -> float:
    """Sum of squares between ones and their nearest non-negative combination of columns."""
    return float(np.square(columns @ not_negative(columns) - 1).sum())


def _slack(freedom: int, confidence: float) -> float:
    """Factor by which the sum of squares may grow; infinite without degrees of freedom."""
    return math.inf if freedom < 1 else 1 + student(confidence, freedom) ** 2 / freedom


def _allowed(
    p: Floats, y: Floats, enough: float, best: tuple[float, float], sigmas: list[float], kappas: list[float]
) -> Floats:
    """The best pair, and those on a grid over both intervals that fit well enough."""
    top = min(kappas[1], 1.0)
    sigma = np.linspace(sigmas[0], sigmas[1], _GRID)[:, np.newaxis, np.newaxis]
    kappa = np.linspace(kappas[0], top, _GRID)[np.newaxis, :, np.newaxis]
    rows = y * (1 + sigma * (p - 1) + kappa * p * (p - 1))
    missed = len(p) - rows.sum(axis=2) ** 2 / np.square(rows).sum(axis=2)
    chosen = np.argwhere(missed <= enough)
    return np.concatenate([[best], np.column_stack([sigma[chosen[:, 0], 0, 0], kappa[0, chosen[:, 1], 0]])])


def _at_peak(sigma: float, kappa: float) -> float:
    peak = gunther_peak(sigma, kappa)
    if math.isfinite(peak):
        return float(gunther(peak, sigma, kappa))
    return math.inf if sigma <= 0 else 1 / sigma
