"""What servers do with what is pushed: the optimizer that they run, how it is set, and what each shard begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.compression import AnyFormat
from offbeat.protocols.partition import mixed
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import Settings
from offbeat.runtime.gradients.sliceable_optimizers import ELEMENT_WISE, why_not
from offbeat.runtime.servers.shard_state import first_state
from offbeat.runtime.servers.updater import ADD, Recipe, is_number, settings_of
from offbeat.strategies.servers.optimizer_handoff import first_of, refuse_more_groups
from offbeat.strategies.servers.parameter_row import ParameterRow
from offbeat.strategies.worker.compression import Compressing

Groups = tuple[dict[str, Any], ...]


class ServerUpdate(Protocol):
    """How servers update their shards, by what a worker's optimizer is."""

    def check(self, optimizer: Optimizer) -> None:
        """Refuse optimizers that this cannot be done for."""
        ...

    def runs(self, optimizer: Optimizer) -> tuple[str, Groups]:
        """The optimizer that servers run, and what its groups are set to."""
        ...


class UsersOptimizer:
    """Servers run the user's own optimizer, each on a slice of the parameters."""

    def __init__(self, rule: Rule) -> None:
        self._by_rate = not rule.aggregated

    def check(self, optimizer: Optimizer) -> None:
        """Refuse optimizers that servers cannot run on a slice."""
        if why := why_not(type(optimizer), by_rate=self._by_rate):
            raise StrategyError(
                f"servers cannot run {type(optimizer).__name__}: each has only a slice of the parameters, and {why}. "
                f"Use one that treats every number by itself ({', '.join(ELEMENT_WISE)}), or allreduce."
            )

    def runs(self, optimizer: Optimizer) -> tuple[str, Groups]:
        """The same."""
        return type(optimizer).__name__, settings_of(optimizer)


class ServerOptimizer:
    """A worker's optimizer as servers know it: they are told what it is set to, and when that changes."""

    def __init__(
        self,
        optimizer: Optimizer,
        update: ServerUpdate,
        strategy: object,
        aggregated: bool,
        tolerance: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._optimizer, self._update, self._strategy = optimizer, update, strategy
        self._aggregated, self._tolerance = aggregated, tolerance
        self._groups = len(self.now())
        self._told: Settings = ()

    def now(self) -> Settings:
        """What its groups are set to."""
        return tuple(
            {
                name: tuple(map(float, cast("Sequence[float]", value))) if isinstance(value, list) else float(value)
                for name, value in group.items()
                if is_number(value)
            }
            for group in self._update.runs(self._optimizer)[1]
        )

    def changed(self) -> Settings:
        """What its groups are set to; where all make a step together, only if that has changed."""
        now = self.now()
        refuse_more_groups(len(now), self._groups, self._strategy)
        if now == self._told and self._aggregated:  # Else what the last one to push has told would hold for all.
            return ()
        self._told = now
        return now

    def first_states(
        self, row: ParameterRow, shards: int, compressions: Sequence[Compressing], seed: int
    ) -> list[NDArray[np.uint8]]:
        """What each shard begins with."""
        recipes = [self._recipe(row, shard, compressions, seed) for shard in range(shards)]
        return [first_of(self._optimizer, recipe, row, shard) for shard, recipe in enumerate(recipes)]

    def _recipe(self, row: ParameterRow, shard: int, compressions: Sequence[Compressing], seed: int) -> Recipe:
        """How a shard is updated."""
        groups = self._optimizer.param_groups
        name, settings = self._update.runs(self._optimizer)
        return Recipe(
            optimizer=name,
            kind=row.kind,
            ranges=tuple(row.ranges(group["params"], shard) for group in groups),
            pieces=tuple(row.ranges(group["params"], shard, joined=False) for group in groups),
            settings=settings,
            coders=_formats(compressions),
            seed=mixed(seed, shard),
            **self._tolerance,
        )


class Adding:
    """Servers add up what is pushed: no optimizer, and nothing to be set."""

    def now(self) -> Settings:
        """Nothing."""
        return ()

    def changed(self) -> Settings:
        """Nothing."""
        return ()

    def first_states(self, row: ParameterRow, shards: int) -> list[NDArray[np.uint8]]:
        """What each shard begins with."""
        recipe = Recipe(optimizer=ADD, kind=row.kind)
        return [first_state(recipe, row.shard(row.values, shard)) for shard in range(shards)]


def _formats(compressions: Sequence[Compressing]) -> tuple[AnyFormat, ...]:
    """How pushes are compressed, as servers are told."""
    formats = tuple(compression.format() for compression in compressions)
    if any(form is None for form in formats):
        raise StrategyError(
            f"servers must be told how to read letters, and one of {', '.join(map(str, compressions))} has no "
            f"`format()`. Use allreduce, whose workers have its coder."
        )
    return cast("tuple[AnyFormat, ...]", formats)
