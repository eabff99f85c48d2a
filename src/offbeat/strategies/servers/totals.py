"""Statistics summed on servers, for tasks without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offbeat.protocols.servers.worker.rhythm import Action, EveryStep
from offbeat.runtime.servers.shard_state import first_state
from offbeat.runtime.servers.updater import ADD, Recipe
from offbeat.strategies.servers.driver import ServerDriver
from offbeat.strategies.servers.link import ServerLink
from offbeat.strategies.servers.parameter_row import ParameterRow, refuse_different_models
from offbeat.strategies.servers.push_queue import PushQueue


def added_up(link: ServerLink, row: ParameterRow) -> ServerDriver:
    """A row that servers hold, and to which they add what is pushed, without an optimizer."""
    refuse_different_models(link.group, row, None)
    driver = ServerDriver(link, row, EveryStep(), PushQueue(link, row), row.values)
    recipe = Recipe(optimizer=ADD, kind=row.kind)
    driver.put([first_state(recipe, shard) for shard in row.shards(row.values)])
    return driver


class ServerTotals:
    """Statistics of all workers, summed on servers.

    A worker pushes the difference to the statistics that it pushed last, so that the sum on the servers always has
    every worker's latest, however often each of them pushes (incremental EM: Neal and Hinton 1998).
    """

    def __init__(
        self, put: Callable[[ParameterRow], ServerDriver], statistics: Mapping[str, Tensor], shards: int
    ) -> None:
        self._names = sorted(statistics)
        flat = self._flat(statistics)
        self._last = torch.zeros_like(flat)
        self._row = ParameterRow([torch.nn.Parameter(torch.zeros_like(flat), requires_grad=False)], shards)
        self.driver = put(self._row)
        """The sums on the servers."""

    def _flat(self, statistics: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([statistics[name].detach().double().reshape(-1) for name in self._names])

    def take_over(self) -> None:
        """Make the first live worker responsible for the dead workers' share of the sums on servers."""
        self.driver.together()
        group = self.driver.link.group
        living = group.sum(self._last.clone(), "the live workers' statistics")
        if group.rank == min(group.membership.present):
            self._last += self._row.values - living

    def total(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Push the changes, and read the sums."""
        flat, link, queue = self._flat(statistics), self.driver.link, self.driver.queue
        self._row.parameters[0].grad = flat - self._last
        slot = queue.gradient()
        link.record.unused.clear()
        self.driver.perform((Action.PUSH_AND_PULL, Action.AWAIT, Action.SETTLE), lambda: slot)
        # What a shard has discarded is part of the next difference; otherwise it would be lost.
        for shard in set(range(link.shards)) - link.record.unused:
            self._row.shard(self._last, shard).copy_(self._row.shard(flat, shard))
        pieces = self._row.values.clone().split([statistics[name].numel() for name in self._names])
        return {
            name: piece.view(statistics[name].shape).to(statistics[name].dtype)
            for name, piece in zip(self._names, pieces, strict=True)
        }
