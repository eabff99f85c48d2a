"""The best cut for what layers took in a run, and what it would have brought."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from offbeat.simulate.stage_balance import cut_advice


def split_of(
    alone: Sequence[float], bounds: Sequence[int], factors: Sequence[float], criterion: float = 0.0
) -> dict[str, Any]:
    """A run whose parts took `factors` times as long as their layers alone, the last one `criterion` more."""
    parts = [factor * sum(alone[start:stop]) for (start, stop), factor in zip(pairwise(bounds), factors, strict=True)]
    parts[-1] += criterion
    return {
        "schedule": "one_f_one_b",
        "microbatches": 8,
        "bounds": list(bounds),
        "stages": [{"parts": [{"forward_seconds": each, "backward_seconds": 2 * each}]} for each in parts],
        "costs": [
            {
                "name": f"layer {number}",
                "forward_seconds": each,
                "backward_seconds": 2 * each,
                "crossing_bytes": 100,
                "parameter_bytes": 0,
            }
            for number, each in enumerate(alone)
        ],
    }


def test_layers_move_from_the_stage_that_was_slowest_in_the_run() -> None:
    # Measured alone the cut was even; in the run the criterion makes the second part slower.
    advice = cut_advice(split_of([0.01] * 8, (0, 4, 8), (1.0, 1.0), criterion=0.02), {})
    assert advice is not None
    assert advice.slowest_seconds == pytest.approx(3 * 0.06)
    assert advice.better == ("layer 5",)
    assert advice.better_slowest_seconds == pytest.approx(3 * 0.05)
    assert advice.step_seconds == pytest.approx(3 * (0.04 + 8 * 0.06))
    assert advice.better_step_seconds == pytest.approx(3 * (9 * 0.05))
    assert "cut before layer 5 instead" in advice.words
    assert "(1.16x as fast)" in advice.words


def test_no_cut_is_better_than_an_even_one() -> None:
    advice = cut_advice(split_of([0.01] * 8, (0, 4, 8), (1.3, 1.3)), {"latency_seconds": 1e-5, "bytes_per_second": 1e9})
    assert advice is not None
    assert advice.better == ()
    assert "no other cut" in advice.words


def test_without_measured_layers_there_is_no_advice() -> None:
    split = split_of([0.01] * 4, (0, 2, 4), (1.0, 1.0))
    for cost in split["costs"]:
        cost["forward_seconds"] = 0.0
    assert cut_advice(split, {}) is None
