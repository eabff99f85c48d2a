"""Collectives through memory that all ranks of a host share: no rank sends, every rank reads.

One shot reads everything at once, two shots read a block each and then each other's blocks. Both first publish a copy,
so that what is read stays as it was while the reader's buffer is written. Zero copy reads the live buffers: of
`two_shot`'s ranges only the owner of a block reads it elsewhere, and others write it only after the owner is through.
After the last reading of a live buffer its owner must not write it before the others have left either; that wait is no
part of the schedule (`CheckReport.lingering` of the checker tells where it is needed).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from offbeat.errors import UsageError
from offbeat.protocols.collectives.data_movement import equal_blocks, token
from offbeat.protocols.collectives.phases import At, Phase, block_reduced, blocks_gathered, exchange, reduced_in_order
from offbeat.protocols.collectives.reductions import from_root
from offbeat.protocols.schedule import IntArray, Layout, Op, Round, Schedule, View, entries


def published(at: At, ranks: IntArray, start: IntArray | int, stop: IntArray | int) -> Phase:
    """Each rank publishes a range of its own."""
    yield entries(Op.COPY, ranks, ranks, start, stop, at.after)
    return At(at.number + 1, (at.number,))


def _ranks(view: View) -> IntArray:
    hosts = len(np.unique(view.hosts))
    if hosts > 1:
        raise UsageError(
            f"the {view.size} ranks live on {hosts} hosts, which share no memory: use a hierarchical or a two-sided "
            f"algorithm"
        )
    return np.arange(view.size)


def _copied(copy: bool, at: At, ranks: IntArray, start: IntArray | int, stop: IntArray | int) -> Phase:
    if copy:
        at = yield from published(at, ranks, start, stop)
    return at


def one_shot(view: View, layout: Layout) -> Iterator[Round]:
    """All-reduce: every rank publishes, reads everything from all others, and reduces in order of ranks."""
    ranks = _ranks(view)
    if len(ranks) > 1:
        at = yield from published(At(), ranks, 0, layout.count)
        yield from reduced_in_order(at, Op.FETCH, ranks, layout.count)


def _two_shot(copy: bool, view: View, layout: Layout) -> Iterator[Round]:
    ranks = _ranks(view)
    if len(ranks) > 1:
        bounds = layout.blocks(len(ranks))
        at = yield from _copied(copy, At(), ranks, 0, layout.count)
        at = yield from block_reduced(at, Op.FETCH, ranks, bounds)
        at = yield from _copied(copy, at, ranks, bounds[:-1], bounds[1:])
        yield from blocks_gathered(at, Op.FETCH, ranks, bounds)


two_shot: Schedule = partial(_two_shot, True)
"""All-reduce: every rank reduces a block of what all have published, publishes it, and reads the others' blocks."""
zero_copy: Schedule = partial(_two_shot, False)
"""All-reduce: two shots on the live buffers."""


def broadcast(copy: bool, view: View, layout: Layout) -> Iterator[Round]:
    """Every rank reads the root's buffer."""
    ranks = _ranks(view)
    if len(ranks) > 1:
        rooted = from_root(view, layout)
        at = yield from _copied(copy, At(), rooted[:1], 0, layout.count)
        yield from exchange(at, Op.COPY, rooted[:1], rooted[1:], 0, layout.count, bring=Op.FETCH)


def reduce(copy: bool, view: View, layout: Layout) -> Iterator[Round]:
    """The root reads all buffers and adds them to its own."""
    ranks = _ranks(view)
    if len(ranks) > 1:
        others = from_root(view, layout)[1:]
        at = yield from _copied(copy, At(), others, 0, layout.count)
        yield from exchange(at, Op.REDUCE, others, layout.root, 0, layout.count, bring=Op.FETCH)


def reduce_in_blocks(view: View, layout: Layout) -> Iterator[Round]:
    """Every rank reduces a block of what all have published; the root reads the blocks."""
    ranks = _ranks(view)
    if len(ranks) > 1:
        bounds = layout.blocks(len(ranks))
        at = yield from published(At(), ranks, 0, layout.count)
        at = yield from block_reduced(at, Op.FETCH, ranks, bounds)
        at = yield from published(at, ranks, bounds[:-1], bounds[1:])
        others = from_root(view, layout)[1:]
        yield from exchange(at, Op.COPY, others, layout.root, bounds[others], bounds[others + 1], bring=Op.FETCH)


def reduce_scatter(copy: bool, view: View, layout: Layout) -> Iterator[Round]:
    """Every rank reads its block from all others and reduces it."""
    ranks = _ranks(view)
    if len(ranks) > 1:
        at = yield from _copied(copy, At(), ranks, 0, layout.count)
        yield from block_reduced(at, Op.FETCH, ranks, layout.blocks(len(ranks)))


def all_gather(copy: bool, view: View, layout: Layout) -> Iterator[Round]:
    """Every rank reads the blocks of all others."""
    ranks = _ranks(view)
    if len(ranks) > 1:
        bounds = layout.blocks(len(ranks))
        at = yield from _copied(copy, At(), ranks, bounds[:-1], bounds[1:])
        yield from blocks_gathered(at, Op.FETCH, ranks, bounds)


def gather(copy: bool, view: View, layout: Layout) -> Iterator[Round]:
    """The root reads the blocks of all others."""
    ranks = _ranks(view)
    if len(ranks) > 1:
        others, bounds = from_root(view, layout)[1:], layout.blocks(len(ranks))
        low, high = bounds[others], bounds[others + 1]
        at = yield from _copied(copy, At(), others, low, high)
        yield from exchange(at, Op.COPY, others, layout.root, low, high, bring=Op.FETCH)


def scatter(copy: bool, view: View, layout: Layout) -> Iterator[Round]:
    """Every rank reads its block from the root."""
    ranks = _ranks(view)
    if len(ranks) > 1:
        others, bounds = from_root(view, layout)[1:], layout.blocks(len(ranks))
        at = yield from _copied(copy, At(), from_root(view, layout)[:1], 0, layout.count)
        yield from exchange(at, Op.COPY, layout.root, others, bounds[others], bounds[others + 1], bring=Op.FETCH)


def all_to_all(view: View, layout: Layout) -> Iterator[Round]:
    """Every rank reads its block from all others. It must be a copy: what is read elsewhere is overwritten here."""
    ranks, width = _ranks(view), equal_blocks(view, layout)
    if len(ranks) > 1:
        at = yield from published(At(), ranks, 0, layout.count)
        for shift in range(1, len(ranks)):
            other = (ranks + shift) % len(ranks)
            brought = entries(Op.FETCH, other, ranks, ranks * width, (ranks + 1) * width, at.after, place=other * width)
            yield brought
            yield brought.used(Op.COPY, (2 * shift - 1,))


def barrier(view: View, layout: Layout) -> Iterator[Round]:
    """Every rank publishes a token and reads those of all others."""
    ranks = _ranks(view)
    if len(ranks) > 1:
        at = yield from published(At(), ranks, 0, token(layout))
        yield from reduced_in_order(at, Op.FETCH, ranks, 1)
