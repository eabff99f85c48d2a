"""The noise in gradients: what the two-size estimates say of noise that is known, and how sure they are of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from loader_feed import Feed
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from offbeat.errors import DataError
from offbeat.runtime.data.label_skew import Parts
from offbeat.runtime.data.loaders import Share, divide
from offbeat.scaling._batch_size import Noise, largest_batch, noise_of, worth


def population(examples: int, dimensions: int, noise: float, seed: int) -> np.ndarray:
    """Gradients of single examples, one a row, with exactly this noise scale."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((examples, dimensions))
    rows -= rows.mean(axis=0)
    rows *= math.sqrt(noise / np.square(rows).sum(axis=1).mean())
    rows[:, 0] += 1.0
    return rows


def measured(rows: np.ndarray, steps: int, slices: tuple[int, ...], seed: int) -> dict[str, Any]:
    """What a run would measure whose workers have slices of these lengths of every batch."""
    random = np.random.default_rng(seed)
    batch = sum(slices)
    within, joint = [], []
    for _ in range(steps):
        drawn = rows[random.choice(len(rows), batch, replace=False)]
        parts = np.split(drawn, np.cumsum(slices)[:-1])
        within.append(sum(len(part) * np.square(part.mean(axis=0)).sum() for part in parts) / batch)
        joint.append(np.square(drawn.mean(axis=0)).sum())
    counts = {"batch": [batch] * steps, "parts": [len(slices)] * steps, "examples": len(rows)}
    return counts | {"within": within, "joint": joint}


@pytest.mark.parametrize("slices", [(16, 16), (30, 2), (8, 8, 8, 8)])
def test_noise_from_slices_is_that_of_single_examples(slices: tuple[int, ...]) -> None:
    rows = population(400, 60, noise=50.0, seed=0)
    found = noise_of(measured(rows, 3000, slices, seed=1)).scale()
    assert found.value == pytest.approx(50, rel=0.07)
    assert found.high - found.low < 0.15 * found.value


def test_ninety_percent_intervals_hold_the_noise_about_that_often() -> None:
    rows = population(400, 60, noise=50.0, seed=0)
    steps = noise_of(measured(rows, 6000, (16, 16), seed=3))
    found = [stage.scale() for stage in steps.stages(60)]
    held = [one.low <= 50 <= one.high for one in found]
    assert 0.8 <= np.mean(held) <= 1
    assert all(one.low <= one.value <= one.high for one in found)


def test_a_gradient_that_cannot_be_told_from_noise_has_no_upper_end() -> None:
    random = np.random.default_rng(0)
    found = Noise(1 + 0.1 * random.standard_normal(50), 0.01 * random.standard_normal(50)).scale()
    assert found.high == math.inf
    assert 10 < found.low < found.value
    assert Noise(np.array([1.0, 1.0]), np.array([-1.0, -1.0])).scale().value == math.inf


def test_steps_that_only_one_worker_had_examples_for_are_left_out() -> None:
    rows = population(100, 5, noise=4.0, seed=0)
    told = measured(rows, 20, (4, 4), seed=0)
    told["parts"][3] = 1
    assert len(noise_of(told)) == 19


def test_an_example_of_the_largest_batch_counts_what_delta_says() -> None:
    for noise in (0.0, 10.0, 1e4):
        for delta in (0.1, 0.25, 1.0):
            assert worth(largest_batch(noise, delta), noise) == pytest.approx(1 / (1 + delta))
    assert worth(64, math.inf) == 1


def divided(merge: int = 1, afresh: bool = False, epochs: int = 1) -> list[list[list[int]]]:
    """What each of two workers gets of 23 numbered examples in batches of 4."""
    found = []
    for rank in range(2):
        loader = DataLoader(TensorDataset(torch.arange(23)), batch_size=4, shuffle=True)
        share = Share(rank, 2, 5, 0, merge=merge, afresh=afresh)
        mine = divide(loader, [share], Feed(), Parts())
        found.append([batch[0].tolist() for _ in range(epochs) for batch in mine])
    return found


def test_merged_batches_are_the_loaders_own_side_by_side() -> None:
    small, merged = divided(), divided(merge=3)
    whole = [first + second for first, second in zip(*small, strict=True)]
    large = [first + second for first, second in zip(*merged, strict=True)]
    assert [len(batch) for batch in large] == [12, 11]
    assert set(large[0]) == {index for batch in whole[:3] for index in batch}


def test_batches_drawn_afresh_are_parted_and_do_not_wait_for_a_pass_to_end() -> None:
    drawn = [first + second for first, second in zip(*divided(afresh=True, epochs=3), strict=True)]
    assert [len(batch) for batch in drawn] == [4, 4, 4, 4, 4, 3] * 3
    assert all(len(set(batch)) == len(batch) for batch in drawn)
    assert len({index for batch in drawn[:6] for index in batch}) < 23  # A pass would have had all of them.
    assert {index for batch in drawn for index in batch} <= set(range(23))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(10))


def test_batches_that_come_finished_cannot_be_merged() -> None:
    for loader in (DataLoader(Endless(), batch_size=2), [torch.arange(4)]):
        with pytest.raises(DataError, match="one batch of 2"):
            divide(loader, [Share(0, 2, 5, 0, merge=2)], Feed(), Parts())
