"""Broadcast, all-gather, gather, scatter, all-to-all and barrier by messages, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from offbeat.errors import UsageError
from offbeat.protocols.collectives import phases
from offbeat.protocols.collectives.phases import At, Fold, Tree, exchange, tree_reduced, tree_spread
from offbeat.protocols.collectives.reductions import from_root
from offbeat.protocols.schedule import IntArray, Layout, Op, Round, View, entries


def broadcast_star(view: View, layout: Layout) -> Iterator[Round]:
    """Broadcast: the root sends to all."""
    yield from exchange(At(), Op.COPY, layout.root, from_root(view, layout)[1:], 0, layout.count)


def broadcast_tree(view: View, layout: Layout) -> Iterator[Round]:
    """Broadcast: down a binomial tree."""
    yield from tree_spread(At(), Tree.of(from_root(view, layout)), layout.count)


def broadcast_doubling(view: View, layout: Layout) -> Iterator[Round]:
    """Broadcast: whoever knows tells one more at distance 1, then 2, 4 and so on; Gloo's broadcast is this one."""
    ranks, at, known = from_root(view, layout), At(), 1
    while known < view.size:
        heard = min(known, view.size - known)
        at = yield from exchange(at, Op.COPY, ranks[:heard], ranks[known : known + heard], 0, layout.count)
        known *= 2


def broadcast_ring(view: View, layout: Layout) -> Iterator[Round]:
    """Broadcast: blocks are scattered down a binomial tree, then gathered by all round a ring."""
    ranks, bounds = from_root(view, layout), layout.blocks(view.size)
    tree = Tree.of(ranks)
    at, distance = At(), tree.reach
    while distance:
        target = tree.at(distance)
        ends = np.minimum(target + distance, view.size)
        at = yield from exchange(at, Op.COPY, ranks[target - distance], ranks[target], bounds[target], bounds[ends])
        distance //= 2
    yield from phases.ring_gathered(at, ranks, bounds)


def all_gather_naive(view: View, layout: Layout) -> Iterator[Round]:
    """All-gather: every rank sends its block to all others."""
    yield from phases.blocks_gathered(At(), Op.SEND, np.arange(view.size), layout.blocks(view.size))


def all_gather_ring(view: View, layout: Layout) -> Iterator[Round]:
    """All-gather: round a ring."""
    yield from phases.ring_gathered(At(), np.arange(view.size), layout.blocks(view.size))


def all_gather_doubling(view: View, layout: Layout) -> Iterator[Round]:
    """All-gather: recursive doubling; one that folds hands its block over first, and is answered with the others."""
    fold = Fold.of(np.arange(view.size))
    bounds, at = layout.blocks(view.size), At()
    low, high = bounds[fold.surplus], bounds[fold.surplus + 1]
    if len(fold.surplus):
        at = yield from exchange(at, Op.COPY, fold.surplus, fold.partners, low, high)
    at = yield from phases.doubled(at, fold.kept, bounds[fold.first])
    if len(fold.surplus):
        start, stop = np.append(0 * low, high), np.append(low, 0 * high + layout.count)
        yield from exchange(at, Op.COPY, np.tile(fold.partners, 2), np.tile(fold.surplus, 2), start, stop)


def gather_star(view: View, layout: Layout) -> Iterator[Round]:
    """Gather: all send their block to the root."""
    others, bounds = from_root(view, layout)[1:], layout.blocks(view.size)
    yield from exchange(At(), Op.COPY, others, layout.root, bounds[others], bounds[others + 1])


def scatter_star(view: View, layout: Layout) -> Iterator[Round]:
    """Scatter: the root sends each its block."""
    others, bounds = from_root(view, layout)[1:], layout.blocks(view.size)
    yield from exchange(At(), Op.COPY, layout.root, others, bounds[others], bounds[others + 1])


def gather_tree(view: View, layout: Layout) -> Iterator[Round]:
    """Gather: blocks go up a binomial tree."""
    tree = Tree.of(from_root(view, layout))
    at, distance = At(), 1
    while distance < tree.height:
        child = tree.at(distance)
        source, target = np.tile(tree.ranks[child], 2), np.tile(tree.ranks[child - distance], 2)
        at = yield from exchange(at, Op.COPY, source, target, *_ends(view, layout, child, distance))
        distance *= 2


def scatter_tree(view: View, layout: Layout) -> Iterator[Round]:
    """Scatter: blocks go down a binomial tree."""
    tree = Tree.of(from_root(view, layout))
    at, distance = At(), tree.reach
    while distance:
        child = tree.at(distance)
        source, target = np.tile(tree.ranks[child - distance], 2), np.tile(tree.ranks[child], 2)
        at = yield from exchange(at, Op.COPY, source, target, *_ends(view, layout, child, distance))
        distance //= 2


def _ends(view: View, layout: Layout, child: IntArray, width: int) -> tuple[IntArray, IntArray]:
    # The blocks of a subtree follow one another from the root on, so they may run over the end of the buffer: two
    # ranges, of which the second is mostly empty.
    p, bounds = view.size, layout.blocks(view.size)
    first = (child + layout.root) % p
    last = first + np.minimum(width, p - child)
    start = np.concatenate([bounds[first], 0 * first])
    stop = np.concatenate([bounds[np.minimum(last, p)], bounds[np.maximum(last - p, 0)]])
    return start, stop


def all_to_all_naive(view: View, layout: Layout) -> Iterator[Round]:
    """All-to-all: every rank sends all others their blocks at once."""
    ranks, width = np.arange(view.size), equal_blocks(view, layout)
    for shift in range(1, view.size):
        yield _dealt(ranks, (ranks + shift) % view.size, width, ())
    sent = tuple(range(view.size - 1))
    for shift in range(1, view.size):
        yield _dealt(ranks, (ranks + shift) % view.size, width, sent).used(Op.COPY, sent)


def all_to_all_pairwise(view: View, layout: Layout) -> Iterator[Round]:
    """All-to-all: every rank swaps blocks with the two at distance 1, then 2 and so on, so that two blocks wait."""
    ranks, width, at = np.arange(view.size), equal_blocks(view, layout), At()
    for distance in range(1, view.size // 2 + 1):
        both = sorted({distance, view.size - distance})
        source = np.tile(ranks, len(both))
        target = np.concatenate([(ranks + shift) % view.size for shift in both])
        brought = _dealt(source, target, width, at.after)
        yield brought
        yield brought.used(Op.COPY, (at.number,))
        at = At(at.number + 2, (at.number + 1,))


def _dealt(source: IntArray, target: IntArray, width: int, after: tuple[int, ...]) -> Round:
    return entries(Op.SEND, source, target, target * width, (target + 1) * width, after, place=source * width)


def barrier_dissemination(view: View, layout: Layout) -> Iterator[Round]:
    """Barrier: every rank signals the one at distance 1, then 2, 4 and so on (Hensgen, Finkel and Manber 1988)."""
    ranks, at, distance = np.arange(view.size), At(), 1
    while distance < view.size:
        at = yield from exchange(at, Op.REDUCE, ranks, (ranks + distance) % view.size, 0, token(layout))
        distance *= 2


def barrier_tree(view: View, layout: Layout) -> Iterator[Round]:
    """Barrier: up a binomial tree, and down again."""
    tree = Tree.of(from_root(view, layout))
    at = yield from tree_reduced(At(), tree, token(layout))
    yield from tree_spread(at, tree, token(layout))


def equal_blocks(view: View, layout: Layout) -> int:
    """The width of a block where all must be equally wide."""
    width, rest = divmod(layout.count, view.size)
    if rest:
        raise UsageError(
            f"{layout.count} elements cannot be cut into {view.size} equal blocks, and an all-to-all puts each in "
            f"another's place: give a multiple of {view.size}"
        )
    return width


def token(layout: Layout) -> int:
    """How many elements a barrier moves: one; refuses a layout that has none."""
    if layout.count < 1:
        raise UsageError("a barrier moves a token: give it a layout of at least one element")
    return 1
