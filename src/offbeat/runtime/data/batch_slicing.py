"""Slices of finished batches: every tensor in a batch is cut along its first dimension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any, cast

import numpy as np
from torch import Tensor

from offbeat.errors import DataError
from offbeat.protocols.partition import share


def examples_in(batch: Any) -> int | None:
    """Number of examples in a batch: the first dimension of its tensors; None if they differ."""
    lengths = {len(leaf) for leaf in arrays_in(batch)}
    return lengths.pop() if len(lengths) == 1 else None


def cut(batch: Any, rank: int, size: int) -> tuple[Any, int, int]:
    """A worker's slice of a batch, its number of examples, and that of the whole batch."""
    total = examples_in(batch)
    if size == 1:
        return batch, total or 1, total or 1
    if total is None:
        raise DataError(
            f"a batch of type {type(batch).__name__} cannot be divided over {size} workers: its tensors differ in "
            f"their first dimension. Give prepare() a DataLoader over single examples, or divide the data yourself and "
            f"call prepare(..., split=False)."
        )
    start, stop = share(total, rank, size)
    # A worker without examples still takes part in the step, with one of weight 0.
    low, high = (start, stop) if stop > start else (total - 1, total)
    return _cut(batch, low, high, total), stop - start, total


def note_slice(error: BaseException | None, examples: int, total: int | None) -> None:
    """Add to a script's error that its batch was a slice: mismatched shapes often come from a fixed batch size."""
    if type(error) in (RuntimeError, ValueError, IndexError) and total is not None and examples != total:
        cast("BaseException", error).add_note(
            f"This worker's batch held {examples} of the {total} examples that the loader has in a batch, because "
            f"prepare() divides batches over the workers. If the error is about shapes, look for a batch size that is "
            f"fixed in the script, as in reshape(batch_size, -1) or a hidden state, and use that of the batch itself, "
            f"x.size(0)."
        )


def arrays_in(batch: Any) -> Iterator[Any]:
    """All tensors and arrays in a batch that have a dimension."""
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim:
            yield batch
    elif isinstance(batch, Mapping):
        for value in cast("Mapping[Any, Any]", batch).values():
            yield from arrays_in(value)
    elif isinstance(batch, list | tuple):
        for value in cast("list[Any]", batch):
            yield from arrays_in(value)


def _cut(batch: Any, low: int, high: int, total: int) -> Any:
    if isinstance(batch, Tensor | np.ndarray):
        return batch[low:high] if batch.ndim else batch
    if isinstance(batch, Mapping):
        pairs = cast("Mapping[Any, Any]", batch).items()
        parts = {key: _cut(value, low, high, total) for key, value in pairs}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return parts
        same = copy(cast("MutableMapping[Any, Any]", batch))  # Tokenizers return mappings with their own methods.
        same.update(parts)
        return same
    if isinstance(batch, list | tuple):
        held = cast("list[Any]", batch)
        if len(held) == total and not any(True for _ in arrays_in(held)):
            return held[low:high]  # Names or other plain values, one per example.
        parts = [_cut(value, low, high, total) for value in held]
        if hasattr(held, "_fields"):
            return cast("Any", type(held))(*parts)
        return parts if isinstance(batch, list) else tuple(parts)
    return batch
