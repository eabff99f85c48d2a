"""What a worker's input costs: time and processor time while the loop waits for a batch, and the size of examples."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from offbeat.runtime.data.batch_slicing import arrays_in
from offbeat.runtime.data.loaders import Batch
from offbeat.runtime.groups.group import Group

_COPIED = 8 << 20
"""Bytes copied to measure the rate of memory."""


class InputFigures:
    """Measured while the run goes on, at the cost of two readings of a clock for each batch."""

    def __init__(self) -> None:
        self._seconds = self._cpu = 0.0
        self._begun: tuple[float, float] | None = None
        self._examples = 0
        self.example_bytes = 0
        """Bytes of the tensors of an example, in the first batch."""

    def begin(self) -> None:
        """The loop waits for a batch."""
        # Of all threads: a dataset may decode in several.
        self._begun = time.perf_counter(), time.process_time()

    def end(self, batch: Batch) -> None:
        """The batch is here."""
        if self._begun is not None:
            self._seconds += time.perf_counter() - self._begun[0]
            self._cpu += time.process_time() - self._begun[1]
            self._begun = None
        self._examples += batch.examples
        if not self.example_bytes and batch.examples:
            self.example_bytes = sum(array.nbytes for array in arrays_in(batch.content)) // batch.examples

    def summary(self, group: Group, examples: int | None, moved: int) -> dict[str, Any]:
        """The figures of all workers; a collective call. `moved` orders went to another data server."""
        rows = group.gather([self._seconds, self._cpu, float(self._examples), float(moved)], "the end of the run")
        seconds, cpu, read, moves = rows.sum(dim=0).tolist()
        return {
            "seconds_per_example": seconds / max(read, 1.0),
            "processor_share": min(cpu / seconds, 1.0) if seconds > 0 else 0.0,
            "bytes_per_example": self.example_bytes,
            "examples": examples,
            "copied_bytes_per_second": _copy_rate(),
            "orders_moved": int(moves),
        }


def _copy_rate() -> float:
    """Bytes per second that this process copies in memory, as batches from data servers are."""
    source = np.ones(_COPIED, dtype=np.uint8)
    target = np.zeros_like(source)
    begun = time.perf_counter()
    np.copyto(target, source)
    return _COPIED / max(time.perf_counter() - begun, 1e-9)
