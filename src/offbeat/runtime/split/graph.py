"""What a model computes, as a list of calls in the order in which they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Ref:
    """A value of the graph: an input of the model, or a result of a call."""

    number: int


@dataclass(frozen=True)
class OwnTensor:
    """A parameter or buffer of the model, by the path where the model has it."""

    path: str


@dataclass(frozen=True)
class ValueFacts:
    """What is known about a value from the one time it was computed."""

    nbytes: int
    """Bytes that sending it takes."""
    differentiable: bool = False
    """Whether a gradient flows back through it."""
    integer: bool = False
    """Whether it is a Python integer, such as a size, rather than a tensor."""


@dataclass(frozen=True)
class ModelCall:
    """One call of a function, or of a module as a whole."""

    name: str
    """Path of the module in which it was made; of the module itself if that is what was called."""
    target: Callable[..., Any]
    """What is called."""
    args: tuple[Any, ...]
    """Positional arguments, with `Ref` and `OwnTensor` in place of the model's own values."""
    kwargs: dict[str, Any]
    """Keyword arguments, in the same way."""
    results: tuple[int | None, ...]
    """Numbers of the values in its result, flattened; None where there is something else."""
    direct: bool = True
    """Whether its result is the value itself, rather than a structure with values in it."""
    grad: bool = True
    """False if it ran under `torch.no_grad()`."""
    autocast: tuple[bool, torch.dtype] | None = None
    """Whether `torch.autocast` was on, and for which type, where the model itself has set it."""
    starts_layer: bool = False
    """Whether a cut may come directly before it."""
    place: str = ""
    """File and line of the code that made it."""
    repeatable: bool = False
    """Whether it depends on nothing but sizes and constants, so that every part may compute it again."""
    in_evaluation: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """Its arguments in evaluation mode, where they differ."""

    @property
    def module(self) -> nn.Module | None:
        """The module that is called as a whole, if it is one."""
        return self.target if isinstance(self.target, nn.Module) else None

    def refs(self) -> set[int]:
        """Numbers of the values that it uses."""
        arguments = (self.args, self.kwargs, self.in_evaluation)
        return {leaf.number for leaf in leaves(arguments) if isinstance(leaf, Ref)}

    def held(self) -> set[str]:
        """Paths of the parameters and buffers that it uses directly."""
        return {leaf.path for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, OwnTensor)}


@dataclass(frozen=True)
class ModelLayer:
    """Consecutive calls that are never separated."""

    name: str
    """Path of its first module."""
    start: int
    """Its first call."""
    stop: int
    """The call after its last one."""


@dataclass
class Graph:
    """All that a model computes for a batch."""

    model: nn.Module
    """The model itself, whose modules, parameters and buffers the calls use."""
    inputs: tuple[int, ...]
    """Values that are the model's inputs; the n-th is the n-th tensor of the flattened batch."""
    calls: list[ModelCall]
    """The calls, in order."""
    facts: dict[int, ValueFacts]
    """Facts about every value."""
    output: Any
    """What the model returns, with `Ref` in place of tensors."""
    glued: list[tuple[int, int, str]] = field(default_factory=list[tuple[int, int, str]])
    """Calls (first, last) that must not be separated, and the place of the one that works in place."""
    changing: frozenset[str] = frozenset()
    """Buffers that change while training."""
    evaluation_differs: str | None = None
    """Where the model makes other calls in evaluation than in training, if it does."""

    def tensor(self, path: str) -> Tensor:
        """The parameter or buffer at a path."""
        parent, _, name = path.rpartition(".")
        return getattr(self.model.get_submodule(parent), name)

    def producers(self) -> dict[int, int]:
        """Which call produces each value."""
        return {value: index for index, call in enumerate(self.calls) for value in call.results if value is not None}

    def outputs(self) -> tuple[int, ...]:
        """Values that the model returns, each once."""
        return tuple(dict.fromkeys(leaf.number for leaf in leaves(self.output) if isinstance(leaf, Ref)))

    def layers(self) -> list[ModelLayer]:
        """The finest layers into which the calls can be cut."""
        starts = [0] + [i for i, call in enumerate(self.calls) if i and call.starts_layer]
        first = next((i for i, call in enumerate(self.calls) if call.starts_layer), 0)
        starts = [start for start in starts if start == 0 or start > first]
        starts = [start for start in starts if not any(first < start <= last for first, last, _ in self.glued)]
        return [
            ModelLayer(self._layer_name(start, stop), start, stop)
            for start, stop in pairwise([*starts, len(self.calls)])
        ]

    def _layer_name(self, start: int, stop: int) -> str:
        named = [call.name for call in self.calls[start:stop] if call.starts_layer and call.name]
        return (named or [call.name for call in self.calls[start:stop] if call.name] or ["model"])[0]


def leaves(structure: Any) -> Iterator[Any]:
    """Everything inside nested tuples, lists, dictionaries, slices and registered classes."""
    collected: list[Any] = []

    def collect(leaf: Any) -> Any:
        collected.append(leaf)
        return leaf

    mapped(structure, collect)
    return iter(collected)


def mapped(structure: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with every leaf changed."""
    kind = type(structure)
    if kind is tuple or kind is list:
        return kind(mapped(part, change) for part in structure)
    if kind is dict:
        return {key: mapped(part, change) for key, part in cast("dict[Any, Any]", structure).items()}
    if kind is slice:
        return slice(*(mapped(part, change) for part in (structure.start, structure.stop, structure.step)))
    if kind is torch.Size:
        return tuple(mapped(part, change) for part in structure)
    if isinstance(structure, Tensor) or kind not in pytree.SUPPORTED_NODES:
        return change(structure)
    parts, form = pytree.tree_flatten(structure)
    return pytree.tree_unflatten([mapped(part, change) for part in parts], form)


def flat(result: Any) -> Sequence[Any]:
    """The leaves of a call's result, in a fixed order."""
    return list(leaves(result))


def copied(inputs: Any) -> Any:
    """The same inputs in memory of their own, for a model that changes its inputs."""
    return mapped(inputs, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
