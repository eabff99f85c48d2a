"""Amdahl's and Gunther's laws: what they say, and that fits find what was put in, as sure as they claim to be."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from offbeat.errors import UsageError
from offbeat.simulate.laws import (
    amdahl,
    amdahl_half,
    amdahl_limit,
    fit_amdahl,
    fit_gunther,
    gunther,
    gunther_peak,
)
from offbeat.statistics import Estimate, not_negative, paired_ratio, student

WORKERS = [1, 2, 4, 8, 16] * 3


def holds(found: Estimate, truth: float) -> bool:
    return found.low - 1e-9 <= truth <= found.high + 1e-9


def test_half_of_amdahls_limit_comes_at_the_half_performance_point() -> None:
    assert amdahl_limit(0.9) == pytest.approx(10)
    assert float(amdahl(amdahl_half(0.9), 0.9)) == pytest.approx(5)
    assert amdahl_limit(1.0) == amdahl_half(1.0) == math.inf


def test_no_number_of_workers_beats_gunthers_peak() -> None:
    peak = gunther_peak(0.05, 0.002)
    speedups = gunther(np.arange(1, 100), 0.05, 0.002)
    assert abs(int(speedups.argmax()) + 1 - peak) < 1
    assert speedups.max() <= float(gunther(peak, 0.05, 0.002))
    assert gunther_peak(0.1, 0) == math.inf
    assert gunther_peak(0.5, 10) == 1


def test_without_coherency_gunther_is_amdahl() -> None:
    assert gunther([1, 3, 17], 0.2, 0) == pytest.approx(amdahl([1, 3, 17], 0.8))


@pytest.mark.parametrize(("sigma", "kappa"), [(0.05, 0.002), (0.3, 0.0), (0.0, 0.01), (0.0, 0.0), (1.0, 0.0)])
def test_a_curve_without_noise_gives_back_what_made_it(sigma: float, kappa: float) -> None:
    found = fit_gunther(WORKERS, 730 * gunther(WORKERS, sigma, kappa))
    assert found.sigma.value == pytest.approx(sigma, abs=1e-6)
    assert found.kappa.value == pytest.approx(kappa, abs=1e-6)
    assert found.scatter == pytest.approx(0, abs=1e-6)
    if kappa:
        assert found.peak.value == pytest.approx(gunther_peak(sigma, kappa), rel=1e-3)
    else:
        assert fit_amdahl(WORKERS, 730 * gunther(WORKERS, sigma, kappa)).f.value == pytest.approx(1 - sigma, abs=1e-6)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(1)
    trials = 15

    def noisy(curve: np.ndarray) -> list[float]:
        return (curve * (1 + 0.03 * random.standard_normal(len(curve)))).tolist()

    shares = [fit_amdahl(WORKERS, noisy(amdahl(WORKERS, 0.9))).f for _ in range(trials)]
    both = [fit_gunther(WORKERS, noisy(gunther(WORKERS, 0.05, 0.002))) for _ in range(trials)]
    for found, truth in (
        (shares, 0.9),
        ([one.sigma for one in both], 0.05),
        ([one.kappa for one in both], 0.002),
        ([one.peak for one in both], gunther_peak(0.05, 0.002)),
        ([one.speedup(64) for one in both], float(gunther(64, 0.05, 0.002))),
    ):
        assert sum(holds(one, truth) for one in found) >= 0.75 * trials
        assert all(one.low < one.value < one.high for one in found)


def test_superlinear_points_are_accepted_and_fitted_by_the_nearest_law() -> None:
    found = fit_amdahl([1, 2, 4] * 2, [10, 22, 45, 10.1, 21.5, 46])
    assert found.f.value == 1
    assert found.limit.value == math.inf
    assert fit_gunther([1, 2, 4] * 2, [10, 22, 45, 10.1, 21.5, 46]).sigma.value == 0


def test_three_runs_on_three_numbers_of_workers_leave_gunthers_law_open() -> None:
    found = fit_gunther([1, 2, 4], [10, 18, 30])
    assert (found.sigma.low, found.sigma.high, found.kappa.low) == (0, 1, 0)
    assert found.kappa.high == math.inf
    assert found.peak.plain()["high"] is None


@pytest.mark.parametrize(
    ("workers", "rates", "said"),
    [
        ([1, 1], [3.0, 3.1], "cannot tell them apart"),
        ([1, 2, 4], [3.0, 3.1], "one rate for each"),
        ([1, 2, 4], [3.0, 3.1, 0.0], "rates above 0"),
        ([0, 2, 4], [3.0, 3.1, 1.0], "1 or more"),
    ],
)
def test_what_cannot_be_fitted_is_refused_with_the_reason(workers: list[int], rates: list[float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fit_gunther(workers, rates)


def test_students_quantiles_are_those_of_the_tables() -> None:
    for freedom, quantile in ((1, 6.314), (2, 2.920), (6, 1.943), (30, 1.697)):
        assert student(0.9, freedom) == pytest.approx(quantile, abs=1e-3)


def test_a_ratio_of_paired_rates_forgets_what_disturbed_both() -> None:
    slow = [1.0, 0.5, 0.8]
    found = paired_ratio([2 * one for one in slow], slow)
    assert (found.low, found.value, found.high) == pytest.approx((2, 2, 2))
    assert paired_ratio([2], [1]).high == math.inf


def test_scipy_is_imported_only_where_it_is_used() -> None:
    program = "import sys, offbeat, offbeat.cli.app, offbeat.statistics; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_columns_that_say_the_same_are_told_apart_by_none() -> None:
    sizes = np.array([1.0, 2.0, 4.0])
    found = not_negative(np.column_stack([sizes, 2 * sizes, np.zeros(3)]) / sizes[:, np.newaxis])
    assert found == pytest.approx([1.0, 0.0, 0.0])
