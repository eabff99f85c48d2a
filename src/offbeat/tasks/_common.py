"""Shared by the bundled tasks: checks of arguments, a fixed split of the data, scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from offbeat.errors import TaskError
from offbeat.task import Data, Task, accuracy

_SPLIT_SEED = 1797  # Seed of the split: neither a run's seed nor a task's moves an example from one part to another.


def generator(seed: int) -> torch.Generator:
    """A generator of its own, so that making data does not touch the run's random state."""
    return torch.Generator().manual_seed(seed)


Made = TypeVar("Made")


def once(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    """Cache the result of a method without arguments on each object."""

    @functools.wraps(make)
    def kept(task: Any) -> Made:
        known = vars(task)
        if make not in known.setdefault("_made", {}):
            known["_made"][make] = make(task)
        return known["_made"][make]

    return kept


def divide(*tensors: Tensor, validation: int, test: int) -> Data:
    """Split tensors of equal length, by example, into disjoint parts; the rest is for training."""
    count = len(tensors[0])
    if validation + test >= count:
        raise TaskError(
            f"{count} examples cannot give {validation} to validation and {test} to the test: none is left for "
            f"training. Use more examples, or hold fewer out."
        )
    order = torch.randperm(count, generator=generator(_SPLIT_SEED))
    parts = order.split([validation, test, count - validation - test])
    held_out, tested, trained = (TensorDataset(*(tensor[rows] for tensor in tensors)) for rows in parts)
    return Data(train=trained, validation=held_out, test=tested)


def tensors_of(part: object) -> tuple[Tensor, ...]:
    """The tensors of a part that `divide` returned."""
    if not isinstance(part, TensorDataset):
        raise TypeError(f"a part made by divide() is a TensorDataset, not {type(part).__name__}")
    return part.tensors


def check_at_least(least: float, **arguments: float) -> None:
    """Refuse arguments that are too small, by name."""
    for name, value in arguments.items():
        if not value >= least:
            raise TaskError(f"{name}={value!r} is too small: it must be at least {least}. Give a larger {name}.")


def check_positive(**arguments: float) -> None:
    """Refuse arguments that are not above zero, by name."""
    for name, value in arguments.items():
        if not 0 < value < float("inf"):
            raise TaskError(f"{name}={value!r} must be a number above zero. Give a positive {name}.")


def mean_over(data: Iterable[Any], total: Callable[[Any, Any], Tensor]) -> float:
    """The mean over examples of what `total` sums over a batch (inputs, targets)."""
    value, count = 0.0, 0
    for inputs, targets in data:
        value += float(total(inputs, targets))
        count += len(targets)
    return value / max(count, 1)


@dataclass(eq=False)
class Classifier(Task):
    """A task with cross-entropy, SGD with momentum 0.9, and accuracy as its score."""

    rate: float = 0.03

    def __post_init__(self) -> None:
        check_positive(rate=self.rate)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(output, target)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """SGD with momentum."""
        return SGD(params, lr=self.rate, momentum=0.9)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """The share of examples that are classified correctly."""
        return accuracy(model, data)
