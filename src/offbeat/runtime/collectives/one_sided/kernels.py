"""How numbers of each kind are combined, in place and without the interpreter in between.

Everything is numpy, because its calls are short. What numpy does not have (bfloat16) or is slow at (half) is moved as
16-bit words and combined by torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ReduceOp

from offbeat.errors import UsageError

Array = NDArray[Any]
Combine = Callable[[Array, Array, Array], Any]
"""Puts a combined with b into the third."""


class ReductionError(UsageError, RuntimeError):
    """Numbers of a kind that cannot be combined so; a RuntimeError too, as torch's backends raise it."""


class SumSpec(NamedTuple):
    """A sum in figures."""

    divisor: int
    """What it is divided by in the end; 0: nothing."""
    weight: float
    """What this rank's numbers are multiplied by."""


class Ways(NamedTuple):
    """How numbers are combined on their way."""

    combine: Combine | None = None
    """Puts a combined with b into the third."""
    finish: Callable[[Array], None] | None = None
    """Done to what all have been combined to, in place."""
    weigh: Callable[[Array, Array], Any] | None = None
    """Puts what this rank brings, times its weight, into the first; None: it counts as it is."""
    blend: Callable[[Array, Array, Array], Any] | None = None
    """Puts a row plus another times this rank's weight into the third, in one pass; where there are only two to add."""
    plain: SumSpec | None = None
    """All of that in figures, where it is a sum of common numbers."""


_WORDS: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.bool: np.bool_,
}


# NumPy warns if these two are given a third by its place.
def _least(a: Array, b: Array, out: Array) -> None:
    np.minimum(a, b, out=out)


def _greatest(a: Array, b: Array, out: Array) -> None:
    np.maximum(a, b, out=out)


_BY_SIZE = {1: np.uint8, 2: np.uint16, 4: np.int32}
_UFUNCS: dict[Any, tuple[Any, Callable[..., Tensor]]] = {
    ReduceOp.SUM: (np.add, torch.add),
    ReduceOp.AVG: (np.add, torch.add),
    ReduceOp.PRODUCT: (np.multiply, torch.mul),
    ReduceOp.MIN: (_least, torch.minimum),
    ReduceOp.MAX: (_greatest, torch.maximum),
    ReduceOp.BAND: (np.bitwise_and, torch.bitwise_and),
    ReduceOp.BOR: (np.bitwise_or, torch.bitwise_or),
    ReduceOp.BXOR: (np.bitwise_xor, torch.bitwise_xor),
}
_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
OPERATIONS = tuple(_UFUNCS)
"""Every reduction there is, in an order that never changes: marks on the board count by it."""


def torch_function(operation: Any) -> Callable[..., Tensor] | None:
    """What combines two tensors so; a mean is a sum, divided in the end. None if there is no such reduction."""
    # Torch's kinds of operations that come with options are equal to one of these, but not found by it.
    return next((function for kind, (_, function) in _UFUNCS.items() if kind == operation), None)


def words_of(dtype: torch.dtype) -> Any:
    """The numpy kind in which numbers of this kind are moved."""
    found = _WORDS.get(dtype)
    return found if found is not None else _BY_SIZE[dtype.itemsize]


def as_words(tensor: Tensor) -> Array:
    """The numbers of a contiguous tensor in one row, without a copy; whoever uses them holds the tensor meanwhile."""
    # Not by `numpy()`: the tensor's memory could never be given back afterwards, which some libraries do (FSDP).
    return row_at(tensor.data_ptr(), tensor.numel(), words_of(tensor.dtype))


def row_at(address: int, count: int, words: Any) -> Array:
    """So many numbers at an address; whoever uses them sees to it that they are there."""
    if not count:
        return np.empty(0, words)
    raw: Any = (ctypes.c_char * (count * np.dtype(words).itemsize)).from_address(address)
    return np.frombuffer(raw, dtype=words)


def combiner(operation: Any, dtype: torch.dtype) -> Combine:
    """How two rows of such numbers are combined; AVG adds, and is divided in the end by `averager`."""
    if operation in _BITS:
        if dtype.is_floating_point or dtype.is_complex:
            raise ReductionError(f"Cannot use ReduceOp.{operation.name} with non-integral dtype ({dtype})")
        return _UFUNCS[operation][0]
    if operation not in _UFUNCS:
        raise ReductionError(f"the backend offbeat has no ReduceOp.{getattr(operation, 'name', operation)}")
    plain, strange = _UFUNCS[operation]
    if dtype in _WORDS:
        return plain
    _try(strange, dtype, operation.name)
    return partial(_by_torch, strange, dtype)


@lru_cache
def _try(function: Callable[..., Any], dtype: torch.dtype, name: str) -> None:
    """Refuse what torch cannot do before any rank waits for another."""
    one = torch.zeros(1, dtype=dtype)
    try:
        function(one, one, out=one)
    except (RuntimeError, NotImplementedError) as error:
        raise ReductionError(f"ReduceOp.{name} cannot be done with numbers of the kind {dtype}: {error}") from error


def _by_torch(function: Callable[..., Any], dtype: torch.dtype, a: Array, b: Array, out: Array) -> None:
    first, second, third = (torch.from_numpy(words).view(dtype) for words in (a, b, out))
    function(first, second, out=third)


def averager(dtype: torch.dtype, size: int) -> Callable[[Array], None]:
    """Divides a row of such numbers by the number of ranks, in place; whole numbers are rounded towards zero."""
    if dtype == torch.bool:
        raise ReductionError(f"ReduceOp.AVG cannot be done with numbers of the kind {dtype}: truth has no mean")
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return lambda row: _divide(row, size)
    if dtype.is_floating_point or dtype.is_complex:

        def divide(row: Array) -> None:
            torch.from_numpy(row).view(dtype).div_(size)
    else:

        def divide(row: Array) -> None:
            torch.from_numpy(row).view(dtype).div_(size, rounding_mode="trunc")

    return divide


def _divide(row: Array, size: int) -> None:
    np.floor_divide(row, row.dtype.type(size), out=row)


def weigher(dtype: torch.dtype, weight: float) -> Callable[[Array, Array], Any]:
    """Puts a row of such numbers, times `weight`, into the first."""
    if weight == 1.0:
        return np.copyto
    if dtype in (torch.float32, torch.float64):
        factor = words_of(dtype)(weight)
        return lambda out, row: np.multiply(row, factor, out)

    def by_torch(out: Array, row: Array) -> None:
        torch.mul(torch.from_numpy(row).view(dtype), weight, out=torch.from_numpy(out).view(dtype))

    return by_torch


def _blended(dtype: torch.dtype, weight: float, row: Array, own: Array, out: Array) -> None:
    other, mine, target = (torch.from_numpy(words).view(dtype) for words in (row, own, out))
    torch.add(other, mine, alpha=weight, out=target)


def _plain(operation: Any, dtype: torch.dtype, size: int, weight: float | None) -> SumSpec | None:
    if operation == ReduceOp.AVG or weight is not None:
        if dtype not in (torch.float32, torch.float64) or operation not in (ReduceOp.AVG, ReduceOp.SUM):
            return None
        return SumSpec(size if operation == ReduceOp.AVG else 0, 1.0 if weight is None else weight)
    common = dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
    return SumSpec(0, 1.0) if operation == ReduceOp.SUM and common else None


def ways_of(operation: Any, dtype: torch.dtype, size: int, weight: float | None = None) -> Ways:
    """How numbers of this kind are combined by this operation, over so many ranks."""
    average = operation == ReduceOp.AVG
    return Ways(
        combiner(operation, dtype),
        averager(dtype, size) if average else None,
        None if weight is None else weigher(dtype, weight),
        None if weight is None or operation != ReduceOp.SUM else partial(_blended, dtype, weight),
        _plain(operation, dtype, size, weight),
    )
