"""Sums of statistics on servers: what a shard has not used is not forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.strategies._serving import Row
from offbeat.strategies.server import _Totals  # pyright: ignore[reportPrivateUsage]

SHARDS = 2


class Servers:
    """Stands in for a worker's exchange and its servers, of which some do not use a push."""

    def __init__(self) -> None:
        self.client = SimpleNamespace(plan=SimpleNamespace(shards=SHARDS))
        self.first_states: Any = None
        self.unused: set[int] = set()
        self.deaf: set[int] = set()
        """Shards that are too late for the next push, or refuse it."""
        self.settled = 0
        self.row: Any = None
        self._held = torch.empty(0)

    def open(self, row: Row) -> None:
        self.row, self._held = row, row.values.clone()

    def gradient(self) -> int:
        return 0

    def push(self, slot: int, then_pull: bool) -> int:
        assert (slot, then_pull) == (0, True)
        change = self.row.parameters[0].grad
        for shard in set(range(SHARDS)) - self.deaf:
            self.row.shard(self._held, shard).add_(self.row.shard(change, shard))
        return 1

    def arrive(self, pull: int) -> None:
        assert pull == 1
        self.row.values.copy_(self._held)

    def settle(self, slot: int) -> None:
        """Only the answer to the push itself says what became of it."""
        self.settled += 1
        self.unused |= self.deaf


@pytest.mark.parametrize("deaf", [{0}, {1}, {0, 1}], ids=str)
def test_what_a_shard_has_not_used_comes_with_the_next_push(deaf: set[int]) -> None:
    servers: Any = Servers()
    told: list[dict[str, Tensor]] = [
        {"count": torch.tensor([1.0, 2.0]), "sum": torch.tensor([[3.0], [4.0]])},
        {"count": torch.tensor([5.0, 7.0]), "sum": torch.tensor([[9.0], [1.0]])},
        {"count": torch.tensor([2.0, 2.0]), "sum": torch.tensor([[2.0], [8.0]])},
    ]
    servers.deaf = deaf
    totals = _Totals(servers, told[0])
    totals.total(told[0])
    servers.deaf = set()
    for statistics in told[1:]:
        found = totals.total(statistics)
        assert all(torch.equal(found[name], statistics[name]) for name in statistics)
    assert servers.settled == 3
