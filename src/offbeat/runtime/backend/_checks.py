"""Checks of the arguments that torch passes to a collective, and contiguous views of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import UsageError
from offbeat.runtime.backend._call_ids import CollectiveError

_DISPATCH = "__torch_dispatch__"
_BY_TORCH: Any = getattr(Tensor, _DISPATCH)


class ExpandedError(UsageError, RuntimeError):
    """An output tensor whose elements overlap in memory; a RuntimeError too, like torch's own."""


def listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a call that takes one tensor or a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def in_lists(many: Any, single: Any) -> tuple[Any, Any]:
    """The arguments of a call that takes a list and a tensor, or each in a further list."""
    return ([many] if many else [], [single]) if isinstance(single, Tensor) else (many, single)


def flat(result: Sequence[Any]) -> list[Tensor]:
    """The tensors of a result: a list, or a list of lists."""
    return [tensor for entry in result for tensor in ([entry] if isinstance(entry, Tensor) else entry)]


def also_called(**names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method accept arguments by the names that they have in other overloads of torch's call."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **more: Any) -> Any:
            return method(self, *args, **{names.get(name, name): value for name, value in more.items()})

        return call

    return decorate


def options(
    kind: type[Any], opts: Any, operation: Any = None, timeout: timedelta | None = None, root: int | None = None
) -> Any:
    """Options of a call; in a call without options, `opts` may be the operation, the timeout or the root."""
    if isinstance(opts, kind):
        return opts
    result = kind()
    for value in (opts, operation, timeout):
        if isinstance(value, timedelta):
            result.timeout = value
        elif isinstance(value, int) and hasattr(result, "rootRank"):
            root = value
        elif value is not None:
            result.reduceOp = value
    if root is not None:
        result.rootRank = root
    return result


def operation_of(opts: Any) -> Any:
    return opts.reduceOp.op


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether these are dense CPU tensors of one dtype; all others are left to Gloo."""
    kind = tensors[0].dtype if tensors else None
    return all(_usual(tensor) and tensor.dtype == kind for tensor in tensors)


def _usual(tensor: Tensor) -> bool:
    # Subclasses with their own dispatch (fake tensors, ones that wait for a collective) may have no memory at all.
    own = getattr(type(tensor), _DISPATCH) is _BY_TORCH
    return own and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def dense(tensor: Tensor) -> Tensor:
    """The tensor, contiguous; lazy negation and conjugation are materialized."""
    return tensor.contiguous().resolve_neg().resolve_conj()


@contextmanager
def in_place(tensors: Sequence[Tensor], written: bool = True) -> Generator[list[Tensor]]:
    """The tensors themselves where they are contiguous, otherwise copies, which are copied back if `written`."""
    held = [dense(tensor) for tensor in tensors]
    back = [(tensor, copy) for tensor, copy in zip(tensors, held, strict=True) if written and copy is not tensor]
    for tensor, _ in back:
        dimensions = zip(tensor.shape, tensor.stride(), strict=True)
        if tensor.numel() and any(length > 1 and not stride for length, stride in dimensions):
            raise ExpandedError(
                f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} cannot take a result: "
                f"several of its elements share one place in memory. Give the collective a clone() of it."
            )
    yield held
    for tensor, copy in back:
        tensor.detach().copy_(copy)


def rows(tensor: Tensor, size: int) -> list[Tensor]:
    """A contiguous tensor in `size` equal parts."""
    return list(tensor.detach().reshape(-1).chunk(size)) if tensor.numel() else [tensor.detach().reshape(-1)] * size


def cuts_well(tensor: Tensor, splits: Sequence[int], size: int) -> bool:
    """Whether there is one split per rank and they add up; without splits, whether the length divides evenly."""
    length = tensor.shape[0] if tensor.dim() else -1
    return (len(splits) == size and sum(splits) == length and min(splits) >= 0) if splits else length % size == 0


def cut(tensor: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """A contiguous tensor, split along its first dimension."""
    sizes = list(splits) or [tensor.shape[0] // size] * size
    return list(tensor.detach().split(sizes))


class Fit:
    """Which calls of one rank of a group are ordinary; all others are left to Gloo."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def usual(self, root: int, tensors: Sequence[Tensor]) -> bool:
        """Whether the root exists and the tensors are alike."""
        return 0 <= root < self._size and alike(tensors)

    def one_for_each(self, lists: Any, singles: Any, uneven: bool = False) -> bool:
        """Whether there is one list with a tensor per rank, and one tensor of the size of this rank's entry."""
        if len(lists) != 1 or len(singles) != 1 or len(lists[0]) != self._size:
            return False
        many, single = lists[0], singles[0]
        compared = [many[self._rank]] if uneven else many
        return alike([single, *many]) and all(tensor.numel() == single.numel() for tensor in compared)

    def at_root(self, root: int, lists: Any, singles: Any) -> bool:
        """The same where only the root has a list."""
        if self._rank == root:
            return self.usual(root, singles) and self.one_for_each(lists, singles)
        return len(singles) == 1 and self.usual(root, singles) and not any(lists)

    def times(self, longer: Any, shorter: Any) -> bool:
        """Whether each long tensor has the size of its short one, times the number of ranks."""
        return len(longer) == len(shorter) and all(
            alike([long, short]) and long.numel() == short.numel() * self._size
            for long, short in zip(longer, shorter, strict=True)
        )

    def check_times(self, longer: Any, shorter: Any) -> None:
        """Refuse others: Gloo has no such call."""
        if not self.times(longer, shorter):
            pairs = zip(longer, shorter, strict=False)
            sizes = ", ".join(f"{list(long.shape)} for {list(short.shape)}" for long, short in pairs)
            raise CollectiveError(
                f"coalesced calls need a long tensor for each short one, {self._size} times its size, of its dtype, on "
                f"the CPU; got {len(longer)} and {len(shorter)}: {sizes}"
            )
