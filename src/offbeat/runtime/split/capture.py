"""From a model and a batch to the calls that the model makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import TaskError
from offbeat.runtime.split.graph import Call, Graph, Ref, ValueFacts, flat, leaves, mapped


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leaves buffers and the state of random numbers afterwards as they were before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def capture(model: nn.Module, inputs: tuple[Any, ...], kept: frozenset[str] = frozenset()) -> Graph:
    """The calls that the model makes on these inputs."""
    if isinstance(model, nn.Sequential):
        return capture_layers(model, inputs, list(_flattened(model, "", kept)))
    raise TaskError(f"{type(model).__name__} cannot be split yet: only nn.Sequential can.")


def _flattened(module: nn.Module, path: str, kept: frozenset[str]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        inner = f"{path}{name}"
        if type(child) is nn.Sequential and inner not in kept:
            yield from _flattened(child, f"{inner}.", kept)
        else:
            yield child


def capture_layers(model: nn.Module, inputs: tuple[Any, ...], layers: Sequence[nn.Module]) -> Graph:
    """The graph of modules that run one after another, each with what the one before it returned."""
    names = {id(module): name for name, module in model.named_modules()}
    numbers: list[ValueFacts] = []

    def number(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        numbers.append(ValueFacts(leaf.nbytes, leaf.requires_grad))
        return Ref(len(numbers) - 1)

    arguments = mapped(inputs, number)
    count, values, calls = len(numbers), inputs, list[Call]()
    with undisturbed(model), torch.enable_grad():
        for layer in layers:
            result = layer(*values)
            values = (result,)
            before = len(numbers)
            returned = mapped(result, number)
            found = iter(range(before, len(numbers)))
            results = tuple(next(found) if isinstance(leaf, Tensor) else None for leaf in flat(result))
            calls.append(Call(names[id(layer)], layer, arguments, {}, results, starts_layer=True))
            arguments = (returned,)
    return Graph(model, tuple(range(count)), calls, dict(enumerate(numbers)), arguments[0])


def tensors(structure: Any) -> list[Tensor]:
    """The tensors in a structure."""
    return [leaf for leaf in leaves(structure) if isinstance(leaf, Tensor)]
