"""Which worker gets which examples: the order of an epoch, and its division into parts.

All of it is arithmetic on indices, so that every worker computes the same division without a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import DataError

Indices = NDArray[np.int64]
Item = TypeVar("Item")


def mixed(*numbers: int) -> int:
    """One seed from several numbers; nearby inputs give unrelated seeds."""
    # Two words each, and how many: SeedSequence itself takes (1,), (1, 0) and (1, 0, 0) for the same.
    words = [word for n in numbers for word in divmod(n % 2**64, 2**32)]
    words = np.random.SeedSequence([len(numbers), *words]).generate_state(2, np.uint32)
    return int(words[0]) << 31 | int(words[1]) >> 1


def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """The range `[start, stop)` of `count` things for `rank`; ranges differ in length by at most one."""
    return count * rank // size, count * (rank + 1) // size


def mine(batch: Sequence[Item], rank: int, size: int) -> Sequence[Item]:
    """The slice of a global batch for `rank`; together the slices are the batch, in order."""
    start, stop = share(len(batch), rank, size)
    return batch[start:stop]


def order(count: int, seed: int, epoch: int) -> Indices:
    """The order of an epoch's examples: a permutation fixed by seed and epoch alone."""
    return np.random.default_rng(mixed(seed, epoch)).permutation(count).astype(np.int64)


def dirichlet(labels: Sequence[int] | NDArray[np.int64], size: int, alpha: float, seed: int) -> list[Indices]:
    """Parts skewed by label; see `dirichlet_owners`. No part stays empty while another has two examples or more."""
    owners = dirichlet_owners(labels, size, alpha, seed)
    joined = np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners, minlength=size))[:-1])
    for empty in [i for i, part in enumerate(joined) if len(part) == 0]:
        largest = max(range(size), key=lambda i: len(joined[i]))
        if len(joined[largest]) > 1:
            joined[empty], joined[largest] = joined[largest][-1:], joined[largest][:-1]
    return joined


def dirichlet_owners(labels: Sequence[int] | NDArray[np.int64], size: int, alpha: float, seed: int) -> Indices:
    """The part of each example: each label's examples are spread over the parts by shares drawn from Dirichlet(alpha).

    Small `alpha` gives each part few labels, large `alpha` approaches equal shares (Hsu, Qi and Brown 2019).
    """
    if not 0 < alpha < float("inf"):
        raise DataError(
            f"dirichlet({alpha}) makes no sense: alpha must be a number above 0 (0.1 is very skewed, 100 almost even)."
        )
    known = np.asarray(labels)
    random = np.random.default_rng(mixed(seed, size))
    owners = np.zeros(len(known), np.int64)
    for label in np.unique(known):
        members = random.permutation(np.flatnonzero(known == label))
        cuts = (np.cumsum(random.dirichlet(np.full(size, alpha)))[:-1] * len(members)).round().astype(int)
        owners[members] = np.repeat(np.arange(size), np.diff(cuts, prepend=0, append=len(members)))
    return owners


def batches_of_parts(parts: Sequence[Indices], global_batch: int, seed: int, epoch: int) -> Iterator[list[Indices]]:
    """Global batches drawn from uneven parts, each as one slice per worker.

    Every worker goes through its own shuffled part in as many slices as there are global batches, so that all end
    together and no example is lost; a slice may be empty if a part is small.
    """
    total = sum(len(part) for part in parts)
    steps = -(-total // global_batch)
    shuffled = [part[order(len(part), mixed(seed, rank), epoch)] for rank, part in enumerate(parts)]
    for step in range(steps):
        yield [part[slice(*share(len(part), step, steps))] for part in shuffled]
