"""The shared memory in which a data server keeps its batches until they are used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.runtime.collectives.one_sided.segment import Segment

_SMALLEST = 1 << 16


class BatchRoom:
    """Segments that are lent to the workers, and used again.

    `allocate` is called on one thread and `free` on another.
    """

    def __init__(self, lend: Callable[[Segment], None]) -> None:
        self._lend = lend
        self._free: dict[int, list[Segment]] = defaultdict(list)
        self._used: dict[int, Segment] = {}

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of this size."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        free = self._free[size]
        try:
            segment = free.pop()
        except IndexError:
            segment = Segment.create(size)
            self._lend(segment)
        memory = segment.bytes[:nbytes]
        self._used[id(memory)] = segment
        return memory

    def free(self, memory: Any) -> None:
        """Let this memory be used again."""
        segment = self._used.pop(id(memory), None)
        if segment is not None:
            self._free[segment.size].append(segment)
