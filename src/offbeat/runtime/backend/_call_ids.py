"""Collective calls as numbers for the board, and in words for error messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import WaitError
from offbeat.runtime.collectives.one_sided.kernels import OPERATIONS

KINDS = (
    *("nothing", "all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter"),
    *("all_to_all", "barrier", "monitored_barrier", "shared_tensor", "mix"),
)
"""Collectives by their number in a mark."""
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64),
)
KIND_OF = {name: number for number, name in enumerate(KINDS)}
_DTYPE_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}
_OPERATION_OF = {operation: number for number, operation in enumerate(OPERATIONS)}
_NO_DTYPE = 63


class CollectiveError(WaitError, dist.DistBackendError):
    """A call on a group could not be finished; names the ranks that are missing, the call, and who has arrived."""

    arrived: Sequence[int] = ()
    """Ranks that are known to have made the call, if it was given up after its timeout."""


class MismatchError(CollectiveError):
    """Ranks made different calls on a group at the same time."""


class ConsequenceError(CollectiveError):
    """A call failed because another rank of the group had failed before."""


def mark(kind: str, dtype: torch.dtype | None = None, count: int = 0, operation: Any = None, root: int = 0) -> int:
    """The number of a call; equal on ranks that make the same call."""
    return (
        KIND_OF[kind]
        | _OPERATION_OF.get(operation, 15) << 4
        | (_NO_DTYPE if dtype is None else _DTYPE_OF.get(dtype, 62)) << 8
        | (root & 0x3FF) << 14
        | (count & 0x7FFFFFFFFF) << 24
    )


def is_all_to_all(number: int) -> bool:
    return KINDS[number & 15] == "all_to_all"


def count_of(number: int) -> int:
    return number >> 24


def in_words(number: int) -> str:
    """The call that a mark stands for."""
    kind, operation, dtype = number & 15, number >> 4 & 15, number >> 8 & 63
    details: list[str] = []
    if operation < len(OPERATIONS):
        details.append(str(OPERATIONS[operation].name))
    if dtype != _NO_DTYPE:
        name = str(_DTYPES[dtype]).removeprefix("torch.") if dtype < len(_DTYPES) else "numbers"
        details.append(f"{name} x {count_of(number):,}")
    if KINDS[kind] in ("broadcast", "reduce", "gather", "scatter"):
        details.append(f"root {number >> 14 & 0x3FF}")
    return KINDS[kind] + (f" ({', '.join(details)})" if details else "")


def shapes(tensors: Sequence[Tensor]) -> str:
    """The shapes of a call's tensors, for an error."""
    first = [str(tuple(tensor.shape)) for tensor in tensors[:4]]
    return ", ".join(first) + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """For example "ranks 1 and 3"."""
    if not ranks:
        return "nobody"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
