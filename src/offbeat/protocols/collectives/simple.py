"""The collectives, and every algorithm for them that is not made of others."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from offbeat.protocols.collectives import data_movement as moving
from offbeat.protocols.collectives import reductions
from offbeat.protocols.collectives import shared_memory as shared
from offbeat.protocols.schedule import Schedule


class Collective(StrEnum):
    """What is to be achieved together."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"


@dataclass(frozen=True)
class Algorithm:
    """One way to achieve it."""

    name: str
    collective: Collective
    schedule: Schedule
    summary: str
    """What it does, in a line."""
    one_sided: bool = False
    """Whether ranks of a host read each other's memory (FETCH rounds), so that it needs shared memory."""
    pieced: bool = False
    """Whether it works on pieces of a fixed length, so that larger buffers have more rounds."""


_C = Collective
_TWO_SIDED = (
    Algorithm("naive", _C.ALL_REDUCE, reductions.naive, "every rank sends everything to all others"),
    Algorithm("star", _C.ALL_REDUCE, reductions.star, "all send to the root, which adds up and answers"),
    Algorithm("tree", _C.ALL_REDUCE, reductions.tree, "up a binomial tree, and down again"),
    Algorithm("ring", _C.ALL_REDUCE, reductions.ring, "blocks travel round a ring twice"),
    Algorithm("halving_doubling", _C.ALL_REDUCE, reductions.halving_doubling, "the fewest bytes in few hops"),
    Algorithm("recursive_doubling", _C.ALL_REDUCE, reductions.recursive_doubling, "the fewest hops"),
    Algorithm("hierarchical", _C.ALL_REDUCE, reductions.hierarchical, "trees inside hosts, halving between"),
    Algorithm("hierarchical_ring", _C.ALL_REDUCE, reductions.hierarchical_ring, "trees inside hosts, a ring between"),
    Algorithm("star", _C.BROADCAST, moving.broadcast_star, "the root sends to all"),
    Algorithm("tree", _C.BROADCAST, moving.broadcast_tree, "down a binomial tree"),
    Algorithm("doubling", _C.BROADCAST, moving.broadcast_doubling, "those who know tell as many others, as in Gloo"),
    Algorithm("ring", _C.BROADCAST, moving.broadcast_ring, "blocks go down a tree, then round a ring"),
    Algorithm("star", _C.REDUCE, reductions.reduce_star, "all send to the root"),
    Algorithm("tree", _C.REDUCE, reductions.reduce_tree, "up a binomial tree"),
    Algorithm("naive", _C.REDUCE_SCATTER, reductions.reduce_scatter_naive, "everybody sends everybody its block"),
    Algorithm("ring", _C.REDUCE_SCATTER, reductions.reduce_scatter_ring, "blocks travel round a ring"),
    Algorithm("halving", _C.REDUCE_SCATTER, reductions.reduce_scatter_halving, "partners swap halves, then quarters"),
    Algorithm("naive", _C.ALL_GATHER, moving.all_gather_naive, "everybody sends its block to everybody"),
    Algorithm("ring", _C.ALL_GATHER, moving.all_gather_ring, "blocks travel round a ring"),
    Algorithm("doubling", _C.ALL_GATHER, moving.all_gather_doubling, "partners swap all they know"),
    Algorithm("star", _C.GATHER, moving.gather_star, "all send their block to the root"),
    Algorithm("tree", _C.GATHER, moving.gather_tree, "blocks go up a binomial tree"),
    Algorithm("star", _C.SCATTER, moving.scatter_star, "the root sends each its block"),
    Algorithm("tree", _C.SCATTER, moving.scatter_tree, "blocks go down a binomial tree"),
    Algorithm("naive", _C.ALL_TO_ALL, moving.all_to_all_naive, "all blocks at once"),
    Algorithm("pairwise", _C.ALL_TO_ALL, moving.all_to_all_pairwise, "blocks at distance 1, then 2 and so on"),
    Algorithm("dissemination", _C.BARRIER, moving.barrier_dissemination, "tell those at distance 1, 2, 4 and so on"),
    Algorithm("tree", _C.BARRIER, moving.barrier_tree, "up a binomial tree, and down again"),
)
_ONE_SIDED = (
    Algorithm("one_shot", _C.ALL_REDUCE, shared.one_shot, "publish, then read everything from everybody", True),
    Algorithm("two_shot", _C.ALL_REDUCE, shared.two_shot, "reduce a block each, publish it, read the others", True),
    Algorithm("zero_copy", _C.ALL_REDUCE, shared.zero_copy, "two shots on the live buffers, without a copy", True),
    Algorithm("one_shot", _C.BROADCAST, partial(shared.broadcast, True), "the root publishes, all read", True),
    Algorithm("zero_copy", _C.BROADCAST, partial(shared.broadcast, False), "all read the root's live buffer", True),
    Algorithm("one_shot", _C.REDUCE, partial(shared.reduce, True), "all publish, the root reads and reduces", True),
    Algorithm("two_shot", _C.REDUCE, shared.reduce_in_blocks, "reduce a block each, the root reads them", True),
    Algorithm("zero_copy", _C.REDUCE, partial(shared.reduce, False), "the root reads the live buffers", True),
    Algorithm("one_shot", _C.REDUCE_SCATTER, partial(shared.reduce_scatter, True), "publish, reduce own block", True),
    Algorithm("zero_copy", _C.REDUCE_SCATTER, partial(shared.reduce_scatter, False), "the same, on live buffers", True),
    Algorithm("one_shot", _C.ALL_GATHER, partial(shared.all_gather, True), "publish own block, read the others", True),
    Algorithm("zero_copy", _C.ALL_GATHER, partial(shared.all_gather, False), "the same, on live buffers", True),
    Algorithm("one_shot", _C.GATHER, partial(shared.gather, True), "all publish their block, the root reads", True),
    Algorithm("zero_copy", _C.GATHER, partial(shared.gather, False), "the same, on live buffers", True),
    Algorithm("one_shot", _C.SCATTER, partial(shared.scatter, True), "the root publishes, all read their block", True),
    Algorithm("zero_copy", _C.SCATTER, partial(shared.scatter, False), "the same, on the root's live buffer", True),
    Algorithm("one_shot", _C.ALL_TO_ALL, shared.all_to_all, "publish, read own block from everybody", True),
    Algorithm("one_shot", _C.BARRIER, shared.barrier, "publish a token, read everybody's", True),
)

SIMPLE: tuple[Algorithm, ...] = (*_TWO_SIDED, *_ONE_SIDED)
"""All of them."""


def simple(collective: Collective, name: str) -> Algorithm:
    """One of them."""
    return next(each for each in SIMPLE if (each.collective, each.name) == (collective, name))
