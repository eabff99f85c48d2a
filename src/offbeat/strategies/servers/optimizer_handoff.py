"""What servers take over from an optimizer when training begins: its state, cut into what each needs of it.

A loop may load the momentum of an earlier run, and Adagrad begins with sums of its own. Servers run the optimizer from
there on, so they start with what it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.runtime.groups.group import Group
from offbeat.runtime.servers.shard_state import first_state
from offbeat.runtime.servers.updater import Recipe

if TYPE_CHECKING:
    from offbeat.strategies.servers.parameter_row import ParameterRow

Range = tuple[int, int]
State = dict[str, Any]


def first_of(optimizer: Optimizer, recipe: Recipe, row: ParameterRow, shard: int) -> NDArray[np.uint8]:
    """What a shard begins with: its part of the row and, if servers run the same optimizer, of that one's state.

    Neighbours that the recipe has joined stay so if their states can be laid side by side; where they differ (one has
    made more steps than the other, say) each parameter keeps its own.
    """
    values = row.shard(row.values, shard)
    if recipe.optimizer != type(optimizer).__name__:
        return first_state(recipe, values)
    found = [[(place, _state_of(optimizer, row, shard, place)) for place in group] for group in recipe.pieces]
    joined = zip(recipe.ranges, found, strict=True)
    states = [_side_by_side(place, group) for places, group in joined for place in places]
    if any(state is None for state in states):
        recipe = msgspec.structs.replace(recipe, ranges=recipe.pieces)
        states = [state for group in found for _, state in group]
    return first_state(recipe, values, {number: state for number, state in enumerate(states) if state})


def refuse_different_models(group: Group, row: ParameterRow, optimizer: Optimizer | None) -> None:
    """Refuse workers that do not train the same: servers have one row for all. All workers call this together."""
    groups = () if optimizer is None else tuple(len(one["params"]) for one in optimizer.param_groups)
    shapes = [tuple(p.shape) for p in row.parameters]
    under = "" if optimizer is None else f" under {type(optimizer).__name__} with {len(groups)} groups"
    mark = crc32(f"{shapes} {row.kind} {groups}{under}".encode())
    known = group.gather([float(mark), float(row.count), float(len(shapes))], "comparing the workers' models")
    if bool((known[:, 0] == mark).all()):
        return
    others = {(int(count), int(parts)) for other, count, parts in known.tolist() if other != mark}
    said = " or ".join(f"{count:,} in {parts}" for count, parts in sorted(others))
    raise StrategyError(
        f"the workers do not train the same: worker {group.rank} has {row.count:,} numbers ({row.kind}) in "
        f"{len(shapes)} parameters{under}; others have {said}, of other shapes, kinds or groups. Servers hold one "
        f"model for all: make it, and its optimizer, alike in every worker."
    )


def refuse_more_groups(now: int, known: int, strategy: object) -> None:
    """Refuse parameter groups that came or went after servers were told which numbers are in which."""
    if now != known:
        raise StrategyError(
            f"the optimizer had {known} parameter groups when it was given to prepare(), and has {now} now. {strategy} "
            f"has told its servers then which parameters they update, so that the others would never change. Put all "
            f"into its groups before, frozen (requires_grad_(False)) as long as they are not to learn, or use "
            f"allreduce."
        )


def _state_of(optimizer: Optimizer, row: ParameterRow, shard: int, place: Range) -> State:
    """What an optimizer knows of the numbers at this place, which are all of one parameter."""
    start = row.bounds[shard] + place[0]
    number = bisect_right(row.offsets, start) - 1
    parameter, first = row.parameters[number], start - row.offsets[number]
    known: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return {
        name: value.detach().reshape(-1)[first : first + place[1] - place[0]] if _is_row(name, value) else value
        for name, value in known.items()
    }


def _is_row(name: str, value: Any) -> bool:
    """Whether this has a number for each of the parameter's; a count of steps is one for all of them."""
    return isinstance(value, Tensor) and name != "step"


def _side_by_side(place: Range, group: Sequence[tuple[Range, State]]) -> State | None:
    """The states of the parameters in a range as one; None if they differ in more than their rows."""
    states = [state for (low, high), state in group if place[0] <= low and high <= place[1]]
    first, names = states[0], set(states[0])
    if any(set(state) != names for state in states):
        return None
    rows = {name for name in names if _is_row(name, first[name])}
    if any(_is_row(name, state[name]) != (name in rows) for state in states for name in names):
        return None
    if any(state[name] != first[name] for state in states for name in names - rows):
        return None
    return {name: torch.cat([state[name] for state in states]) if name in rows else first[name] for name in first}
