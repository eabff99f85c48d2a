"""What must hold of the tensors that torch hands to a collective, and how they are held for it."""

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

_SEES_TO_ITSELF = "__torch_dispatch__"
_BY_TORCH: Any = getattr(Tensor, _SEES_TO_ITSELF)


class ExpandedError(UsageError, RuntimeError):
    """A tensor whose elements share places in memory was to take a result; a RuntimeError too, as torch's own."""


def listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Torch's calls take one tensor or a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def in_lists(many: Any, single: Any) -> tuple[Any, Any]:
    """Others take a list and a tensor, or each in a further list."""
    return ([many] if many else [], [single]) if isinstance(single, Tensor) else (many, single)


def flat(result: Sequence[Any]) -> list[Tensor]:
    """The tensors of a result, which are in a list or in lists of a list."""
    return [tensor for entry in result for tensor in ([entry] if isinstance(entry, Tensor) else entry)]


def also_called(**names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method know arguments by the names that they have in other forms of torch's call, too."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **more: Any) -> Any:
            return method(self, *args, **{names.get(name, name): value for name, value in more.items()})

        return call

    return decorate


def options(
    kind: type[Any], given: Any, operation: Any = None, timeout: timedelta | None = None, root: int | None = None
) -> Any:
    """Options of a call; where it was made without, `given` may be the operation, the time or the root."""
    if isinstance(given, kind):
        return given
    made = kind()
    for value in (given, operation, timeout):
        if isinstance(value, timedelta):
            made.timeout = value
        elif isinstance(value, int) and hasattr(made, "rootRank"):
            root = value
        elif value is not None:
            made.reduceOp = value
    if root is not None:
        made.rootRank = root
    return made


def operation_of(given: Any) -> Any:
    """The reduction that options ask for."""
    return given.reduceOp.op


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether these lie densely in main memory and are of one kind of number; others are Gloo's business."""
    kind = tensors[0].dtype if tensors else None
    return all(_usual(tensor) and tensor.dtype == kind for tensor in tensors)


def _usual(tensor: Tensor) -> bool:
    """Whether its numbers lie where its address says, and mean by themselves what they mean."""
    # Tensors that see to operations themselves (fake ones, ones that wait for a collective) may have no memory at all.
    own = getattr(type(tensor), _SEES_TO_ITSELF) is _BY_TORCH
    return own and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def dense(tensor: Tensor) -> Tensor:
    """The same numbers in a row, as they are: a view that only counts as negated or conjugated is written out."""
    return tensor.contiguous().resolve_neg().resolve_conj()


@contextmanager
def in_place(tensors: Sequence[Tensor], written: bool = True) -> Generator[list[Tensor]]:
    """The same tensors where their numbers lie in a row; of others a copy, which is put back if it was `written`."""
    held = [dense(tensor) for tensor in tensors]
    back = [(tensor, copy) for tensor, copy in zip(tensors, held, strict=True) if written and copy is not tensor]
    for tensor, _ in back:
        _refuse_expanded(tensor)
    yield held
    for tensor, copy in back:
        tensor.detach().copy_(copy)


def _refuse_expanded(tensor: Tensor) -> None:
    places = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(length > 1 and not stride for length, stride in places):
        raise ExpandedError(
            f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} cannot take a result: "
            f"several of its elements lie at one place in memory. Give the collective a clone() of it."
        )


def rows(tensor: Tensor, size: int) -> list[Tensor]:
    """A contiguous tensor in `size` equal parts."""
    return list(tensor.detach().reshape(-1).chunk(size)) if tensor.numel() else [tensor.detach().reshape(-1)] * size


def cuts_well(tensor: Tensor, splits: Sequence[int], size: int) -> bool:
    """Whether splits are one for each rank and add up; without any, the first dimension must be cut evenly."""
    length = tensor.shape[0] if tensor.dim() else -1
    return (len(splits) == size and sum(splits) == length and min(splits) >= 0) if splits else length % size == 0


def cut(tensor: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """A contiguous tensor, cut along its first dimension."""
    sizes = list(splits) or [tensor.shape[0] // size] * size
    return list(tensor.detach().split(sizes))


class Fit:
    """What is usual in calls of one rank of a group; everything else is Gloo's business."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def usual(self, root: int, tensors: Sequence[Tensor]) -> bool:
        """Whether there is such a root, and these are alike."""
        return 0 <= root < self._size and alike(tensors)

    def one_for_each(self, lists: Any, singles: Any, uneven: bool = False) -> bool:
        """Whether there is one list of a tensor for each rank, and one tensor that fits in this rank's place."""
        if len(lists) != 1 or len(singles) != 1 or len(lists[0]) != self._size:
            return False
        many, one = lists[0], singles[0]
        fitting = [many[self._rank]] if uneven else many
        return alike([one, *many]) and all(tensor.numel() == one.numel() for tensor in fitting)

    def at_root(self, root: int, lists: Any, singles: Any) -> bool:
        """The same for the root; all others have no list."""
        if self._rank == root:
            return self.usual(root, singles) and self.one_for_each(lists, singles)
        return len(singles) == 1 and self.usual(root, singles) and not any(lists)

    def times(self, longer: Any, shorter: Any) -> bool:
        """Whether each of these is as long as one of those for every rank."""
        return len(longer) == len(shorter) and all(
            alike([long, short]) and long.numel() == short.numel() * self._size
            for long, short in zip(longer, shorter, strict=True)
        )

    def check_times(self, longer: Any, shorter: Any) -> None:
        """Refuse others: Gloo has no such call."""
        if self.times(longer, shorter):
            return
        sizes = ", ".join(
            f"{list(one.shape)} for {list(other.shape)}" for one, other in zip(longer, shorter, strict=False)
        )
        raise CollectiveError(
            f"coalesced calls need a long tensor for each short one, {self._size} times its size, of its kind, on the "
            f"CPU; given were {len(longer)} and {len(shorter)}: {sizes}"
        )
