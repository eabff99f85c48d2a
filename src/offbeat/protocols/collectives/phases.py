"""What collectives are made of: phases that any set of ranks can go through, one after the other.

A phase is a generator of rounds. It is told where it stands (the number of its first round, and what that comes after)
and returns where the next phase stands, so that `at = yield from phase(..., at)` puts them together. Inside a phase, a
rank's position is its index in `ranks`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from offbeat.protocols.schedule import IntArray, Op, Round, entries


class At(NamedTuple):
    """Where a phase stands."""

    number: int = 0
    """The number of its first round."""
    after: tuple[int, ...] = ()
    """The rounds that must be done before it."""


Phase = Generator[Round, None, At]


def exchange(
    at: At,
    use: Op,
    source: ArrayLike,
    target: ArrayLike,
    start: ArrayLike,
    stop: ArrayLike,
    place: ArrayLike | None = None,
    bring: Op = Op.SEND,
) -> Phase:
    """One hop: ranges are brought, then used."""
    brought = entries(bring, source, target, start, stop, at.after, place)
    yield brought
    yield brought.used(use, (at.number,))
    return At(at.number + 2, (at.number + 1,))


def shifts(at: At, bring: Op, ranks: IntArray, count: int) -> Phase:
    """Everything from all ranks to all others in one hop: in round s, position i gets what position i + s has."""
    p = len(ranks)
    for shift in range(1, p):
        yield entries(bring, np.roll(ranks, -shift), ranks, 0, count, at.after)
    return At(at.number + p - 1, (*range(at.number, at.number + p - 1),) or at.after)


def reduced_in_order(at: At, bring: Op, ranks: IntArray, count: int) -> Phase:
    """Every rank brings everything from all others and reduces it in order of positions, so all get the same bits."""
    p = len(ranks)
    if p == 1:
        return at
    first = at.number
    yield entries(bring, ranks[1:], ranks[1:], 0, count, at.after)
    at = yield from shifts(At(first + 1, at.after), bring, ranks, count)
    yield entries(Op.COPY, ranks[0], ranks[1:], 0, count, (first, *at.after))
    for position in range(1, p):
        yield entries(Op.REDUCE, ranks[position], ranks, 0, count, (at.number + position - 1,))
    return At(at.number + p, (at.number + p - 1,))


def block_reduced(at: At, bring: Op, ranks: IntArray, bounds: IntArray) -> Phase:
    """Position i brings block i from everybody and reduces it: own, then i + 1, i + 2 and so on."""
    p = len(ranks)
    low, high = bounds[:-1], bounds[1:]
    after = at.after
    for shift in range(1, p):
        brought = entries(bring, np.roll(ranks, -shift), ranks, low, high, at.after)
        yield brought
        number = at.number + 2 * shift - 2
        after = (number,) if shift == 1 else (number, number - 1)
        yield brought.used(Op.REDUCE, after)
    return At(at.number + 2 * (p - 1), (at.number + 2 * p - 3,) if p > 1 else at.after)


def blocks_gathered(at: At, bring: Op, ranks: IntArray, bounds: IntArray) -> Phase:
    """Every rank brings block j from position j and puts it in its place, all in one hop."""
    p = len(ranks)
    numbers: list[int] = []
    for shift in range(1, p):
        block = (np.arange(p) + shift) % p
        brought = entries(bring, ranks[block], ranks, bounds[block], bounds[block + 1], at.after)
        yield brought
        number = at.number + 2 * shift - 2
        yield brought.used(Op.COPY, (number,))
        numbers.append(number + 1)
    return At(at.number + 2 * (p - 1), tuple(numbers) or at.after)


def ring_reduced(at: At, ranks: IntArray, bounds: IntArray) -> Phase:
    """Blocks travel round the ring and are added to; position i ends with block i of all."""
    p = len(ranks)
    following = np.roll(ranks, -1)
    low, high = np.tile(bounds[:-1], 2), np.tile(bounds[1:], 2)
    for step in range(p - 1):
        window = slice(p - step - 1, 2 * p - step - 1)
        at = yield from exchange(at, Op.REDUCE, ranks, following, low[window], high[window])
    return at


def ring_gathered(at: At, ranks: IntArray, bounds: IntArray) -> Phase:
    """Finished blocks travel round the ring; position i begins with block i."""
    p = len(ranks)
    following = np.roll(ranks, -1)
    low, high = np.tile(bounds[:-1], 2), np.tile(bounds[1:], 2)
    for step in range(p - 1):
        window = slice(p - step, 2 * p - step)
        at = yield from exchange(at, Op.COPY, ranks, following, low[window], high[window])
    return at


def halved(at: At, ranks: IntArray, bounds: IntArray) -> Phase:
    """Recursive halving: partners swap halves and add; position i ends with block i. A power of two only."""
    mine = np.arange(len(ranks))
    distance = len(ranks) // 2
    while distance:
        partner = mine ^ distance
        low = partner & -distance
        at = yield from exchange(at, Op.REDUCE, ranks, ranks[partner], bounds[low], bounds[low + distance])
        distance //= 2
    return at


def doubled(at: At, ranks: IntArray, bounds: IntArray) -> Phase:
    """Recursive doubling of what every rank knows; position i begins with block i. A power of two only."""
    mine = np.arange(len(ranks))
    distance = 1
    while distance < len(ranks):
        low = mine & -distance
        at = yield from exchange(at, Op.COPY, ranks, ranks[mine ^ distance], bounds[low], bounds[low + distance])
        distance *= 2
    return at


def tree_reduced(at: At, tree: Tree, count: int) -> Phase:
    """Binomial trees, from the leaves: each group's first rank ends with the sum."""
    distance = 1
    while distance < tree.height:
        sender = tree.at(distance)
        at = yield from exchange(at, Op.REDUCE, tree.ranks[sender], tree.ranks[sender - distance], 0, count)
        distance *= 2
    return at


def tree_spread(at: At, tree: Tree, count: int) -> Phase:
    """Binomial trees, from the first rank of each group to its others."""
    distance = tree.reach
    while distance:
        target = tree.at(distance)
        at = yield from exchange(at, Op.COPY, tree.ranks[target - distance], tree.ranks[target], 0, count)
        distance //= 2
    return at


@dataclass(frozen=True)
class Tree:
    """Binomial trees over groups of ranks, all of them at once."""

    ranks: IntArray
    """All ranks, those of a group side by side."""
    position: IntArray
    """The position of each of them in its group."""

    @classmethod
    def of(cls, ranks: IntArray) -> Tree:
        """One group."""
        return cls(ranks, np.arange(len(ranks)))

    @property
    def height(self) -> int:
        """The size of the largest group."""
        return int(self.position.max()) + 1

    @property
    def reach(self) -> int:
        """The largest distance between a rank and its parent; 0 if nobody has one."""
        return 1 << (self.height - 1).bit_length() - 1 if self.height > 1 else 0

    def at(self, distance: int) -> IntArray:
        """Indices of those whose parent is that far before them."""
        return np.flatnonzero(self.position % (2 * distance) == distance)


@dataclass(frozen=True)
class Fold:
    """Any number of ranks as a power of two: of the first 2s ranks, each second folds into the one before it."""

    kept: IntArray
    """Ranks that go on; a power of two of them."""
    surplus: IntArray
    """Ranks that hand over and are answered."""
    partners: IntArray
    """To whom each of the surplus hands over."""
    first: IntArray
    """Boundaries of the positions that each of the kept stands for."""

    @classmethod
    def of(cls, ranks: IntArray) -> Fold:
        """The fold of these ranks."""
        p = len(ranks)
        surplus = p - (1 << p.bit_length() - 1)
        numbers = np.arange(p - surplus + 1)
        first = numbers + np.minimum(numbers, surplus)
        return cls(ranks[first[:-1]], ranks[1 : 2 * surplus : 2], ranks[0 : 2 * surplus : 2], first)

    def gathered(self, at: At, count: int) -> Phase:
        """The surplus hands its contribution over."""
        if len(self.surplus):
            at = yield from exchange(at, Op.REDUCE, self.surplus, self.partners, 0, count)
        return at

    def answered(self, at: At, count: int) -> Phase:
        """The surplus gets the result."""
        if len(self.surplus):
            at = yield from exchange(at, Op.COPY, self.partners, self.surplus, 0, count)
        return at
