"""What must hold of the tensors that torch hands to a collective, and how they are held for it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor


def listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Torch's calls take one tensor or a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def options(made: Any, given: Any, operation: Any, timeout: timedelta | None) -> Any:
    """Options of a call that was made without them; `given` may be the operation or the time."""
    for value in (given, operation, timeout):
        if isinstance(value, timedelta):
            made.timeout = value
        elif value is not None:
            made.reduceOp = value
    return made


def operation_of(given: Any) -> Any:
    """The reduction that options ask for."""
    return given.reduceOp.op


def plain(tensors: Sequence[Tensor]) -> bool:
    """Whether these lie densely in main memory; others are Gloo's business."""
    return all(tensor.is_cpu and tensor.layout is torch.strided for tensor in tensors)


@contextmanager
def in_place(tensors: Sequence[Tensor]) -> Generator[list[Tensor]]:
    """The same tensors where their numbers lie in a row; of others a copy, which is put back in the end."""
    held = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    yield held
    for tensor, copy in zip(tensors, held, strict=True):
        if copy is not tensor:
            tensor.detach().copy_(copy)


def within(root: int, size: int, what: str) -> None:
    """The root must be one of the ranks."""
    if not 0 <= root < size:
        raise ValueError(f"{what}: invalid root rank {root}; the group has ranks 0 to {size - 1}")


def as_many(tensors: Sequence[Tensor], size: int, what: str) -> None:
    """There must be one for each rank."""
    if len(tensors) != size:
        raise ValueError(f"{what}: invalid number of tensors: {len(tensors)}, but the group has {size} ranks")


def same_kind(tensors: Sequence[Tensor], what: str) -> None:
    """All must be of one kind of number."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        kinds = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
        raise ValueError(f"{what}: invalid tensor type: all must be of one kind, but there are {kinds}")


def times(long: Tensor, short: Tensor, size: int, what: str) -> None:
    """One must be as long as `size` times the other."""
    if long.numel() != short.numel() * size:
        raise ValueError(
            f"{what} has {long.numel():,} elements, but must have {size} x {short.numel():,}, one part for each rank"
        )


def rows(tensor: Tensor, size: int) -> list[Tensor]:
    """A contiguous tensor in `size` equal parts."""
    return list(tensor.detach().reshape(-1).chunk(size)) if tensor.numel() else [tensor.detach().reshape(-1)] * size


def check_splits(tensor: Tensor, splits: Sequence[int], size: int) -> None:
    """Splits must be one for each rank and add up; without any, the first dimension is cut evenly."""
    length = tensor.shape[0] if tensor.dim() else 0
    if splits:
        if len(splits) != size or sum(splits) != length:
            raise ValueError(f"all_to_all_single: splits {list(splits)} do not cut {length} rows for {size} ranks")
    elif length % size:
        raise ValueError(f"all_to_all_single: {length} rows cannot be cut evenly for {size} ranks: give split sizes")


def cut(tensor: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """A contiguous tensor, cut along its first dimension."""
    sizes = list(splits) or [tensor.shape[0] // size] * size
    return list(tensor.detach().split(sizes))
