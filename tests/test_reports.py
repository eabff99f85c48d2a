"""Metrics that all workers agree on, also while some of them die."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from offbeat.runtime.reports import Reports


class Dwindling:
    """Three equal workers of which one more dies before every exchange; `evaluated` is what each brings as weight."""

    rank = 0

    def __init__(self, evaluated: Sequence[float], values: Sequence[float]) -> None:
        self._others = list(zip(evaluated, values, strict=True))
        self._first = True

    def gather(self, row: Sequence[float], what: str) -> Tensor:
        del what
        mine = torch.tensor([row], dtype=torch.float64)
        if self._first:  # Names and evidence, which are the same on all.
            self._first = False
            return mine.repeat(1 + len(self._others), 1)
        self._others.pop()
        return torch.cat([mine, *(torch.tensor([pair], dtype=torch.float64) for pair in self._others)])


@pytest.mark.parametrize(("own_weight", "mean"), [(30, (30 * 0.5 + 10 * 0.9) / 40), (0, 0.9)])
def test_a_worker_that_dies_within_a_report_counts_with_neither_weight_nor_value(own_weight: int, mean: float) -> None:
    reports = Reports(cast("Any", Dwindling([10, 50], [0.9, 0.1])), *cast("Any", (None, None, None)))
    reports.evaluated = own_weight
    assert reports.mean({"score": 0.5}) == pytest.approx({"score": mean})
