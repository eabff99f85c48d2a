"""Who gets which examples: nothing lost, nothing twice, and the random state that fixes it."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import DataError
from offbeat.protocols.partition import batches_of_parts, dirichlet, mine, mixed, order, share
from offbeat.runtime.state.random_state import Lent, capture, packed, restore, seed_everything, seeded, unpacked
from offbeat.runtime.state.tensor_tree import put_together, take_apart

labels = st.lists(st.integers(0, 4), min_size=0, max_size=60)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_shares_are_contiguous_complete_and_differ_by_at_most_one(count: int, size: int) -> None:
    ranges = [share(count, rank, size) for rank in range(size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


@given(st.lists(st.integers()), st.integers(1, 9))
def test_slices_of_a_batch_put_together_are_the_batch(batch: list[int], size: int) -> None:
    assert [item for rank in range(size) for item in mine(batch, rank, size)] == batch


@given(st.integers(0, 300), st.integers(-(2**63), 2**63 - 1), st.integers(0, 5))
def test_an_epochs_order_is_a_permutation_fixed_by_seed_and_epoch(count: int, seed: int, epoch: int) -> None:
    first = order(count, seed, epoch)
    assert sorted(first.tolist()) == list(range(count))
    assert first.tolist() == order(count, seed, epoch).tolist()


def test_every_epoch_and_every_seed_has_an_order_of_its_own() -> None:
    seen = {tuple(order(50, seed, epoch).tolist()) for seed in range(6) for epoch in range(6)}
    assert len(seen) == 36


@given(st.integers(0, 2**64 - 1), st.integers(0, 3), st.integers(0, 3))
def test_mixed_numbers_of_different_length_or_order_give_different_seeds(seed: int, one: int, two: int) -> None:
    made = [mixed(seed), mixed(seed, 0), mixed(seed, 0, 0), mixed(0, seed), mixed(seed, one + 1, two), mixed(one, 7)]
    inputs = [(seed,), (seed, 0), (seed, 0, 0), (0, seed), (seed, one + 1, two), (one, 7)]
    assert len(set(made)) == len(set(inputs))
    assert all(0 <= number < 2**63 for number in made)


def test_a_large_number_is_not_taken_for_two_small_ones() -> None:
    assert mixed(5 + 3 * 2**32) != mixed(5, 3)
    assert order(20, 5 + 3 * 2**32, 0).tolist() != order(20, 5, 3).tolist()


@given(labels, st.integers(1, 8), st.floats(1e-6, 1e4), st.integers(0, 100))
def test_skewed_parts_are_disjoint_complete_and_none_is_empty_needlessly(
    known: list[int], size: int, alpha: float, seed: int
) -> None:
    parts = dirichlet(known, size, alpha, seed)
    assert len(parts) == size
    assert sorted(int(i) for part in parts for i in part) == list(range(len(known)))
    lengths = [len(part) for part in parts]
    assert min(lengths) > 0 or max(lengths) <= 1
    again = dirichlet(known, size, alpha, seed)
    assert all(np.array_equal(one, two) for one, two in zip(parts, again, strict=True))


def _skew(alpha: float) -> float:
    """The mean share of a part's most common label, over some seeds."""
    known = np.repeat(np.arange(5), 200)
    shares = [
        np.bincount(known[part], minlength=5).max() / len(part)
        for seed in range(8)
        for part in dirichlet(known, 4, alpha, seed)
    ]
    return float(np.mean(shares))


def test_small_alpha_skews_parts_and_large_alpha_evens_them_out() -> None:
    assert _skew(0.05) > 0.6 > 0.45 > _skew(1.0) > _skew(1000.0)
    assert _skew(1000.0) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_no_positive_number_is_refused(alpha: float) -> None:
    with pytest.raises(DataError, match=r"alpha must be a number above 0"):
        dirichlet([0, 1], 2, alpha, 0)


@pytest.mark.parametrize("alpha", [1e-300, 1e300])
def test_extreme_alphas_still_lose_nothing(alpha: float) -> None:
    parts = dirichlet([0, 1] * 20, 3, alpha, 0)
    assert sorted(int(i) for part in parts for i in part) == list(range(40))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 20), st.integers(0, 9))
def test_uneven_parts_end_together_with_no_lost_example(lengths: list[int], batch: int, seed: int) -> None:
    starts = np.cumsum([0, *lengths])
    parts = [np.arange(start, start + count) for start, count in zip(starts, lengths, strict=False)]
    rounds = list(batches_of_parts(parts, batch, seed, epoch=1))
    assert len(rounds) == -(-sum(lengths) // batch)
    assert all(len(slices) == len(parts) for slices in rounds)
    for rank, part in enumerate(parts):
        assert sorted(int(i) for slices in rounds for i in slices[rank]) == part.tolist()


def test_uneven_parts_are_reshuffled_each_epoch() -> None:
    parts = [np.arange(30), np.arange(30, 35)]
    first, again, second = ([s[0].tolist() for s in batches_of_parts(parts, 5, 3, epoch)] for epoch in (1, 1, 2))
    assert first == again != second


# -- random state ----------------------------------------------------------------------------------------------------


def _draw() -> list[float]:
    return [torch.rand(()).item(), torch.randn(3)[2].item(), np.random.randn(), random.gauss(0, 1), random.random()]


def test_random_state_survives_a_round_trip() -> None:
    seed_everything(3)
    _draw()
    state = capture()
    expected = [_draw() for _ in range(3)]
    tensors: dict[str, torch.Tensor] = {}
    data = take_apart(state, "random", tensors)
    restore(put_together(data, tensors))
    assert [_draw() for _ in range(3)] == expected


def test_packed_random_state_goes_on_elsewhere_where_it_was() -> None:
    generator = torch.Generator().manual_seed(4)
    seed_everything(9)
    _draw()
    random.gauss(0, 1)  # It keeps the second of a pair, as NumPy does.
    np.random.randn()
    row = packed(capture([generator]))
    expected = [_draw(), random.gauss(0, 1), float(np.random.randn()), float(torch.rand((), generator=generator))]
    seed_everything(10)
    _draw()
    like = capture([generator])
    assert len(packed(like)) == len(row)
    restore(unpacked(row, like), [generator])
    again = [_draw(), random.gauss(0, 1), float(np.random.randn()), float(torch.rand((), generator=generator))]
    assert again == expected


def test_lent_random_state_runs_on_and_leaves_the_processs_own_alone() -> None:
    lent, again, other = (Lent(seeded(seed)) for seed in (1, 1, 2))
    seed_everything(9)
    undisturbed = [_draw() for _ in range(2)]
    seed_everything(9)
    drawn: list[list[float]] = []
    for one in (lent, lent, again, other):
        with one.use():
            drawn.append(_draw())
    assert drawn[0] == drawn[2] != drawn[3]
    assert drawn[0] != drawn[1]
    with pytest.raises(ZeroDivisionError), lent.use():
        _ = random.random() / 0
    assert [_draw() for _ in range(2)] == undisturbed
