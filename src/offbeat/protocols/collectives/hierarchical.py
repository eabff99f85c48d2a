"""All-reduce over a map of hosts: inside each host to a leader, between the leaders, and inside again.

Hosts may be of any number and size, and their ranks in any order. A host's leader is its lowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from offbeat.protocols.collectives.phases import At, Phase, Tree, tree_reduced, tree_spread
from offbeat.protocols.collectives.reducing import halving_doubling_between, ring_between
from offbeat.protocols.schedule import IntArray, Layout, Round, View

Between = Callable[[At, IntArray, Layout], Phase]


def hierarchical(view: View, layout: Layout) -> Iterator[Round]:
    """Binomial trees inside, halving-doubling between."""
    return _by_trees(view, layout, halving_doubling_between)


def hierarchical_ring(view: View, layout: Layout) -> Iterator[Round]:
    """Binomial trees inside, a ring between."""
    return _by_trees(view, layout, ring_between)


def _by_trees(view: View, layout: Layout, between: Between) -> Iterator[Round]:
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
