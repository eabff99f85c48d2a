"""Epsilon is dp-accounting's own, noise is calibrated to it, and rounds fit the budget."""

from __future__ import annotations

import importlib.util

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.federated.privacy_accountant import INTERVAL, PrivacyAccountant, calibrated_noise, check_installed


def theirs(probability: float, noise: float, rounds: int, delta: float, interval: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=interval)
    mechanism = dp_event.PoissonSampledDpEvent(probability, dp_event.GaussianDpEvent(noise))
    accountant.compose(dp_event.SelfComposedDpEvent(mechanism, rounds))
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(
    ("probability", "noise", "rounds", "delta"),
    [(0.01, 1.0, 1000, 1e-5), (0.1, 1.0, 100, 1e-5), (1.0, 2.0, 10, 1e-6), (0.5, 3.0, 40, 1e-3), (0.1, 1.0, 1, 1e-5)],
)
def test_epsilon_is_that_of_dp_accounting(probability: float, noise: float, rounds: int, delta: float) -> None:
    ours = PrivacyAccountant(noise, probability, delta).epsilon(rounds)
    assert ours == pytest.approx(theirs(probability, noise, rounds, delta, INTERVAL), rel=1e-6)
    # The coarser grid rounds up, and hardly so.
    fine = theirs(probability, noise, rounds, delta, 1e-4)
    assert fine <= ours * (1 + 1e-9)
    assert ours == pytest.approx(fine, rel=2e-3)


def test_a_published_figure_is_met() -> None:
    assert PrivacyAccountant(1.0, 0.01, 1e-5).epsilon(1000) == pytest.approx(1.828, abs=2e-3)


def test_nothing_is_spent_before_the_first_round() -> None:
    assert PrivacyAccountant(1.0, 0.1, 1e-5).epsilon(0) == 0


@pytest.mark.parametrize(
    ("epsilon", "probability", "rounds"), [(8.0, 0.1, 100), (1.0, 0.01, 1000), (0.5, 0.3, 20), (50.0, 0.1, 10)]
)
def test_calibrated_noise_spends_the_budget_and_no_more(epsilon: float, probability: float, rounds: int) -> None:
    noise = calibrated_noise(epsilon, probability, 1e-5, rounds)
    assert 0.98 * epsilon < PrivacyAccountant(noise, probability, 1e-5).epsilon(rounds) <= epsilon
    assert theirs(probability, noise, rounds, 1e-5, 1e-4) <= epsilon


def test_noise_never_falls_below_what_protects_anyone() -> None:
    assert calibrated_noise(100.0, 0.01, 1e-5, 1) == 0.1


def test_a_budget_that_only_endless_noise_would_keep_is_refused() -> None:
    with pytest.raises(StrategyError, match="in which nothing is learned"):
        calibrated_noise(0.01, 1.0, 1e-9, 1_000_000)


def test_rounds_within_a_budget_are_the_most_that_fit() -> None:
    accountant = PrivacyAccountant(1.0, 0.1, 1e-5)
    rounds = accountant.rounds(4.0)
    assert rounds > 1
    assert accountant.epsilon(rounds) <= 4.0 < accountant.epsilon(rounds + 1)
    assert accountant.rounds(0.5) == 0


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"offbeat\[federated\]"):
        check_installed()
