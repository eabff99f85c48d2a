"""How numbers of each dtype are combined, in place and without the interpreter in between.

Everything is numpy, because its calls are short. Dtypes that numpy lacks (bfloat16) or is slow at (half) are moved as
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
"""Writes the combination of the first two to the third."""


class ReductionError(UsageError, RuntimeError):
    """A dtype that does not support a reduction; a RuntimeError too, as torch's backends raise it."""


class SumSpec(NamedTuple):
    """A sum that can be compiled."""

    divisor: int
    """Divides the sum at the end; 0: no division."""
    weight: float
    """Factor of this rank's numbers."""


class WeightedSum(NamedTuple):
    """Writes the sum of rows of a dtype, each times its weight, to an array, which may be the first row's.

    Products are rounded before they are added, here and in native.c: so both have the same bits.
    """

    weights: tuple[float, ...]
    dtype: torch.dtype

    def __call__(self, out: Array, *rows: Array) -> None:
        """Write the sum of the weighted rows."""
        if self.dtype not in (torch.float32, torch.float64):
            first, *others = (torch.from_numpy(row).view(self.dtype) for row in rows)
            total = torch.mul(first, self.weights[0], out=torch.from_numpy(out).view(self.dtype))
            for weight, other in zip(self.weights[1:], others, strict=True):
                total.add_(other, alpha=weight)
            return
        own, *factors = (out.dtype.type(weight) for weight in self.weights)
        product = np.empty(min(_AT_ONCE, out.size), out.dtype)
        for start in range(0, out.size, _AT_ONCE):
            here, first, *others = (row[start : start + _AT_ONCE] for row in (out, *rows))
            np.multiply(first, own, here)
            for factor, other in zip(factors, others, strict=True):
                np.add(here, np.multiply(other, factor, product[: here.size]), here)


class Ways(NamedTuple):
    """How a reduction combines numbers."""

    combine: Combine | None = None
    finish: Callable[[Array], Any] | None = None
    """Applied to the combination of all ranks, in place."""
    weigh: Callable[[Array, Array], Any] | None = None
    """Writes this rank's numbers, times its weight, to the first; None: without weights."""
    blend: Callable[[Array, Array, Array], Any] | None = None
    """Writes a row plus another times this rank's weight to the third, in one pass; for sums of two."""
    dtype: torch.dtype | None = None
    """Of rows whose weighted sums are taken; None: of a reduction without weights of the schedule's own."""
    plain: SumSpec | None = None
    """The reduction in figures, if it is a sum of a common dtype."""


_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_WORDS: dict[torch.dtype, Any] = {torch.bool: np.bool_} | {
    getattr(torch, name): getattr(np, name) for name in ("float32", "float64", "complex64", "complex128", *_INTEGERS)
}


_AT_ONCE = 1 << 14
"""Elements of a weighted sum that are taken at once: few enough for the caches."""
_BY_SIZE = {1: np.uint8, 2: np.uint16, 4: np.int32}
_UFUNCS: dict[Any, tuple[Combine, Callable[..., Tensor]]] = {
    ReduceOp.SUM: (np.add, torch.add),
    ReduceOp.AVG: (np.add, torch.add),
    ReduceOp.PRODUCT: (np.multiply, torch.mul),
    # NumPy warns if these two get their output by position.
    ReduceOp.MIN: (lambda a, b, out: np.minimum(a, b, out=out), torch.minimum),
    ReduceOp.MAX: (lambda a, b, out: np.maximum(a, b, out=out), torch.maximum),
    ReduceOp.BAND: (np.bitwise_and, torch.bitwise_and),
    ReduceOp.BOR: (np.bitwise_or, torch.bitwise_or),
    ReduceOp.BXOR: (np.bitwise_xor, torch.bitwise_xor),
}
_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
OPERATIONS = tuple(_UFUNCS)
"""All reductions, in an order that never changes: marks on the board number them by it."""


def torch_function(operation: Any) -> Callable[..., Tensor] | None:
    """The torch function of a reduction (a sum for AVG); None if there is none."""
    # Torch's operations with options are equal to one of these, but have another hash.
    return next((function for kind, (_, function) in _UFUNCS.items() if kind == operation), None)


def words_of(dtype: torch.dtype) -> Any:
    """The numpy dtype in which numbers of a torch dtype are moved."""
    words = _WORDS.get(dtype)
    return words if words is not None else _BY_SIZE[dtype.itemsize]


def as_words(tensor: Tensor) -> Array:
    """A contiguous tensor as a flat array, without a copy; the caller keeps the tensor alive."""
    # Not by `numpy()`: the tensor's storage could not be resized afterwards, which some libraries do (FSDP).
    count, words = tensor.numel(), words_of(tensor.dtype)
    if not count:
        return np.empty(0, words)
    raw: Any = (ctypes.c_char * (count * np.dtype(words).itemsize)).from_address(tensor.data_ptr())
    return np.frombuffer(raw, dtype=words)


def combiner(operation: Any, dtype: torch.dtype) -> Combine:
    """How two rows of a dtype are combined; AVG adds, and `averager` divides at the end."""
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
    sample = torch.zeros(1, dtype=dtype)
    try:
        function(sample, sample, out=sample)
    except (RuntimeError, NotImplementedError) as error:
        raise ReductionError(f"ReduceOp.{name} cannot be done with {dtype}: {error}") from error


def _by_torch(function: Callable[..., Any], dtype: torch.dtype, a: Array, b: Array, out: Array) -> None:
    first, second, third = (torch.from_numpy(words).view(dtype) for words in (a, b, out))
    function(first, second, out=third)


def averager(dtype: torch.dtype, size: int) -> Callable[[Array], Any]:
    """Divides a row of a dtype by the number of ranks, in place; integers are rounded towards zero."""
    if dtype == torch.bool:
        raise ReductionError(f"ReduceOp.AVG cannot be done with {dtype}: truth values have no mean")
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return lambda row: np.floor_divide(row, row.dtype.type(size), out=row)
    mode = None if dtype.is_floating_point or dtype.is_complex else "trunc"
    return lambda row: torch.from_numpy(row).view(dtype).div_(size, rounding_mode=mode)


def weigher(dtype: torch.dtype, weight: float) -> Callable[[Array, Array], Any]:
    """Writes a row of a dtype, times `weight`, to the first."""
    if weight == 1.0:
        return np.copyto
    if dtype in (torch.float32, torch.float64):
        factor = words_of(dtype)(weight)
        return lambda out, row: np.multiply(row, factor, out)
    return lambda out, row: torch.mul(torch.from_numpy(row).view(dtype), weight, out=torch.from_numpy(out).view(dtype))


def _plain(operation: Any, dtype: torch.dtype, size: int, weight: float | None) -> SumSpec | None:
    if operation == ReduceOp.AVG or weight is not None:
        if dtype not in (torch.float32, torch.float64) or operation not in (ReduceOp.AVG, ReduceOp.SUM):
            return None
        return SumSpec(size if operation == ReduceOp.AVG else 0, 1.0 if weight is None else weight)
    common = dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
    return SumSpec(0, 1.0) if operation == ReduceOp.SUM and common else None


def ways_of(operation: Any, dtype: torch.dtype, size: int, weight: float | None = None) -> Ways:
    """How an operation combines numbers of a dtype over `size` ranks."""
    average = operation == ReduceOp.AVG
    return Ways(
        combiner(operation, dtype),
        averager(dtype, size) if average else None,
        None if weight is None else weigher(dtype, weight),
        None
        if weight is None or operation != ReduceOp.SUM
        else partial(_by_torch, partial(torch.add, alpha=weight), dtype),
        plain=_plain(operation, dtype, size, weight),
    )


def mixing_ways(dtype: torch.dtype) -> Ways:
    """How rows of a dtype are mixed by the weights of a schedule."""
    return Ways(dtype=dtype, plain=_plain(ReduceOp.SUM, dtype, 0, 1.0))
