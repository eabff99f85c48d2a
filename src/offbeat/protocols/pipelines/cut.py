"""The best way to cut a chain of layers into consecutive parts, found exactly by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import StrategyError

Table = NDArray[np.float64]


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs per microbatch."""

    name: str
    """The layer's name, as reports show it."""
    forward: float
    """Seconds of its forward computation."""
    backward: float
    """Seconds of its backward computation."""
    activation_bytes: int
    """Bytes that cross a cut directly after this layer, in the forward direction."""
    parameter_bytes: int
    """Bytes of its parameters."""
    saved_bytes: int = 0
    """Bytes that it keeps from forward to backward, beside its parameters."""

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward + self.backward

    @property
    def memory(self) -> int:
        """Bytes that its part holds because of it: parameters, and what one microbatch keeps for backward."""
        return self.parameter_bytes + self.saved_bytes


@dataclass(frozen=True)
class PipelineCut:
    """A chain of layers in consecutive parts."""

    bounds: tuple[int, ...]
    """Part i has the layers from bounds[i] up to, not including, bounds[i + 1]; from 0 to the number of layers."""
    slowest: float
    """Seconds that the slowest part takes per microbatch."""
    total: float
    """Seconds that all parts take together."""

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.bounds) - 1

    @property
    def evenness(self) -> float:
        """Mean time of a part over the time of the slowest; 1 if all take equally long."""
        return self.total / self.parts / self.slowest if self.slowest > 0 else 1.0

    @property
    def ranges(self) -> tuple[range, ...]:
        """The layers of each part."""
        return tuple(range(start, stop) for start, stop in pairwise(self.bounds))


def best_cut(
    costs: Sequence[LayerCost], parts: int, memory_limit: int | None = None, *, slack: float = 0.0
) -> PipelineCut:
    """The contiguous cut whose slowest part is as fast as possible.

    Among cuts that are equally good, the one with the fewest bytes crossing from part to part is chosen, and among
    those the most even one.

    Args:
        costs: The layers, in order.
        parts: Number of parts; none is empty.
        memory_limit: Bytes that the layers of a part may need, each `LayerCost.memory`; None for no limit.
        slack: Cuts whose slowest part is at most this share slower than necessary count as equally good. Measured
            times differ by a few percent from one measurement to the next, and bytes do not.

    """
    count = len(costs)
    _check_count(costs, parts)
    seconds = _differences([cost.seconds for cost in costs])
    memory = _differences([cost.memory for cost in costs])
    allowed = np.triu(np.ones((count + 1, count + 1), dtype=bool), 1)
    if memory_limit is not None:
        allowed &= memory <= memory_limit
    least = _least_slowest(np.where(allowed, seconds, np.inf), parts)
    if not np.isfinite(least):
        assert memory_limit is not None  # noqa: S101 -- without a limit, any cut into non-empty parts is allowed
        raise StrategyError(_does_not_fit(costs, parts, memory_limit, _least_slowest(_upper(memory), parts)))
    crossing = np.array([0.0, *(float(cost.activation_bytes) for cost in costs[:-1]), 0.0])
    bounds = _cheapest(seconds, allowed & (seconds <= least * (1 + slack)), crossing, parts)
    return as_cut(costs, bounds)


def as_cut(costs: Sequence[LayerCost], bounds: Sequence[int]) -> PipelineCut:
    """A cut at these bounds, with the time of its slowest part and of all of them."""
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(costs) or any(a >= b for a, b in pairwise(bounds)):
        raise StrategyError(
            f"bounds={tuple(bounds)} do not cut {len(costs)} layers: every part must have at least one layer, and "
            f"each layer one part. Give increasing numbers from 0 to {len(costs)}."
        )
    times = [sum(cost.seconds for cost in costs[start:stop]) for start, stop in pairwise(bounds)]
    return PipelineCut(tuple(int(bound) for bound in bounds), max(times), sum(times))


def _check_count(costs: Sequence[LayerCost], parts: int) -> None:
    if parts < 1:
        raise StrategyError(f"A model cannot be cut into {parts} parts. Ask for at least 1.")
    if parts > len(costs):
        names = ", ".join(cost.name for cost in costs[:8]) + (", …" if len(costs) > 8 else "")
        raise StrategyError(
            f"The model has {len(costs)} layer{'s' * (len(costs) != 1)} that can be separated ({names}), too few for "
            f"{parts} parts: each part (stages x chunks) needs at least one. Use fewer stages, or divide the model "
            f"into more modules."
        )


def _differences(values: Sequence[float]) -> Table:
    """Table whose entry [i, j] is the sum of values[i:j]."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    return sums[None, :] - sums[:, None]


def _upper(table: Table) -> Table:
    """The table where j > i, infinite elsewhere: a part is never empty."""
    return np.where(np.triu(np.ones(table.shape, dtype=bool), 1), table, np.inf)


def _least_slowest(table: Table, parts: int) -> float:
    """The least possible maximum over the parts of table[start, stop]; infinite if there is no such cut."""
    reached = np.full(len(table), np.inf)
    reached[0] = 0.0
    for _ in range(parts):
        reached = np.maximum(reached[:, None], table).min(axis=0)
    return float(reached[-1])


def _cheapest(seconds: Table, allowed: NDArray[np.bool_], crossing: Table, parts: int) -> list[int]:
    """Bounds of the cut of allowed parts with the fewest bytes crossing, then the least sum of squared times."""
    squares = np.where(allowed, seconds**2, np.inf)
    bytes_so_far = np.full(len(seconds), np.inf)
    bytes_so_far[0] = 0.0
    squares_so_far = bytes_so_far.copy()
    choices: list[NDArray[np.int64]] = []
    for _ in range(parts):
        # Bytes are counted where a part starts. All are whole numbers below 2**53, so equality is exact.
        totals = np.where(allowed, (bytes_so_far + crossing)[:, None], np.inf)
        fewest = totals.min(axis=0)
        tied = np.where(totals == fewest[None, :], squares_so_far[:, None] + squares, np.inf)
        choice = tied.argmin(axis=0)
        choices.append(choice)
        bytes_so_far, squares_so_far = fewest, tied[choice, np.arange(len(tied))]
    bounds = [len(seconds) - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return bounds[::-1]


def _does_not_fit(costs: Sequence[LayerCost], parts: int, limit: int, least: float) -> str:
    largest = max(costs, key=lambda cost: cost.memory)
    total = sum(cost.memory for cost in costs)
    advice = (
        f"The largest layer, {largest.name}, alone needs {_megabytes(largest.memory)}: raise the limit to that."
        if largest.memory > limit
        else f"The best cut by memory needs {_megabytes(least)} in its largest part: raise the limit to that, or ask "
        f"for more parts."
    )
    return (
        f"No cut of {len(costs)} layers into {parts} parts keeps each part within {_megabytes(limit)} "
        f"({_megabytes(total)} in all: parameters, and what one microbatch keeps for backward). {advice}"
    )


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f} MB"
