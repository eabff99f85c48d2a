"""A worker's own steps by a program, between two reads of the servers' values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs
from torch import Tensor

from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.messages import Settings
from offbeat.protocols.servers.replica.works import Update
from offbeat.runtime.servers.updater import GradientSum, Recipe, Updater
from offbeat.strategies.servers.parameter_row import ParameterRow


class OwnUpdates:
    """What servers do with this worker's pushes, done on its own copy of the values, so that it reads its writes.

    Its states have seen this worker's gradients only; the next read replaces the values, not the states.
    """

    def __init__(self, row: ParameterRow, recipes: Sequence[Recipe]) -> None:
        self._row = row
        self._sums = [GradientSum(np.zeros_like(values.numpy())) for values in row.shards(row.values)]
        self._updaters = [
            Updater(structs.replace(recipe, coders=()), values.numpy(), total, owns=False)
            for recipe, values, total in zip(recipes, row.shards(row.values), self._sums, strict=True)
        ]

    def step(
        self, gradient: Tensor, absent: set[int], settings: Settings, workers: int, totals: tuple[float, ...] = ()
    ) -> None:
        """Take a step; where a result is not finite, the servers refuse the push, and nothing changes here either."""
        missing = [self._row.parameters[number] for number in sorted(absent)]
        for shard, (updater, part) in enumerate(zip(self._updaters, self._row.shards(gradient), strict=True)):
            raw = part.numpy().view(np.uint8)
            gaps = self._row.ranges(missing, shard) if missing else ()
            scale, payload = 1 / workers, Payload(raw.nbytes, raw)
            updater.update(Update(1, scale, settings, payload=payload, absent=gaps, workers=workers, totals=totals), 0)
            self._sums[shard].restart()

    def state(self) -> list[dict[str, Any]]:
        """The states of each shard's program."""
        return [updater.state() for updater in self._updaters]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore them."""
        for updater, state in zip(self._updaters, states, strict=True):
            updater.load(state)
