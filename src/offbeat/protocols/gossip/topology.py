"""Which workers mix, by which weights, and how fast all come to agree.

A step of gossip replaces the workers' models x by W x, where W is doubly stochastic: its rows sum to 1, so that equal
models stay equal, and so do its columns, so that the mean of all models is kept. In the worst case the models'
distance to their mean shrinks in each step by the second largest singular value of W.

Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?" (2017); Xiao and Boyd, "Fast linear
iterations for distributed averaging" (2004), for Metropolis weights; Ying et al., "Exponential Graph is Provably
Efficient for Decentralized Deep Training" (2021), for the graph that varies with time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from offbeat.errors import UsageError
from offbeat.protocols.schedule import FloatArray, IntArray

if TYPE_CHECKING:
    import networkx as nx

TRIES: Final = 100  # Random graphs to draw until one is connected; almost every one is, from three neighbours on.


class GraphShape(StrEnum):
    """Graphs that follow from the number of workers alone."""

    RING = "ring"  # Two neighbours each.
    TORUS = "torus"  # A grid whose ends meet: four neighbours each, fewer where it is thin.
    EXPONENTIAL = "exponential"  # Neighbours at distance 1, 2, 4 and so on; in each step one of these, in turn.
    COMPLETE = "complete"  # All with all.


@dataclass(frozen=True)
class RandomRegular:
    """A random graph in which all have the same number of neighbours."""

    degree: int
    seed: int = 0


Kind = GraphShape | RandomRegular


def graph(kind: Kind, size: int) -> nx.Graph[int]:
    """The undirected graph of `size` workers; an impossible kind is a UsageError."""
    import networkx as nx  # Here, as strategies that need no graph should not wait for it.

    if isinstance(kind, RandomRegular):
        return _random(kind, size)
    if size == 1:
        return nx.empty_graph(1)
    if kind is GraphShape.COMPLETE:
        return nx.complete_graph(size)
    if kind is GraphShape.TORUS:
        return _torus(size)
    return nx.circulant_graph(size, [1] if kind is GraphShape.RING else distances(size))


def distances(size: int) -> list[int]:
    """Distances of the exponential graph, one for each step: 1, 2, 4 up to half of the workers or more."""
    return [2**k for k in range(max(1, math.ceil(math.log2(size))))] if size > 1 else []


def _torus(size: int) -> nx.Graph[int]:
    import networkx as nx

    rows = max(rows for rows in range(1, math.isqrt(size) + 1) if size % rows == 0)
    if rows == 1 and size > 3:
        raise UsageError(
            f"{size} is a prime number, so {size} workers stand in no grid but a single line, whose torus is a ring. "
            f"Write ring, or ask for another number of workers, such as {size + 1}."
        )
    grid = nx.grid_2d_graph(rows, size // rows, periodic=True)
    drawn = nx.convert_node_labels_to_integers(grid, ordering="sorted")
    drawn.remove_edges_from(list(nx.selfloop_edges(drawn)))
    return drawn


def _random(kind: RandomRegular, size: int) -> nx.Graph[int]:
    import networkx as nx

    degree = kind.degree
    if size == 1:
        return nx.empty_graph(1)
    if not (1 <= degree < size and degree * size % 2 == 0 and (degree > 1 or size == 2)):
        raise UsageError(
            f"no connected graph of {size} workers gives each {degree} neighbours: it takes 2 or more, fewer than "
            f"there are workers, and an even product of both."
        )
    for attempt in range(TRIES):
        drawn = nx.random_regular_graph(degree, size, seed=kind.seed * TRIES + attempt)
        if nx.is_connected(drawn):
            return nx.convert_node_labels_to_integers(drawn, ordering="sorted")
    raise UsageError(
        f"none of {TRIES} random graphs with {degree} neighbours for each of {size} workers was connected. Take more "
        f"neighbours, or another seed."
    )


def metropolis(of: nx.Graph[int]) -> FloatArray:
    """Weights from each worker's own and its neighbours' degrees: doubly stochastic and symmetric."""
    import networkx as nx

    edges = nx.to_numpy_array(of, nodelist=range(len(of)))
    degrees = edges.sum(axis=1)
    weights = edges / (1 + np.maximum.outer(degrees, degrees))
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return weights


@dataclass(frozen=True)
class Mixing:
    """The mixing matrices of the steps, in turn."""

    matrices: tuple[FloatArray, ...]

    @property
    def size(self) -> int:
        """How many workers mix."""
        return len(self.matrices[0])

    def at(self, step: int) -> FloatArray:
        """The matrix of a step, counted from 0."""
        return self.matrices[step % len(self.matrices)]

    def product(self, steps: int) -> FloatArray:
        """The product of the matrices of `steps` steps."""
        product = np.eye(self.size)
        for step in range(steps):
            product = self.at(step) @ product
        return product

    @cached_property
    def rate(self) -> float:
        """Worst-case factor on the distance to the mean per step: the predicted rate of consensus."""
        turn = len(self.matrices)
        apart = self.product(turn) - 1 / self.size
        largest = float(np.linalg.norm(apart, 2)) if self.size > 1 else 0.0
        # A rounding error of what should be 0 must not be blown up by the root.
        return 0.0 if largest < 1e-12 else largest ** (1 / turn)

    @property
    def gap(self) -> float:
        """The spectral gap: 1 less the rate; 1 means that all agree after one turn."""
        return 1 - self.rate

    @cached_property
    def usual_rate(self) -> float:
        """Factor on the distance per step for randomly placed models, in the mean over the turn."""
        if self.size == 1:
            return 0.0
        squares = [(float((matrix**2).sum()) - 1) / (self.size - 1) for matrix in self.matrices]
        return math.sqrt(max(0.0, sum(squares) / len(squares)))

    def neighbours(self, rank: int) -> IntArray:
        """The workers that a worker hears in some step."""
        heard = np.any([matrix[rank] != 0 for matrix in self.matrices], axis=0)
        heard[rank] = False
        return np.flatnonzero(heard).astype(np.int64)


def mixing(kind: Kind, size: int) -> Mixing:
    """Metropolis weights on the graph; for the exponential one, halves with one other at a time."""
    if kind is not GraphShape.EXPONENTIAL or size == 1:
        return Mixing((metropolis(graph(kind, size)),))
    own = np.eye(size)
    # In the step of distance h, worker i hears i - h, and i + h hears it.
    return Mixing(tuple((own + np.roll(own, hop, axis=0)) / 2 for hop in distances(size)))
