"""A private sum: what one client can change in it, what noise it has, and what of the budget it spends."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from offbeat.errors import StrategyError
from offbeat.runtime.federated.aggregation import AddUp, ClientUpdate, Selected, UpdateLayout, alone
from offbeat.runtime.federated.noise import NoiseSource, SeededNoise, SystemNoise
from offbeat.runtime.federated.privacy import PrivacyLedger, PrivacyTerms, PrivateMean

SIZE = 400


class Silence(NoiseSource):
    """No noise, so that a test sees the sum."""

    repeatable = True

    def normal(self, number: int, size: int, whose: int = -1) -> Tensor:
        return torch.zeros(size, dtype=torch.float64)


def terms(**changes: float | None) -> PrivacyTerms:
    known = {"clients": 20, "probability": 0.25, "delta": 1e-3, "clip": 2.0, "noise": 1.5, "limit": None}
    return PrivacyTerms(**{**known, **changes})  # pyright: ignore[reportArgumentType]


def private(source: NoiseSource | None = None, rounds: int | None = 10, **changes: float | None) -> PrivateMean:
    layout = UpdateLayout(SIZE, SIZE, torch.float64)
    mean = PrivateMean(layout, terms(**changes), source or Silence())
    mean.prepare(rounds)
    return mean


def rows(count: int, norm: float = 5.0, seed: int = 1) -> list[Tensor]:
    drawn = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [row * norm / row.norm() for row in drawn]


def played(
    mean: PrivateMean, updates: Iterable[Tensor], number: int = 1, add_up: AddUp = alone, weight: float = 7.0
) -> Tensor:
    mean.begin(Selected(number, [], []))
    for client, update in enumerate(updates):
        mean.add(ClientUpdate(client, update, None, weight, 0.5, 3))
    mean.combine(add_up)
    return mean.mean()[0]


# -- the sum ---------------------------------------------------------------------------------------------------------


def test_updates_are_clipped_weigh_the_same_and_are_divided_by_the_expected_number() -> None:
    long, short = rows(2)
    short = short * 0.1  # Of norm 0.5, below the bound of 2.
    result = played(private(), [long, short])
    assert torch.allclose(result, (long * 2 / 5 + short) / 5, atol=1e-5)
    assert torch.equal(result, played(private(), [long, short], weight=1000.0))


@pytest.mark.parametrize("norm", [1e-3, 1.999, 2.0, 2.001, 1e5])
def test_a_client_never_moves_the_sum_by_more_than_the_bound(norm: float) -> None:
    others, (mine,) = rows(6, seed=2), rows(1, norm, seed=3)
    mean = private()
    without, with_it = played(mean, others), played(mean, [*others, mine])
    assert float((with_it - without).norm()) * mean.ledger.terms.expected <= 2.0
    assert float((with_it - without).norm()) * mean.ledger.terms.expected == pytest.approx(min(norm, 2.0), rel=1e-5)


def test_updates_that_cannot_be_summed_are_refused() -> None:
    mean = private()
    mean.begin(Selected(1, [], []))
    for bad in (math.nan, math.inf, 1e9):
        update = rows(1)[0]
        update[3] = bad
        assert not mean.add(ClientUpdate(0, update, None, 1.0, 0.5, 3))
    assert (mean.updates, mean.examples) == (0, 0)


def test_the_training_loss_stays_unknown() -> None:
    mean = private()
    played(mean, rows(3))
    assert (mean.updates, mean.examples) == (3, 9)
    assert math.isnan(mean.loss)


def test_bits_do_not_depend_on_the_order_or_on_who_adds_what() -> None:
    updates, source = rows(7), SeededNoise(9)
    whole = played(private(source), updates)
    assert torch.equal(whole, played(private(source), reversed(updates)))
    halves = private(source), private(source)
    played(halves[1], updates[4:])
    other = halves[1]._row.clone()
    other[:SIZE] -= (source.normal(1, SIZE) * 1.5 * halves[1]._sum.unit).round_().long()  # Its noise, which it drew.
    assert torch.equal(whole, played(halves[0], updates[:4], add_up=lambda row, _: row.add_(other)))


# -- the noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [SeededNoise(9), SystemNoise()], ids=["seeded", "system"])
def test_noise_has_the_promised_deviation(source: NoiseSource) -> None:
    mean, silent = private(source), private()
    pairs = [(played(mean, rows(5), number), played(silent, rows(5), number)) for number in range(1, 101)]
    noise = torch.cat([noisy - plain for noisy, plain in pairs])
    assert float(noise.std()) == pytest.approx(1.5 * 2.0 / 5, rel=0.02)
    assert abs(float(noise.mean())) < 0.02


def test_a_round_without_clients_moves_the_model_by_noise_alone() -> None:
    mean = private(SeededNoise(9))
    assert mean.moves_always
    moved = played(mean, [])
    assert torch.allclose(moved, SeededNoise(9).normal(1, SIZE) * 1.5 * 2.0 / 5, atol=1e-8)


def test_sums_lie_on_one_grid_whatever_was_added() -> None:
    mean = private(SystemNoise())
    for updates in ([], rows(1, 1e-5), rows(5)):
        result = played(mean, updates)
        steps = result * mean.ledger.terms.expected / 2.0 * mean._sum.unit
        assert float((steps - steps.round()).abs().max()) < 1e-4


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_every_round_counts_also_one_without_updates() -> None:
    mean = private(SeededNoise(9))
    played(mean, rows(3), 1)
    played(mean, [], 2)
    assert mean.ledger.spent == 2
    assert mean.notes()["privacy"]["rounds"] == 2
    assert mean.figures()["epsilon"] == pytest.approx(mean.ledger.accountant.epsilon(2))


def test_a_repeated_round_counts_once_if_its_noise_is_the_same_and_again_if_not() -> None:
    seeded, system = private(SeededNoise(9)), private(SystemNoise())
    for mean, spent in ((seeded, 2), (system, 3)):
        for number in (1, 2, 2):
            played(mean, rows(2), number)
        assert mean.ledger.spent == spent


def test_a_ledger_survives_as_json_and_never_forgets() -> None:
    first = private(SeededNoise(9), rounds=10, noise=None, limit=8.0)
    for number in range(1, 5):
        played(first, rows(2), number)
    state = json.loads(json.dumps(first.state_dict()))
    again = private(SeededNoise(9), rounds=1000, noise=None, limit=8.0)
    assert again.ledger.noise != first.ledger.noise
    again.load_state_dict(state)
    again.prepare(1000)
    assert (again.ledger.noise, again.ledger.spent) == (first.ledger.noise, 4)
    assert again.ledger.epsilon == first.ledger.epsilon
    again.load_state_dict(state | {"spent": 2})
    assert again.ledger.spent == 4


def test_a_budget_ends_the_run_after_its_last_round() -> None:
    mean = private(noise=None, limit=8.0, rounds=3)
    for number in (1, 2, 3):
        assert mean.exhausted == ""
        played(mean, [], number)
    assert "privacy budget of epsilon 8 is spent: 3 rounds" in mean.exhausted
    assert mean.ledger.epsilon <= 8.0


def test_with_given_noise_the_budget_decides_how_many_rounds_there_are() -> None:
    ledger = PrivacyLedger(terms(limit=6.0), repeatable=True)
    ledger.settle(None)
    assert ledger.allowed == ledger.accountant.rounds(6.0)
    free = PrivacyLedger(terms(), repeatable=True)
    free.settle(None)
    assert free.allowed is None
    free.begin(10**6)
    assert free.exhausted == ""


def test_a_budget_below_the_first_round_is_refused() -> None:
    with pytest.raises(StrategyError, match="would spend epsilon"):
        private(limit=0.1)


def test_an_epsilon_without_a_number_of_rounds_is_refused() -> None:
    with pytest.raises(StrategyError, match="follows from the number of rounds"):
        private(noise=None, limit=8.0, rounds=None)


def test_a_delta_that_would_allow_publishing_a_client_is_doubted() -> None:
    assert terms(delta=0.05).doubt == ""
    assert "publishing a client drawn at random" in terms(delta=0.06).doubt


# -- what an attacker sees -------------------------------------------------------------------------------------------


def advantage(noise: float, trials: int = 150) -> float:
    """How much better than guessing an attacker tells whether a known client took part, from one model's move.

    The attacker knows all updates, so it looks at the move along that client's.
    """
    others, (mine,) = rows(4, seed=5), rows(1, seed=6)
    layout = UpdateLayout(SIZE, SIZE, torch.float64)
    guesses = [0, 0]
    for taking_part in (0, 1):
        for trial in range(trials):
            mean = PrivateMean(layout, terms(noise=noise, probability=1.0), SeededNoise(1000 * taking_part + trial))
            mean.prepare(1)
            move = played(mean, [*others, mine] if taking_part else others) * 20
            rest = sum(other * 2 / 5 for other in others)
            guesses[taking_part] += float((move - rest) @ mine) / 5 > 1.0
    return (guesses[1] - guesses[0]) / trials


def test_noise_takes_the_advantage_of_an_attacker_who_infers_membership() -> None:
    with_little, with_much = advantage(0.1), advantage(5.0)
    assert with_little > 0.95
    assert with_much < 0.35
    epsilon = private(probability=1.0, noise=5.0, limit=None).ledger.accountant.epsilon(1)
    bound = (math.exp(epsilon) - 1 + 2e-3) / (math.exp(epsilon) + 1)
    assert with_much < bound + 4 * math.sqrt(0.5 / 150)
