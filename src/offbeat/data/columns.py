"""Columns of tables as tensors: which types there are, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from offbeat.errors import DataError, UsageError, did_you_mean

Row = Callable[[int], Any]
"""The value of a column in one row of a part."""


def pyarrow() -> Any:
    """The module, or what to install."""
    try:
        import pyarrow as module
    except ImportError as error:
        raise UsageError("tables in files are read by pyarrow: pip install 'offbeat[data]'.") from error
    return module


def chosen(names: Sequence[str], columns: Sequence[str] | None, where: str) -> list[str]:
    """The columns to read; unknown ones are refused."""
    if columns is None:
        return list(names)
    if isinstance(columns, str):
        raise UsageError(f"columns={columns!r} is one text, not a list of names: write [{columns!r}].")
    for name in columns:
        if name not in names:
            raise DataError(f"{where} has no column {name!r}.{did_you_mean(name, names)}")
    if not columns:
        raise UsageError("columns=[] leaves nothing to read: name some, or omit it for all.")
    return list(columns)


def check_types(types: Mapping[str, Any], where: str) -> None:
    """Refuse columns that are no tensors and no text."""
    for name, kind in types.items():
        if not _is_known(kind):
            raise DataError(
                f"column {name!r} of {where} has the type {kind}, which cannot become a tensor. Convert it to numbers "
                f"(a timestamp, say, to int64) where the file is written, or name the columns to read: columns=[...]."
            )


def _is_known(kind: Any) -> bool:
    types = pyarrow().types
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return True
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_known(kind.value_type) and not _is_text(kind.value_type)
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return _is_text(kind)


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    kinds = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_kind(kind) for is_kind in kinds)


def row_of(array: Any, name: str, where: str) -> Row:
    """What returns the value of each row of a column."""
    if array.null_count:
        row = int(np.flatnonzero(np.asarray(array.is_null()))[0])
        raise DataError(
            f"column {name!r} of {where} has no value in row {row} (counted from 0 in this part), one of "
            f"{array.null_count} such rows. A tensor has no gaps: fill or drop them where the file is written."
        )
    types = pyarrow().types
    kind = array.type
    if types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if _is_text(kind):
        return lambda row: array[row].as_py()
    if types.is_fixed_size_list(kind) or not hasattr(kind, "value_type"):
        # One tensor for the whole part, of which rows are views; they are copied when they are collated.
        whole = _numbers(array, name, where)
        return lambda row: whole[row]
    values = _numbers(array.flatten(), name, where)
    offsets = np.concatenate([[0], np.cumsum(np.asarray(array.value_lengths(), dtype=np.int64))])
    return lambda row: values[int(offsets[row]) : int(offsets[row + 1])]


def _numbers(array: Any, name: str, where: str) -> torch.Tensor:
    shape = [len(array)]
    while pyarrow().types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
        if array.null_count:
            raise DataError(f"column {name!r} of {where} has lists with missing values. Fill them in the file.")
    if hasattr(array.type, "value_type"):
        raise DataError(
            f"column {name!r} of {where} has lists of lists of different lengths, which no tensor holds. Flatten them."
        )
    numbers = array.to_numpy(zero_copy_only=False)
    if not numbers.flags.writeable:
        numbers = numbers.copy()  # Torch has no read-only tensors, and a loop may write into an example.
    return torch.from_numpy(numbers).reshape(shape)
