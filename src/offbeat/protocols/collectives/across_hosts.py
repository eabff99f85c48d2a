"""All-reduce over hosts that each share memory: other collectives put together, piece by piece in a pipeline.

Each piece is reduced inside every host to its leader (its lowest rank), summed round a ring of the leaders, and read
by the others. While one piece is between hosts the next is reduced and the one before it is read. What runs it
executes the `GroupCollective`s; `hierarchical_shared` is the same parts as rounds, which are
checked, costed and simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offbeat.protocols.collectives.reductions import by_host
from offbeat.protocols.collectives.simple import Algorithm, Collective, simple
from offbeat.protocols.schedule import IntArray, Layout, Round, View

PIECE = 1 << 22
"""Bytes that travel between hosts at once."""

INSIDE = simple(Collective.REDUCE, "two_shot")
BETWEEN = simple(Collective.ALL_REDUCE, "ring")
BACK = simple(Collective.BROADCAST, "one_shot")


@dataclass(frozen=True)
class GroupCollective:
    """A collective that groups of ranks each do by themselves, on one range of the buffer."""

    algorithm: Algorithm
    groups: tuple[tuple[int, ...], ...]
    """Ranks that do it together; the first of a group is its root."""
    start: int
    stop: int
    after: tuple[int, ...]
    """Numbers of the parts that a rank must have done before it begins this one."""


def parts_across_hosts(view: View, layout: Layout, piece: int = PIECE) -> list[GroupCollective]:
    """The parts of an all-reduce over hosts, in the order in which a rank begins them."""
    tree = by_host(view)
    members = np.split(tree.ranks, np.flatnonzero(tree.position == 0)[1:])
    hosts = tuple(tuple(ranks.tolist()) for ranks in members)  # The lowest rank of each host first.
    leaders = tuple(ranks[0] for ranks in hosts)
    length = max(1, piece // layout.itemsize)
    bounds = [*range(0, layout.count, length), layout.count] if layout.count else [0, 0]
    made: list[GroupCollective] = []

    def add(algorithm: Algorithm, groups: tuple[tuple[int, ...], ...], number: int, after: Iterable[int]) -> int:
        made.append(GroupCollective(algorithm, groups, bounds[number], bounds[number + 1], tuple(sorted(after))))
        return len(made) - 1

    last = len(bounds) - 2
    between: list[int] = []
    inside: tuple[int, ...] = ()
    for number in range(last + 1):
        inside = (add(INSIDE, hosts, number, inside),)
        between.append(add(BETWEEN, (leaders,), number, inside))
        if number:
            inside = (add(BACK, hosts, number - 1, (*inside, between[number - 1])),)
    add(BACK, hosts, last, (*inside, between[last]))
    return made


def hierarchical_shared(view: View, layout: Layout, piece: int = PIECE) -> Iterator[Round]:
    """All-reduce: two shots inside each host to its leader, a ring between the leaders, and one shot back."""
    yield from rounds_of(parts_across_hosts(view, layout, piece), layout)


def rounds_of(parts: Sequence[GroupCollective], layout: Layout) -> Iterator[Round]:
    """The rounds of parts: of groups that are equally large, those of all groups at once."""
    number = 0
    ends: list[tuple[int, ...]] = []
    for part in parts:
        before = tuple(dict.fromkeys(end for earlier in part.after for end in ends[earlier]))
        last: list[int] = []
        for size in sorted({len(group) for group in part.groups}):
            ranks = np.array([group for group in part.groups if len(group) == size], dtype=np.int64)
            own = Layout(part.stop - part.start, layout.itemsize)
            rounds = list(part.algorithm.schedule(View.of(size), own))
            waited = {number + earlier for each in rounds for earlier in each.after}
            for each in rounds:
                after = tuple(number + earlier for earlier in each.after) or before
                yield _for_all(each, ranks, part.start, after)
            last += [end for end in range(number, number + len(rounds)) if end not in waited]
            number += len(rounds)
        ends.append(tuple(last) or before)


def _for_all(each: Round, groups: IntArray, start: int, after: tuple[int, ...]) -> Round:
    """A round of one group's own ranks, for every group, in its range of the whole buffer."""
    source, target = groups[:, each.source].reshape(-1), groups[:, each.target].reshape(-1)
    low, high, place = (np.tile(column + start, len(groups)) for column in (each.start, each.stop, each.place))
    return replace(each, source=source, target=target, start=low, stop=high, place=place, after=after)
