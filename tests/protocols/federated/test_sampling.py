"""Who takes part in a round: drawn from seed and round alone, fairly, and never a client without examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offbeat.errors import UsageError
from offbeat.protocols.federated.plan import ClientSpeeds, RoundPlan
from offbeat.protocols.federated.sampling import SeededNumbers, Succession, cohort

SIZES = np.array([3, 0, 1, 9, 2, 0, 7, 7, 1, 4])


def test_a_fixed_number_of_different_clients_is_drawn_and_none_without_examples() -> None:
    plan = RoundPlan(clients=10, fraction=0.4)
    for number in range(1, 50):
        drawn = cohort(plan, SIZES, 3, number).tolist()
        assert len(set(drawn)) == 4
        assert not {1, 5} & set(drawn)
        assert cohort(plan, SIZES, 3, number).tolist() == drawn
    assert cohort(plan, SIZES, 3, 1).tolist() != cohort(plan, SIZES, 4, 1).tolist()


def test_poisson_sampling_draws_no_client_without_examples() -> None:
    plan = RoundPlan(clients=10, fraction=0.9, poisson=True)
    drawn = {client for number in range(50) for client in cohort(plan, SIZES, 3, number).tolist()}
    assert drawn == {0, 2, 3, 4, 6, 7, 8, 9}


def test_over_selection_draws_more_but_not_more_than_can() -> None:
    assert len(cohort(RoundPlan(clients=10, fraction=0.4, over=1.5), SIZES, 0, 1)) == 6
    assert len(cohort(RoundPlan(clients=10, fraction=0.8, over=1.5), SIZES, 0, 1)) == 8


@pytest.mark.parametrize("poisson", [False, True])
def test_every_client_is_drawn_equally_often(poisson: bool) -> None:
    sizes = np.ones(50, np.int64)
    plan = RoundPlan(clients=50, fraction=0.2, poisson=poisson)
    counts = np.bincount(np.concatenate([cohort(plan, sizes, 1, n) for n in range(2000)]), minlength=50)
    # 400 each on average, with a standard deviation of 18.
    assert counts.min() > 400 - 5 * 18
    assert counts.max() < 400 + 5 * 18


def test_poisson_cohorts_vary_in_size_and_may_be_empty() -> None:
    plan = RoundPlan(clients=10, fraction=0.1, poisson=True)
    sizes = {len(cohort(plan, np.ones(10, np.int64), 0, n)) for n in range(200)}
    assert {0, 1, 2} <= sizes


def test_random_numbers_are_found_by_their_place_in_any_order() -> None:
    places = [0, 5000, 1, 4095, 4096, 0]
    numbers = [SeededNumbers(9, 1)[place] for place in places]
    again = SeededNumbers(9, 1)
    assert [again[place] for place in places] == numbers
    assert numbers[0] == numbers[5] != SeededNumbers(9, 2)[0]


def test_a_succession_goes_on_after_a_restart_and_skips_the_busy() -> None:
    whole = Succession(SIZES, 5)
    clients = [whole.next(busy=()) for _ in range(20)]
    first = Succession(SIZES, 5)
    before = [first.next(busy=()) for _ in range(7)]
    second = Succession(SIZES, 5, first.drawn)
    assert before + [second.next(busy=()) for _ in range(13)] == clients
    able = {0, 2, 3, 4, 6, 7, 8, 9}
    assert set(clients) <= able
    assert Succession(SIZES, 5).next(busy=able - {8}) == 8
    assert Succession(SIZES, 5).next(busy=able) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"clients": 0}, "clients"),
        ({"fraction": 0}, "fraction=0"),
        ({"fraction": 1.1}, "fraction=1.1"),
        ({"fraction": float("nan")}, "fraction=nan"),
        ({"dropout": -0.1}, "dropout"),
        ({"over": 0.9}, "over=0.9"),
        ({"fewest": 11}, "fewest"),
        ({"fewest": 3, "fraction": 0.2}, "fraction=0.2 selects 2"),
        ({"deadline": 0}, "deadline"),
        ({"beat": 5, "silence": 6}, "silence=6"),
        ({"poisson": True, "over": 1.3}, "Poisson"),
        ({"buffer": 11}, "buffer"),
        ({"buffer": 2, "over": 2}, "over cannot go with buffer=2"),
        ({"buffer": 2, "poisson": True}, "poisson cannot go with buffer=2"),
    ],
)
def test_plans_that_make_no_sense_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RoundPlan(**({"clients": 10} | fields))


@pytest.mark.parametrize("fields", [{"seconds": 0}, {"sigma": -1}, {"sigma": 11}, {"bandwidth": 0}])
def test_speeds_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ClientSpeeds(**fields)
