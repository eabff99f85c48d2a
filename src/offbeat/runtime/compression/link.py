"""Letters between the workers of a group."""

from __future__ import annotations

import time

from torch import Tensor

from offbeat.runtime.groups.group import DirectGroup


class GroupLink:
    """How letters travel in one exchange of a group; it counts what they took."""

    def __init__(self, group: DirectGroup, what: str) -> None:
        self._group, self._what = group, what
        self.nbytes = 0
        """Bytes that this worker has brought to sums and gatherings."""
        self.seconds = 0.0
        """Time that they took, waiting for others and all."""

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._group.size

    def sum(self, row: Tensor) -> Tensor:
        """The row summed over the workers, in place."""
        start = time.perf_counter()
        self._group.sum(row, self._what)
        self._count(row, start)
        return row

    def gather(self, letter: Tensor, fixed: bool) -> list[Tensor]:
        """Everybody's letter, by rank."""
        start = time.perf_counter()
        letters = self._group.letters(letter, fixed, self._what)
        self._count(letter, start)
        return letters

    def _count(self, sent: Tensor, start: float) -> None:
        self.nbytes += sent.numel() * sent.element_size()
        self.seconds += time.perf_counter() - start
