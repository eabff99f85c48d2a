"""The header that workers send with their gradients: one row of numbers that is summed over the workers.

So uneven batches are weighted correctly, waiting is distinguished from transferring, and a worker that has skipped a
batch is detected.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import RunError
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch

_CLOCK_WRAP = 64.0
"""Arrival times are sent as seconds modulo this, which keeps them exact to a few microseconds even in float32."""
_BATCH_WRAP = 4096
"""Batch numbers are sent modulo this, which float32 represents exactly."""


class Header:
    """The header of one model."""

    def __init__(self, group: Group, stopwatch: Stopwatch, parameters: int) -> None:
        self._group, self._stopwatch = group, stopwatch
        self._size = group.size
        self.length = 1 + 2 * group.size + parameters
        self.examples, self.total = 1.0, float(group.size)
        """Examples of the coming passes here, and over all workers (0: unknown)."""
        self.batch = 0
        """Batches begun."""
        self.arrived = 0.0
        """When this worker had its gradients."""

    def weigh(self, examples: float, total: float | None) -> None:
        """A batch begins: passes until the next are over `examples` here and `total` over all (None: unknown)."""
        self.examples, self.total = float(examples), 0.0 if total is None else float(total)
        self.batch += 1

    def write(self, numbers: NDArray[Any], used: NDArray[Any]) -> None:
        """Fill in this worker's numbers."""
        size, rank = self._size, self._group.rank
        self.arrived = time.perf_counter()
        numbers[: 1 + 2 * size] = 0.0
        numbers[0] = self.examples
        numbers[1 + rank] = self.arrived % _CLOCK_WRAP
        numbers[1 + size + rank] = self.batch % _BATCH_WRAP
        numbers[1 + 2 * size :] = used

    def used(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """The number of workers that used each parameter."""
        return numbers[1 + 2 * self._size :]

    def check(self, numbers: NDArray[Any]) -> None:
        """Raise if the workers came with different batches, or not with the expected examples."""
        size, mine = self._size, self.batch % _BATCH_WRAP
        others = numbers[1 + size : 1 + 2 * size].tolist()
        ahead = [f"worker {rank} with batch {int(number)}" for rank, number in enumerate(others) if number != mine]
        if ahead:
            raise RunError(
                f"worker {self._group.rank} came to the sum of gradients with batch {mine}, but {', '.join(ahead)}: "
                f"a worker has skipped a backward pass. Every worker must call backward for every batch, if only with "
                f"a loss times 0."
            )
        examples = float(numbers[0])
        if self.total and abs(examples - self.total) > 0.01 + 1e-5 * self.total:
            raise RunError(
                f"worker {self._group.rank} expected a step of {self.total:g} examples, but the workers together "
                f"brought {examples:g}. Their loaders disagree: do they read the same data in the same order?"
            )

    def account(self, numbers: NDArray[Any], entered: float) -> None:
        """Split the time since `entered` into waiting for a late worker and transferring, by when each arrived."""
        if not self._group.one_host:
            return
        arrivals = np.asarray(numbers[1 : 1 + self._size], dtype=np.float64)
        behind = (arrivals - self.arrived % _CLOCK_WRAP + _CLOCK_WRAP / 2) % _CLOCK_WRAP - _CLOCK_WRAP / 2
        late = float(behind.max())
        exposed = time.perf_counter() - entered
        self._stopwatch.switch("communicate")
        self._stopwatch.move(min(late - (entered - self.arrived), exposed), "communicate", "wait")
