"""Gradient coding: several workers compute every part of the data, so that the sum does not need all workers.

The data is cut into as many parts as there are workers, p. Worker k computes the gradients g_j of s + 1 parts and sends
one vector, their combination in row k of the code's matrix B. Any p - s of these vectors give the sum of all p
gradients exactly: for every set of answers there are coefficients a with a·B = (1, …, 1). No code that tolerates s
stragglers computes fewer than s + 1 parts per worker.

- *Fractional repetition*: s + 1 copies of a plain division of the parts; needs s + 1 to divide p. All numbers are 0 or
  1, so nothing is lost to rounding.
- *Cyclic repetition*: worker k computes parts k, …, k + s (modulo p); any s and p. The coefficients are drawn at random
  and solved for, and rounding errors of the answers are amplified, the more the larger p.

Tandon, Lei, Dimakis and Karampatziakis, "Gradient Coding: Avoiding Stragglers in Distributed Learning" (2017):
section 3 (fractional), section 4 and algorithms 1 and 2 (cyclic), theorem 1 (the bound).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.partition import mixed

Matrix = NDArray[np.float64]

EXACT: Final = 1e-8  # How far a decoded sum may be from the sum, in the coefficient of any part.
SOUND: Final = 1e4  # How much rounding errors may be amplified: with float32 gradients, three digits are then right.
_DRAWS: Final = 16  # Random matrices to try; the soundest is kept.
_TRIED: Final = 200  # Most sets of answers on which a matrix is judged.


@dataclass(frozen=True, eq=False)
class Code:
    """Which parts each worker computes, in which combination it sends them, and how answers give the sum."""

    matrix: Matrix
    """B: row k is what worker k sends, as coefficients of the parts' gradients; 0 for parts it does not compute."""
    tolerated: int  # s: how many answers may be missing.

    @property
    def workers(self) -> int:
        """Number of workers, and of parts."""
        return len(self.matrix)

    def parts(self, worker: int) -> list[int]:
        """The parts that a worker computes, s + 1 of them."""
        return np.flatnonzero(self.matrix[worker]).tolist()

    def decode(self, answered: Collection[int]) -> Matrix:
        """The coefficient of each worker's answer in the sum of all parts; 0 for those that have not answered.

        Any p - s answers suffice. Fewer may, by chance; if not, the error says how far off their best combination is.
        """
        given = sorted(set(answered))
        if not given or given[0] < 0 or given[-1] >= self.workers:
            raise UsageError(f"answers of {given} cannot be decoded: give some of the workers 0 to {self.workers - 1}.")
        solution = _combination(self.matrix[given])
        missed = float(np.abs(solution @ self.matrix[given] - 1).max())
        if not missed <= EXACT:
            raise UsageError(
                f"the sum of {self.workers} parts cannot be had from the answers of {given}: their best combination "
                f"(least squares) is off by {missed:.2g} in some part. This code needs any "
                f"{self.workers - self.tolerated} answers; wait for more of them."
            )
        coefficients = np.zeros(self.workers)
        coefficients[given] = solution
        return coefficients

    def amplification(self, answered: Collection[int]) -> float:
        """Factor by which rounding errors of these answers may grow in the worst part of the sum; 1 is none."""
        return float((np.abs(self.decode(answered))[:, None] * np.abs(self.matrix)).sum(axis=0).max())


def fractional_repetition(workers: int, tolerated: int) -> Code:
    """The code that repeats a plain division s + 1 times; needs s + 1 to divide the number of workers."""
    _check(workers, tolerated)
    copies = tolerated + 1
    if workers % copies:
        raise StrategyError(
            f"fractional repetition repeats a division of the parts {copies} times to tolerate {tolerated} stragglers, "
            f"but {workers} workers cannot be cut into {copies} equal groups. Take a multiple of {copies} workers, or "
            f"cyclic repetition."
        )
    division = np.repeat(np.eye(workers // copies), copies, axis=1)
    return Code(np.tile(division, (copies, 1)), tolerated)


def cyclic_repetition(workers: int, tolerated: int, seed: int = 0) -> Code:
    """The code in which worker k computes parts k to k + s: the soundest of some random draws, fixed by the seed.

    A draw is judged by how much it amplifies rounding errors, over all sets of p - s answers if they are few, else over
    some. An error is raised if even the soundest is not sound.
    """
    _check(workers, tolerated)
    draws = (Code(_cyclic(workers, tolerated, mixed(seed, draw)), tolerated) for draw in range(_DRAWS))
    judged = [(_worst(code), code) for code in itertools.islice(draws, 1 if tolerated == 0 else None)]
    worst, code = min(judged, key=lambda entry: entry[0])
    if not worst <= SOUND:
        raise StrategyError(
            f"no cyclic code for {workers} workers and {tolerated} stragglers was found that keeps numbers exact: "
            f"rounding errors grow {worst:.2g}-fold. Take fewer workers, fewer stragglers, or fractional repetition."
        )
    return code


def code_for(workers: int, tolerated: int, cyclic: bool) -> Code:
    """The code that workers and servers of one run agree on."""
    return (cyclic_repetition if cyclic else fractional_repetition)(workers, tolerated)


def _check(workers: int, tolerated: int) -> None:
    if not 0 <= tolerated < workers:
        raise StrategyError(
            f"a code for {workers} workers cannot tolerate {tolerated} stragglers: from 0 up to one fewer than there "
            f"are workers can be missing."
        )


def _cyclic(workers: int, tolerated: int, seed: int) -> Matrix:
    """Algorithm 2: all rows lie in the null space of a random H with H·1 = 0, which any p - s of them span."""
    random = np.random.default_rng(seed)
    h = random.standard_normal((tolerated, workers))
    h[:, -1] = -h[:, :-1].sum(axis=1)
    matrix = np.zeros((workers, workers))
    for worker in range(workers):
        first, *rest = (worker + np.arange(tolerated + 1)) % workers
        matrix[worker, first] = 1.0
        matrix[worker, rest] = -np.linalg.solve(h[:, rest], h[:, first])
        matrix[worker] /= np.linalg.norm(matrix[worker]) if tolerated else 1.0
    return matrix


def _combination(rows: Matrix) -> Matrix:
    """Coefficients whose combination of the rows is nearest to all ones."""
    # Where rows repeat a division, the first of each kind add up to it, without rounding.
    _, first = np.unique(rows, axis=0, return_index=True)
    if (rows[first].sum(axis=0) == 1).all():
        return np.isin(np.arange(len(rows)), first).astype(np.float64)
    return np.linalg.lstsq(rows.T, np.ones(rows.shape[1]), rcond=None)[0].astype(np.float64)


def _worst(code: Code) -> float:
    """The largest amplification over sets of p - s answers: all of them, or a random sample."""
    workers, count = code.workers, code.workers - code.tolerated
    random = np.random.default_rng(mixed(workers, code.tolerated))
    if math.comb(workers, count) <= _TRIED:
        answers = itertools.combinations(range(workers), count)
    else:
        answers = (random.permutation(workers)[:count].tolist() for _ in range(_TRIED))
    try:
        return max(map(code.amplification, answers))
    except UsageError:
        return math.inf
