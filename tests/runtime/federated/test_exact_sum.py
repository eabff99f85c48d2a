"""Sums that are the same in any order and in any division over workers, and right to 1e-12."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.runtime.federated.aggregation import ClientUpdate, ExactMean, Selected, UpdateLayout, alone
from offbeat.runtime.federated.exact_sum import LARGEST, ExactSum

NUMBERS = st.one_of(
    st.floats(-LARGEST, LARGEST, width=32),
    st.floats(-(2.0**-10), 2.0**-10, width=32),
    st.sampled_from([0.0, LARGEST, -LARGEST]),
)
UPDATES = st.lists(
    st.tuples(st.lists(NUMBERS, min_size=3, max_size=3), st.integers(1, 50_000)), min_size=1, max_size=12
)


def total(updates: list[tuple[list[float], int]], whole: int) -> Tensor:
    sums = ExactSum(torch.zeros(3, dtype=torch.int64), whole)
    for vector, weight in updates:
        assert sums.add(torch.tensor(vector), weight)
    return sums.settle()


@given(updates=UPDATES, order=st.randoms(use_true_random=False), cut=st.integers(0, 12))
def test_any_order_and_division_gives_the_same_integers(
    updates: list[tuple[list[float], int]], order: random.Random, cut: int
) -> None:
    whole = sum(weight for _, weight in updates)
    expected = total(updates, whole).clone()
    shuffled = list(updates)
    order.shuffle(shuffled)
    assert torch.equal(total(shuffled, whole), expected)
    assert torch.equal(total(shuffled[:cut], whole) + total(shuffled[cut:], whole), expected)


@given(updates=UPDATES)
def test_a_mean_is_exact_to_a_trillionth(updates: list[tuple[list[float], int]]) -> None:
    whole = sum(weight for _, weight in updates)
    sums = ExactSum(torch.zeros(3, dtype=torch.int64), whole)
    for vector, weight in updates:
        sums.add(torch.tensor(vector), weight)
    for place, found in enumerate((sums.read() / whole).tolist()):
        exact = sum(Fraction(vector[place]) * weight for vector, weight in updates) / whole
        # Half a unit for each term, and the rounding of a 64-bit number.
        assert abs(Fraction(found) - exact) <= Fraction(len(updates), 2**40) + abs(exact) / 2**51


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2 * LARGEST, -2 * LARGEST, 1e38])
def test_what_cannot_be_summed_changes_nothing(bad: float) -> None:
    sums = ExactSum(torch.zeros(3, dtype=torch.int64), 4)
    assert sums.add(torch.tensor([1.0, 2.0, 3.0]), 1)
    assert not sums.add(torch.tensor([1.0, bad, 3.0]), 1)
    assert sums.read().tolist() == [1, 2, 3]


def test_the_largest_numbers_of_the_heaviest_clients_do_not_overflow() -> None:
    sums = ExactSum(torch.zeros(2, dtype=torch.int64), 3 * 10**9)
    for _ in range(3):
        assert sums.add(torch.tensor([LARGEST, -LARGEST]), 10**9)
    assert (sums.read() / 3e9).tolist() == [LARGEST, -LARGEST]


def test_sums_beyond_what_floating_point_has_bits_for_are_exact() -> None:
    weight, count, number = 2**25 + 1, 40, 2.0**17 - 2.0**-7
    sums = ExactSum(torch.zeros(1, dtype=torch.int64), weight * count)
    for _ in range(count):
        assert sums.add(torch.tensor([number]), weight)
    assert Fraction(int(sums.settle())) == count * weight * Fraction(number) * Fraction(sums.unit)


LAYOUT = UpdateLayout(2, 2, torch.float32)


def update(values: list[float], weight: float, loss: float = 1.0, extra: list[float] | None = None) -> ClientUpdate:
    more = None if extra is None else torch.tensor(extra)
    return ClientUpdate(0, torch.tensor(values), more, weight, loss, int(weight))


def test_a_mean_is_by_weight_and_further_vectors_are_summed() -> None:
    mean = ExactMean(UpdateLayout(2, 2, torch.float32, extra=True))
    mean.begin(Selected(1, [0, 1], [1, 3]))
    assert mean.add(update([1, 0], 1, 2.0, [1, 1]))
    assert mean.add(update([0, 4], 3, 4.0, [2, 3]))
    assert not mean.add(update([0, 4], 3)), "a further vector is missing"
    assert not mean.add(update([0, 4], 3, 1.0, [math.nan, 0]))
    mean.combine(alone)
    average, extra = mean.mean()
    assert average.tolist() == [0.25, 3]
    assert extra is not None
    assert extra.tolist() == [3, 4]
    assert (mean.updates, mean.examples, mean.loss) == (2, 4, 3.5)


def test_workers_combine_their_parts_and_each_round_begins_anew() -> None:
    parts = [ExactMean(LAYOUT), ExactMean(LAYOUT)]
    for number in (1, 2):
        rows: list[Tensor] = []
        for rank, part in enumerate(parts):
            part.begin(Selected(number, [0, 1], [2, 2]))
            assert part.add(update([float(rank + number), 1], 2))
            part.combine(lambda row, _, rows=rows: rows.append(row.clone()))
        joined = rows[0] + rows[1]
        for part in parts:
            part.combine(lambda row, _, joined=joined: row.copy_(joined))
            assert part.updates == 2
            assert part.mean()[0].tolist() == [number + 0.5, 1]


def test_a_loss_that_is_not_finite_does_not_spoil_the_mean_loss() -> None:
    mean = ExactMean(LAYOUT)
    mean.begin(Selected(1, [0, 1], [1, 1]))
    mean.add(update([0, 0], 1, math.nan))
    assert math.isnan(mean.loss)
    mean.add(update([0, 0], 1, 3.0))
    mean.combine(alone)
    assert (mean.loss, mean.updates) == (3.0, 2)
