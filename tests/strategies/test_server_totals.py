"""Sums of statistics on servers: what a shard has not used is not forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.protocols.servers.worker.rhythm import RhythmAction
from offbeat.strategies.server import ServerTotals
from offbeat.strategies.servers.parameter_row import ParameterRow

SHARDS = 2


class Servers:
    """Stands in for a worker's link, queue and driver, with servers of which some do not use a push."""

    def __init__(self, shared: list[Tensor] | None = None) -> None:
        self.shards = SHARDS
        self.record = SimpleNamespace(unused=set[int]())
        self.link = self.queue = self
        self.deaf: set[int] = set()
        """Shards that are too late for the next push, or refuse it."""
        self.settled = 0
        self.group: Any = None
        self.row: Any = None
        self._shared = [] if shared is None else shared

    def put(self, row: ParameterRow) -> Any:
        self.row = row
        if not self._shared:
            self._shared.append(row.values.clone())
        self._held = self._shared[0]
        return self

    def gradient(self) -> int:
        return 0

    def perform(self, actions: Sequence[RhythmAction], slot: Callable[[], int]) -> None:
        assert slot() == 0
        for action in actions:
            {
                RhythmAction.PUSH_AND_PULL: self.push,
                RhythmAction.AWAIT: self.together,
                RhythmAction.SETTLE: self.settle,
            }[action]()

    def push(self) -> None:
        change = self.row.parameters[0].grad
        for shard in set(range(SHARDS)) - self.deaf:
            self.row.shard(self._held, shard).add_(self.row.shard(change, shard))

    def together(self) -> None:
        self.row.values.copy_(self._held)

    def settle(self) -> None:
        """Only the answer to the push itself says what became of it."""
        self.settled += 1
        self.record.unused |= self.deaf


@pytest.mark.parametrize("deaf", [{0}, {1}, {0, 1}], ids=str)
def test_what_a_shard_has_not_used_comes_with_the_next_push(deaf: set[int]) -> None:
    servers: Any = Servers()
    told: list[dict[str, Tensor]] = [
        {"count": torch.tensor([1.0, 2.0]), "sum": torch.tensor([[3.0], [4.0]])},
        {"count": torch.tensor([5.0, 7.0]), "sum": torch.tensor([[9.0], [1.0]])},
        {"count": torch.tensor([2.0, 2.0]), "sum": torch.tensor([[2.0], [8.0]])},
    ]
    servers.deaf = deaf
    totals = ServerTotals(servers.put, told[0], SHARDS)
    totals.total(told[0])
    servers.deaf = set()
    for statistics in told[1:]:
        found = totals.total(statistics)
        assert all(torch.equal(found[name], statistics[name]) for name in statistics)
    assert servers.settled == 3


class Living:
    """Stands in for the group of those who live, one after the other: what they bring to the sum is known."""

    def __init__(self, rank: int, brought: Tensor) -> None:
        self.rank, self.membership, self._brought = rank, SimpleNamespace(present=(0, 2)), brought

    def sum(self, _mine: Tensor, _what: str) -> Tensor:
        return self._brought


def test_what_the_dead_have_told_is_taken_back_by_one_of_the_living() -> None:
    shared: list[Tensor] = []
    workers: list[Any] = [Servers(shared) for _ in range(3)]
    told = [{"count": torch.tensor([float(rank + 1), 10.0 * rank])} for rank in range(3)]
    totals = [ServerTotals(worker.put, mine, SHARDS) for worker, mine in zip(workers, told, strict=True)]
    for of_worker, mine in zip(totals, told, strict=True):
        of_worker.total(mine)
    assert shared[0].tolist() == [6.0, 30.0]
    living = (told[0]["count"] + told[2]["count"]).double()  # Worker 1 has died.
    for rank in (0, 2):
        workers[rank].group = Living(rank, living)
        totals[rank].take_over()
    totals[0].total({"count": torch.tensor([100.0, 1.0])})
    found = totals[2].total({"count": torch.tensor([200.0, 2.0])})
    assert found["count"].tolist() == [300.0, 3.0]
