"""What each layer of a model costs, measured on a real batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from offbeat.protocols.pipelines.cut import LayerCost
from offbeat.runtime.split.capture import undisturbed
from offbeat.runtime.split.graph import Graph, Layer, leaves
from offbeat.runtime.split.parts import INPUT, StagePart, assemble, crossing_bytes

WARM_UP = 2
"""Runs of each layer before the ones that count."""
RUNS = 5
"""Runs of each layer at least; the median counts."""


def sizes_only(graph: Graph, layers: Sequence[Layer]) -> list[LayerCost]:
    """The bytes of each layer; no times."""
    parts = assemble(graph, layers, range(len(layers) + 1))
    return [
        LayerCost(layer.name, 0.0, 0.0, crossing, _parameter_bytes(part))
        for layer, part, crossing in zip(layers, parts, crossing_bytes(graph, layers), strict=True)
    ]


def measured_costs(graph: Graph, layers: Sequence[Layer], inputs: tuple[Any, ...]) -> list[LayerCost]:
    """The bytes of each layer, and the medians of its times forward and backward."""
    parts = assemble(graph, layers, range(len(layers) + 1))
    crossing = crossing_bytes(graph, layers)
    values: dict[tuple[int, int], Tensor] = {
        (INPUT, index): tensor
        for index, tensor in enumerate(leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor))
    }
    costs: list[LayerCost] = []
    with undisturbed(graph.model), torch.enable_grad():
        for number, (layer, part) in enumerate(zip(layers, parts, strict=True)):
            taken = [_leaf(values[value.producer, value.index], value.differentiable) for value in part.takes]
            outputs, saved = _saved(part, taken)
            forward, backward = _times(part, taken)
            costs.append(LayerCost(layer.name, forward, backward, crossing[number], _parameter_bytes(part), saved))
            values |= {(number, index): tensor.detach() for index, tensor in enumerate(outputs)}
            # What no later part takes is not kept.
            needed = {(value.producer, value.index) for later in parts[number + 1 :] for value in later.takes}
            values = {key: tensor for key, tensor in values.items() if key in needed}
    return costs


def _leaf(tensor: Tensor, differentiable: bool) -> Tensor:
    return tensor.detach().requires_grad_(differentiable)


def _parameter_bytes(part: StagePart) -> int:
    return sum(parameter.nbytes for parameter in part.parameters())


def _saved(part: StagePart, taken: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], int]:
    """What the part gives, and the bytes that it keeps for backward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = part(*taken)
    return outputs, sum(storages.values())


def _times(part: StagePart, taken: Sequence[Tensor]) -> tuple[float, float]:
    """Seconds of forward and of backward: medians after a few runs that do not count."""
    needing = [*(tensor for tensor in taken if tensor.requires_grad), *part.parameters()]
    needing = [tensor for tensor in needing if tensor.requires_grad]
    forward: list[float] = []
    backward: list[float] = []
    for _ in range(WARM_UP + RUNS):
        began = time.perf_counter()
        outputs = part(*taken)
        forward.append(time.perf_counter() - began)
        results = [output for output in outputs if output.requires_grad]
        gradients = [torch.ones_like(output) for output in results]
        began = time.perf_counter()
        if results and needing:
            torch.autograd.grad(results, needing, gradients, allow_unused=True)
        backward.append(time.perf_counter() - began)
    return median(forward[WARM_UP:]), median(backward[WARM_UP:])


def starts(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """The calls of each layer."""
    return list(pairwise([*(layer.start for layer in layers), layers[-1].stop]))
