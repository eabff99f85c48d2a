"""All-reduce, reduce and reduce-scatter by messages, for any number of ranks.

Where an algorithm needs a power of two, surplus ranks fold into partners before and are answered after. Ring:
Patarasuk and Yuan 2009. Halving-doubling and recursive doubling: Thakur, Rabenseifner and Gropp 2005.

The hierarchical ones reduce inside each host to its leader (lowest rank), between the leaders, and inside again. Hosts
may be of any number and size, and their ranks in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from offbeat.errors import UsageError
from offbeat.protocols.collectives import phases
from offbeat.protocols.collectives.phases import At, Fold, Phase, Tree, exchange, tree_reduced, tree_spread
from offbeat.protocols.schedule import IntArray, Layout, Op, Round, View


def naive(view: View, layout: Layout) -> Iterator[Round]:
    """All-reduce: every rank sends everything to all others."""
    yield from phases.reduced_in_order(At(), Op.SEND, np.arange(view.size), layout.count)


def star(view: View, layout: Layout) -> Iterator[Round]:
    """All-reduce: all send to the root, which adds up and answers."""
    others = from_root(view, layout)[1:]
    at = yield from exchange(At(), Op.REDUCE, others, layout.root, 0, layout.count)
    yield from exchange(at, Op.COPY, layout.root, others, 0, layout.count)


def tree(view: View, layout: Layout) -> Iterator[Round]:
    """All-reduce: up a binomial tree, and down again."""
    spanned = Tree.of(from_root(view, layout))
    at = yield from tree_reduced(At(), spanned, layout.count)
    yield from tree_spread(at, spanned, layout.count)


def ring(view: View, layout: Layout) -> Iterator[Round]:
    """All-reduce: a reduce-scatter round a ring, then an all-gather."""
    yield from ring_between(At(), np.arange(view.size), layout)


def halving_doubling(view: View, layout: Layout) -> Iterator[Round]:
    """All-reduce: a reduce-scatter by recursive halving, then an all-gather by doubling; moves the fewest bytes."""
    yield from halving_doubling_between(At(), np.arange(view.size), layout)


def recursive_doubling(view: View, layout: Layout) -> Iterator[Round]:
    """All-reduce: partners at doubling distances swap everything; takes the fewest hops."""
    fold = Fold.of(np.arange(view.size))
    at = yield from fold.gathered(At(), layout.count)
    positions = np.arange(len(fold.kept))
    distance = 1
    while distance < len(positions):
        at = yield from exchange(at, Op.REDUCE, fold.kept, fold.kept[positions ^ distance], 0, layout.count)
        distance *= 2
    yield from fold.answered(at, layout.count)


def ring_between(at: At, ranks: IntArray, layout: Layout) -> Phase:
    """The ring all-reduce between some of the ranks."""
    bounds = layout.blocks(len(ranks))
    at = yield from phases.ring_reduced(at, ranks, bounds)
    return (yield from phases.ring_gathered(at, ranks, bounds))


def halving_doubling_between(at: At, ranks: IntArray, layout: Layout) -> Phase:
    """The halving-doubling all-reduce between some of the ranks."""
    fold = Fold.of(ranks)
    bounds = layout.blocks(len(fold.kept))
    at = yield from fold.gathered(at, layout.count)
    at = yield from phases.halved(at, fold.kept, bounds)
    at = yield from phases.doubled(at, fold.kept, bounds)
    return (yield from fold.answered(at, layout.count))


def hierarchical(view: View, layout: Layout) -> Iterator[Round]:
    """All-reduce: binomial trees inside hosts, halving-doubling between."""
    return _by_trees(view, layout, halving_doubling_between)


def hierarchical_ring(view: View, layout: Layout) -> Iterator[Round]:
    """All-reduce: binomial trees inside hosts, a ring between."""
    return _by_trees(view, layout, ring_between)


def _by_trees(view: View, layout: Layout, between: Callable[[At, IntArray, Layout], Phase]) -> Iterator[Round]:
    hosts = by_host(view)
    at = yield from tree_reduced(At(), hosts, layout.count)
    at = yield from between(at, hosts.ranks[hosts.position == 0], layout)
    yield from tree_spread(at, hosts, layout.count)


def by_host(view: View) -> Tree:
    """The ranks of each host side by side, as groups of a tree."""
    hosts = view.hosts
    ranks = np.argsort(hosts, kind="stable")
    ordered = hosts[ranks]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    sizes = np.diff(np.append(first, len(ranks)))
    return Tree(ranks, np.arange(len(ranks)) - np.repeat(first, sizes))


def reduce_star(view: View, layout: Layout) -> Iterator[Round]:
    """Reduce: all send to the root."""
    yield from exchange(At(), Op.REDUCE, from_root(view, layout)[1:], layout.root, 0, layout.count)


def reduce_tree(view: View, layout: Layout) -> Iterator[Round]:
    """Reduce: up a binomial tree."""
    yield from tree_reduced(At(), Tree.of(from_root(view, layout)), layout.count)


def reduce_scatter_naive(view: View, layout: Layout) -> Iterator[Round]:
    """Reduce-scatter: every rank sends all others their blocks."""
    yield from phases.block_reduced(At(), Op.SEND, np.arange(view.size), layout.blocks(view.size))


def reduce_scatter_ring(view: View, layout: Layout) -> Iterator[Round]:
    """Reduce-scatter: round a ring."""
    yield from phases.ring_reduced(At(), np.arange(view.size), layout.blocks(view.size))


def reduce_scatter_halving(view: View, layout: Layout) -> Iterator[Round]:
    """Reduce-scatter: recursive halving; one that folds leaves its block to its partner, and is answered with it."""
    fold = Fold.of(np.arange(view.size))
    bounds = layout.blocks(view.size)
    at = yield from fold.gathered(At(), layout.count)
    at = yield from phases.halved(at, fold.kept, bounds[fold.first])
    if len(fold.surplus):
        yield from exchange(at, Op.COPY, fold.partners, fold.surplus, bounds[fold.surplus], bounds[fold.surplus + 1])


def from_root(view: View, layout: Layout) -> IntArray:
    """All ranks, the root first, going on from there."""
    if not 0 <= layout.root < view.size:
        raise UsageError(f"root {layout.root} is none of the {view.size} ranks: give one from 0 to {view.size - 1}")
    return (np.arange(view.size) + layout.root) % view.size
