"""A sum whose terms come in any order and are added in a fixed one, so that its bits do not depend on who was first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PairwiseSum(Generic[T]):
    """The sum of numbered terms, as a binary tree: two neighbours are added as soon as both are there.

    Terms that come in order need memory for about log2(count) sums; each that is ahead of the others needs one more.
    """

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        self._count, self._add = count, add
        self._seen: set[int] = set()
        self._sums: dict[tuple[int, int], T] = {}  # By level in the tree and place in the level.

    def put(self, place: int, term: T) -> bool:
        """Add a term; False if it was there already."""
        if place in self._seen or not 0 <= place < self._count:
            return False
        self._seen.add(place)
        level, width = 0, self._count
        while width > 1:
            sibling = (level, place ^ 1)
            if place ^ 1 < width:  # The last of an odd number goes up alone.
                if sibling not in self._sums:
                    break
                other = self._sums.pop(sibling)
                term = self._add(other, term) if place & 1 else self._add(term, other)
            level, place, width = level + 1, place // 2, (width + 1) // 2
        self._sums[level, place] = term
        return True

    @property
    def over(self) -> bool:
        """Whether all terms are there."""
        return len(self._seen) == self._count

    def total(self) -> T:
        """The sum of all terms."""
        if not self.over:
            raise ValueError(f"{self._count - len(self._seen)} of {self._count} terms are missing")
        (total,) = self._sums.values()
        return total
