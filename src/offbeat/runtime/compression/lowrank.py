"""Matrices as products of two thin ones, by one step of power iteration from where the last one ended.

All workers multiply their matrix M by the same thin Q; the sum P of the products is orthonormalized, and each worker
multiplies its M by P. The sum of these is the new Q, and P times Q approximates the sum of all M at this rank. So only
two small sums are sent. Tensors that are not matrices, or too small, go with the first sum.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression" (2019), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import RunError
from offbeat.protocols.compression import Matrix, Shapes, matrices_in, numbers_in
from offbeat.protocols.partition import mixed
from offbeat.runtime.compression.coder import Coder, GroupLink


class LowRankCoder(Coder):
    """All tensors of a row; those of one shape at equal distances are handled at once."""

    def __init__(self, shapes: Shapes, rank: int, seed: int) -> None:
        self._count, self._seed = numbers_in(shapes), seed
        matrices = matrices_in(shapes, rank)
        self._stacks = _stacks(matrices)
        edges = [0, *(edge for m in matrices for edge in (m.start, m.start + m.rows * m.columns)), self._count]
        self._rest = [slice(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
        """What no matrix covers."""
        self._right: list[Tensor] = []
        """The thin Q of every stack, from the last sum."""

    def encode(self, row: Tensor) -> Tensor:
        """Refused: there are only sums."""
        del row
        raise RunError(
            "lowrank sums thin matrices in two exchanges of all workers: it has no payload for one receiver."
        )

    def add(self, payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Refused: there are only sums."""
        del payload, weight
        self.encode(out)

    def sum(self, row: Tensor, total: Tensor, link: GroupLink) -> None:
        """Two sums: left sides with the rest, then right sides."""
        if row.numel() != self._count:
            raise RunError(f"lowrank was built for {self._count:,} numbers and got {row.numel():,}.")
        if not self._right:
            self._begin(row.dtype)
        stacks = [_stacked(row, stack) for stack in self._stacks]
        lefts = [torch.bmm(matrices, right) for matrices, right in zip(stacks, self._right, strict=True)]
        rest = [row[part] for part in self._rest]
        lefts, rest = self._summed(lefts, rest, link)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [torch.bmm(matrices.mT, left) for matrices, left in zip(stacks, lefts, strict=True)]
        rights, _ = self._summed(rights, [], link)
        for stack, left, right in zip(self._stacks, lefts, rights, strict=True):
            torch.bmm(left, right.mT, out=_stacked(total, stack))
        self._leave(row, total, rest, link.size)
        self._right = [_kept(old, new) for old, new in zip(self._right, rights, strict=True)]

    def _begin(self, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(mixed(self._seed, 0))
        for stack in self._stacks:
            first = stack[0]
            drawn = torch.randn(len(stack), first.columns, first.rank, generator=random, dtype=dtype)
            self._right.append(torch.linalg.qr(drawn).Q)

    def _summed(self, stacks: list[Tensor], rest: list[Tensor], link: GroupLink) -> tuple[list[Tensor], list[Tensor]]:
        if not stacks and not rest:
            return [], []
        flat = torch.cat([piece.reshape(-1) for piece in (*stacks, *rest)])
        pieces = link.sum(flat).split([piece.numel() for piece in (*stacks, *rest)])
        cut = len(stacks)
        return [p.view(s.shape) for p, s in zip(pieces[:cut], stacks, strict=True)], list(pieces[cut:])

    def _leave(self, row: Tensor, total: Tensor, rest: list[Tensor], size: int) -> None:
        """Each worker's error is its matrix less the mean of all: together, what the sum has left out."""
        if row is not total:
            for stack in self._stacks:
                _stacked(row, stack).sub_(_stacked(total, stack), alpha=1.0 / size)
        for part, value in zip(self._rest, rest, strict=True):
            if row is not total:
                row[part].zero_()
            total[part].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Where power iteration continues."""
        return {"right": list(self._right)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        self._right = [tensor.clone() for tensor in state["right"]]


def _stacks(matrices: list[Matrix]) -> list[list[Matrix]]:
    """Matrices of one shape that follow each other at equal distances."""
    stacks: list[list[Matrix]] = []
    for matrix in matrices:
        last = stacks[-1] if stacks else []
        alike = bool(last) and last[-1][1:] == matrix[1:]
        if alike and (len(last) == 1 or matrix.start - last[-1].start == last[1].start - last[0].start):
            last.append(matrix)
        else:
            stacks.append([matrix])
    return stacks


def _stacked(row: Tensor, stack: list[Matrix]) -> Tensor:
    """A stack as one tensor, without a copy."""
    first = stack[0]
    distance = stack[1].start - first.start if len(stack) > 1 else first.rows * first.columns
    shape, strides = (len(stack), first.rows, first.columns), (distance, first.columns, 1)
    return row.as_strided(shape, strides, row.storage_offset() + first.start)


def _kept(old: Tensor, new: Tensor) -> Tensor:
    """The new Q; the old one where a matrix was all zeros, or it would stay zero forever."""
    gone = new.abs().amax((1, 2), keepdim=True) == 0
    return torch.where(gone, old, new) if bool(gone.any()) else new
