"""What the bundled tasks share: arguments that are checked, and a division of data that never moves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from offbeat.errors import TaskError
from offbeat.task import Data

_SPLIT_SEED = 1797
"""Of the division alone: neither a run's seed nor a task's moves an example from one part to another."""


def generator(seed: int) -> torch.Generator:
    """A source of randomness of its own, so that making data leaves the run's untouched."""
    return torch.Generator().manual_seed(seed)


Made = TypeVar("Made")


def once(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    """A method without arguments whose result is made once for each object, and kept."""

    @functools.wraps(make)
    def kept(task: Any) -> Made:
        known = vars(task)
        if make not in known.setdefault("_made", {}):
            known["_made"][make] = make(task)
        return known["_made"][make]

    return kept


def divide(*tensors: Tensor, validation: int, test: int) -> Data:
    """Cut tensors of equal length, by example, into disjoint parts; what is in neither of the two is for training."""
    count = len(tensors[0])
    if validation + test >= count:
        raise TaskError(
            f"{count} examples cannot give {validation} to validation and {test} to the test: none is left to learn "
            f"from. Use more examples, or hold fewer out."
        )
    order = torch.randperm(count, generator=generator(_SPLIT_SEED))
    held_out, tested, trained = order.split([validation, test, count - validation - test])
    return Data(
        train=_chosen(tensors, trained),
        validation=_chosen(tensors, held_out),
        test=_chosen(tensors, tested),
    )


def tensors_of(part: object) -> tuple[Tensor, ...]:
    """The whole tensors of a part that `divide` made."""
    if not isinstance(part, TensorDataset):
        raise TypeError(f"a part made by divide() is a TensorDataset, not {type(part).__name__}")
    return part.tensors


def check_at_least(least: float, **arguments: float) -> None:
    """Refuse an argument that is smaller than it may be, by its name."""
    for name, value in arguments.items():
        if not value >= least:
            raise TaskError(f"{name}={value!r} is too small: it must be at least {least}. Give a larger {name}.")


def check_positive(**arguments: float) -> None:
    """Refuse an argument that is not above zero, by its name."""
    for name, value in arguments.items():
        if not 0 < value < float("inf"):
            raise TaskError(f"{name}={value!r} must be a number above zero. Give a positive {name}.")


def _chosen(tensors: tuple[Tensor, ...], rows: Tensor) -> TensorDataset:
    return TensorDataset(*(tensor[rows] for tensor in tensors))
