"""Rules that combine updates although some clients lie: median, trimmed mean, Krum, and the bound of a norm.

Each takes the updates as rows of a matrix, and counts every client once: a liar would claim any number of examples.
Columns are independent for the first two, so they work in blocks. All arithmetic is in 64 bits and in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def middle(rows: Tensor) -> Tensor:
    """The coordinate-wise median; of an even number the mean of the two in the middle.

    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (2018), definition 1.
    """
    return between(rows, (len(rows) - 1) // 2)


def between(rows: Tensor, cut: int) -> Tensor:
    """The coordinate-wise mean without the `cut` smallest and the `cut` largest numbers.

    Yin et al. (2018), definition 2.
    """
    count = len(rows)
    kept = rows.double().sort(dim=0).values[cut : count - cut]
    # Row by row: the order of a reduction depends on the processor.
    total = torch.zeros_like(kept[0])
    for row in kept:
        total += row
    return total.div_(count - 2 * cut)


def products(rows: Tensor) -> Tensor:
    """The inner product of each pair of rows; products of blocks of columns add up."""
    wide = rows.double()
    return wide @ wide.T


def nearest(inner: Tensor, byzantine: int, keep: int) -> list[int]:
    """The `keep` rows nearest to their neighbours, from the inner products of all pairs.

    A row's score is the sum of the squared distances to its n - byzantine - 2 nearest neighbours, and the lowest
    scores win: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent" (2017),
    section 4. Several are kept as in its Multi-Krum.
    """
    norms = inner.diagonal()
    distances = (norms[:, None] + norms[None, :] - 2 * inner).clamp_(min=0)
    distances.fill_diagonal_(0)
    # The first of a sorted row is its own 0.
    near = distances.sort(dim=1).values[:, 1 : len(inner) - byzantine - 1]
    scores: list[float] = near.cumsum(dim=1)[:, -1].tolist()
    # Of equal scores, the first.
    return sorted(sorted(range(len(scores)), key=scores.__getitem__)[:keep])


def bounded(update: Tensor, bound: float) -> Tensor:
    """An update scaled down to this Euclidean norm, in place, if it is longer.

    Sun et al., "Can You Really Backdoor Federated Learning?" (2019), section 4.
    """
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    return update.mul_(bound / norm) if norm > bound else update
