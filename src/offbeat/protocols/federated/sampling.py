"""The clients of a round, drawn from the seed and the round's number alone, so that everyone draws the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.partition import Indices, mixed

COHORT: Final = 0xC0401  # Which of a seed's streams of random numbers this is; see also `simulate.federated`.
SUCCESSION: Final = 0xC0402
BLOCK: Final = 4096  # Random numbers drawn at once.
PATIENCE: Final = 64  # Busy clients drawn in a row before one is chosen among the idle ones.


def cohort(plan: RoundPlan, sizes: NDArray[np.int64], seed: int, number: int) -> Indices:
    """The clients selected for a round: never one without examples.

    A fixed number is in random order, uniform without replacement. Under Poisson sampling each client is selected with
    the same probability, independently of all others; there may be none.
    """
    random = np.random.default_rng(mixed(seed, COHORT, number))
    if plan.poisson:
        return np.flatnonzero((random.random(len(sizes)) < plan.fraction) & (sizes > 0)).astype(np.int64)
    able = np.flatnonzero(sizes)
    return able[random.choice(len(able), min(plan.selected, len(able)), replace=False)].astype(np.int64)


class SeededNumbers:
    """Uniform random numbers in [0, 1), of which each is found by its place, in any order."""

    def __init__(self, seed: int, stream: int) -> None:
        self._seed, self._stream = seed, stream
        self._block = -1
        self._numbers: list[float] = []

    def __getitem__(self, place: int) -> float:
        block, rest = divmod(place, BLOCK)
        if block != self._block:
            random = np.random.default_rng(mixed(self._seed, self._stream, block))
            self._block, self._numbers = block, random.random(BLOCK).tolist()
        return self._numbers[rest]


class Succession:
    """Clients one after the other, for a server that replaces each that has finished (FedBuff).

    `drawn` counts the random numbers used so far: from there a restarted server goes on.
    """

    def __init__(self, sizes: NDArray[np.int64], seed: int, drawn: int = 0) -> None:
        self.able = np.flatnonzero(sizes)
        self.drawn = drawn
        self._numbers = SeededNumbers(seed, SUCCESSION)

    def next(self, busy: Collection[int]) -> int | None:
        """A client that is not busy, uniformly at random; None, and nothing is drawn, if all are."""
        if len(busy) >= len(self.able) and all(client in busy for client in self.able.tolist()):
            return None
        for _ in range(PATIENCE if len(self.able) else 0):
            client = int(self.able[int(self._draw() * len(self.able))])
            if client not in busy:
                return client
        idle = [client for client in self.able.tolist() if client not in busy]
        return idle[int(self._draw() * len(idle))]

    def _draw(self) -> float:
        self.drawn += 1
        return self._numbers[self.drawn - 1]
