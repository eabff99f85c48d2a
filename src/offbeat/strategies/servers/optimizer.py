"""The optimizer that servers run on their shards: its settings, and the state that they take over from the worker's.

Servers continue from the state that the worker's optimizer has when training begins, cut into what each shard needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.compression import AnyFormat
from offbeat.protocols.partition import mixed
from offbeat.protocols.servers.messages import Settings
from offbeat.runtime.servers.shard_state import first_state
from offbeat.runtime.servers.updater import Recipe, is_number
from offbeat.strategies.compressors import Compressing
from offbeat.strategies.servers.parameter_row import ParameterRow

Groups = tuple[dict[str, Any], ...]
Range = tuple[int, int]
State = dict[str, Any]


class ServerOptimizer:
    """A worker's optimizer as servers run it: they are told its settings, and when those change."""

    def __init__(
        self,
        optimizer: Optimizer,
        runs: Callable[[Optimizer], tuple[str, Groups]],
        strategy: object,
        tolerance: Mapping[str, Any],
    ) -> None:
        self._optimizer, self._runs, self._strategy, self._tolerance = optimizer, runs, strategy, tolerance
        self._groups = len(self.now())
        self._sent: Settings = ()

    def now(self) -> Settings:
        """The current settings of its groups."""
        return tuple(
            {
                name: tuple(map(float, cast("Sequence[float]", value))) if isinstance(value, list) else float(value)
                for name, value in group.items()
                if is_number(value)
            }
            for group in self._runs(self._optimizer)[1]
        )

    def changed(self, aggregated: bool) -> Settings:
        """The current settings; where all workers make a step together (`aggregated`), only if they have changed."""
        now = self.now()
        if len(now) != self._groups:
            raise StrategyError(
                f"the optimizer had {self._groups} parameter groups when it was given to prepare(), and has {len(now)} "
                f"now. {self._strategy} told its servers then which parameters they update, so the others would never "
                f"change. Put all into its groups before, frozen (requires_grad_(False)) until they are to learn, or "
                f"use allreduce."
            )
        if now == self._sent and aggregated:  # Otherwise the settings of the last worker to push would hold.
            return ()
        self._sent = now
        return now

    def first_states(self, row: ParameterRow, recipes: Sequence[Recipe]) -> list[NDArray[np.uint8]]:
        """The initial state of each shard."""
        return [first_of(self._optimizer, recipe, row, shard) for shard, recipe in enumerate(recipes)]

    def recipes(self, row: ParameterRow, shards: int, compressions: Sequence[Compressing], seed: int) -> list[Recipe]:
        """How each shard is updated."""
        formats = tuple(compression.format() for compression in compressions)
        if None in formats:
            raise StrategyError(
                f"servers must be told how to decode messages, and one of {', '.join(map(str, compressions))} has no "
                f"`format()`. Use allreduce, whose workers have its coder."
            )
        groups = self._optimizer.param_groups
        name, settings = self._runs(self._optimizer)
        return [
            Recipe(
                optimizer=name,
                kind=row.kind,
                ranges=tuple(row.ranges(group["params"], shard) for group in groups),
                pieces=tuple(row.ranges(group["params"], shard, joined=False) for group in groups),
                settings=settings,
                coders=cast("tuple[AnyFormat, ...]", formats),
                seed=mixed(seed, shard),
                **self._tolerance,
            )
            for shard in range(shards)
        ]


def first_of(optimizer: Optimizer, recipe: Recipe, row: ParameterRow, shard: int) -> NDArray[np.uint8]:
    """The initial state of a shard: its part of the row and, if servers run the same optimizer, of that one's state.

    Adjacent parameters that the recipe has joined stay joined if their states can be concatenated; where they differ
    (one has made more steps than the other, say) each parameter keeps its own.
    """
    values = row.shard(row.values, shard)
    if recipe.optimizer != type(optimizer).__name__:
        return first_state(recipe, values)
    pieces = [[(place, _state_of(optimizer, row, shard, place)) for place in group] for group in recipe.pieces]
    joined = zip(recipe.ranges, pieces, strict=True)
    states = [_concatenated(place, group) for places, group in joined for place in places]
    if any(state is None for state in states):
        recipe = msgspec.structs.replace(recipe, ranges=recipe.pieces)
        states = [state for group in pieces for _, state in group]
    return first_state(recipe, values, {number: state for number, state in enumerate(states) if state})


def _state_of(optimizer: Optimizer, row: ParameterRow, shard: int, place: Range) -> State:
    """The optimizer's state of the numbers in this range, which belong to one parameter."""
    start = row.bounds[shard] + place[0]
    number = bisect_right(row.offsets, start) - 1
    first = start - row.offsets[number]
    state: Mapping[str, Any] = optimizer.state.get(row.parameters[number], {})
    return {
        name: value.detach().reshape(-1)[first : first + place[1] - place[0]] if _is_row(name, value) else value
        for name, value in state.items()
    }


def _is_row(name: str, value: Any) -> bool:
    """Whether it is elementwise; a count of steps is one number for the whole parameter."""
    return isinstance(value, Tensor) and name != "step"


def _concatenated(place: Range, group: Sequence[tuple[Range, State]]) -> State | None:
    """The states of the parameters in a range as one; None if they differ in more than their rows."""
    states = [state for (low, high), state in group if place[0] <= low and high <= place[1]]
    first = states[0]
    rows = {name for name in first if _is_row(name, first[name])}
    for state in states:
        alike = set(state) == set(first) and {name for name in state if _is_row(name, state[name])} == rows
        if not alike or any(state[name] != first[name] for name in set(first) - rows):
            return None
    return {name: torch.cat([state[name] for state in states]) if name in rows else first[name] for name in first}
