"""Matrices as products of two thin ones, found by one step of power iteration from where the last one ended.

Everybody multiplies its matrix M with the same thin Q; the sums P of the products are made orthonormal, and each
multiplies its M with P. The sum of these is the new Q, and P times it the sum of all M, as far as it has this rank. So
two small sums are all that travels. Tensors that are not matrices, or too small, ride along with the first sum.

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
from offbeat.runtime.compression.coder import Coder, PayloadExchange


class Thin(Coder):
    """All tensors of a row, those that are alike and at equal distances at once."""

    def __init__(self, shapes: Shapes, rank: int, seed: int) -> None:
        self._count, self._seed = numbers_in(shapes), seed
        found = matrices_in(shapes, rank)
        self._stacks = _stacks(found)
        self._rest = _between(found, self._count)
        self._right: list[Tensor] = []
        """The thin Q of every stack, as the last sum has left it."""

    def encode(self, row: Tensor) -> Tensor:
        """Refused: there is no letter, only sums."""
        del row
        raise RunError("lowrank sums thin matrices in two exchanges of all workers: it has no letter for one receiver.")

    def add(self, letter: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Refused: there is no letter, only sums."""
        del letter, weight
        self.encode(out)

    def sum(self, row: Tensor, total: Tensor, link: PayloadExchange) -> None:
        """Two sums: left sides with the rest, then right sides."""
        if row.numel() != self._count:
            raise RunError(f"lowrank was made for {self._count:,} numbers and was given {row.numel():,}.")
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

    def _summed(
        self, stacks: list[Tensor], rest: list[Tensor], link: PayloadExchange
    ) -> tuple[list[Tensor], list[Tensor]]:
        """All of them in one exchange."""
        if not stacks and not rest:
            return [], []
        flat = torch.cat([piece.reshape(-1) for piece in (*stacks, *rest)])
        pieces = link.sum(flat).split([piece.numel() for piece in (*stacks, *rest)])
        cut = len(stacks)
        return [p.view(s.shape) for p, s in zip(pieces[:cut], stacks, strict=True)], list(pieces[cut:])

    def _leave(self, row: Tensor, total: Tensor, rest: list[Tensor], size: int) -> None:
        """Each worker owes its matrix less the mean of all: together that is what the sum has left out."""
        if row is not total:
            for stack in self._stacks:
                _stacked(row, stack).sub_(_stacked(total, stack), alpha=1.0 / size)
        for part, value in zip(self._rest, rest, strict=True):
            if row is not total:
                row[part].zero_()
            total[part].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Where power iteration goes on."""
        return {"right": list(self._right)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self._right = [tensor.clone() for tensor in state["right"]]


def _stacks(found: list[Matrix]) -> list[list[Matrix]]:
    """Matrices of one shape that follow each other at equal distances."""
    stacks: list[list[Matrix]] = []
    for matrix in found:
        last = stacks[-1] if stacks else []
        alike = bool(last) and last[-1][1:] == matrix[1:]
        if alike and (len(last) == 1 or matrix.start - last[-1].start == last[1].start - last[0].start):
            last.append(matrix)
        else:
            stacks.append([matrix])
    return stacks


def _stacked(row: Tensor, stack: list[Matrix]) -> Tensor:
    """A stack as one tensor; no number is copied."""
    first = stack[0]
    distance = stack[1].start - first.start if len(stack) > 1 else first.rows * first.columns
    shape, strides = (len(stack), first.rows, first.columns), (distance, first.columns, 1)
    return row.as_strided(shape, strides, row.storage_offset() + first.start)


def _between(found: list[Matrix], count: int) -> list[slice]:
    """What no matrix covers."""
    edges = [0, *(edge for m in found for edge in (m.start, m.start + m.rows * m.columns)), count]
    return [slice(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def _kept(old: Tensor, new: Tensor) -> Tensor:
    """The new sides; where a matrix was all zeros the old one, or nothing would ever come of it again."""
    gone = new.abs().amax((1, 2), keepdim=True) == 0
    return torch.where(gone, old, new) if bool(gone.any()) else new
