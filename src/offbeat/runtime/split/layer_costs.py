"""What each layer of a model costs, measured on a real batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.protocols.pipelines.cut import LayerCost
from offbeat.runtime.split.capture import undisturbed
from offbeat.runtime.split.graph import Graph, ModelLayer, copied, leaves
from offbeat.runtime.split.parts import INPUT, StagePart, assemble, crossing

WARM_UP = 2
"""Runs of each layer before the ones that count."""
RUNS = range(7, 26)
"""Runs of each layer that count: at least and at most; within that, as many as `QUICK` has room for."""
FEWEST = 3
"""Runs of each layer that count where all of them take longer than `LONG`."""
QUICK, LONG = 0.3, 10.0
"""Seconds of measuring after which at least `RUNS`, or at least `FEWEST`, are enough."""


def sizes_only(graph: Graph, layers: Sequence[ModelLayer]) -> list[LayerCost]:
    """The bytes of each layer; no times."""
    parts = assemble(graph, layers, range(len(layers) + 1))
    return [
        LayerCost(layer.name, 0.0, 0.0, sum(crossed), _parameter_bytes(part))
        for layer, part, crossed in zip(layers, parts, crossing(graph, layers), strict=True)
    ]


def measured_costs(
    graph: Graph, layers: Sequence[ModelLayer], inputs: tuple[Any, ...], agreed: Callable[[bool], bool] = bool
) -> list[LayerCost]:
    """The bytes of each layer, and the seconds that it typically takes forward and backward.

    The layers are timed in turn, again and again, so that whatever else the machine does meanwhile hits all of them.
    Workers that share the layers measure together, and must stop together: `agreed` makes one opinion of theirs.
    """
    parts = assemble(graph, layers, range(len(layers) + 1))
    values: dict[tuple[int, int], Tensor] = {
        (INPUT, index): tensor
        for index, tensor in enumerate(leaf for leaf in leaves(copied(inputs)) if isinstance(leaf, Tensor))
    }
    taken: list[list[Tensor]] = []
    saved: list[int] = []
    with undisturbed(graph.model), torch.enable_grad():
        for number, part in enumerate(parts):
            taken.append([_leaf(values[value.producer, value.index], value.differentiable) for value in part.takes])
            outputs, kept = _saved(part, taken[-1])
            saved.append(kept)
            values |= {(number, index): tensor.detach() for index, tensor in enumerate(outputs)}
        times = [_Times() for _ in parts]
        began = time.perf_counter()
        for done in range(WARM_UP + RUNS.stop - 1):
            spent, counted = time.perf_counter() - began, done - WARM_UP
            if agreed((counted >= RUNS.start and spent > QUICK) or (counted >= FEWEST and spent > LONG)):
                break
            for each in zip(parts, taken, times, strict=True):
                _run(*each, counted=counted >= 0)
    return [
        LayerCost(layer.name, _typical(t.forward), _typical(t.backward), sum(crossed), _parameter_bytes(part), kept)
        for layer, part, t, crossed, kept in zip(layers, parts, times, crossing(graph, layers), saved, strict=True)
    ]


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


def _typical(times: Sequence[float]) -> float:
    """The lower quartile: other processes of the machine only ever make a run longer."""
    return sorted(times)[len(times) // 4]


@dataclass
class _Times:
    forward: list[float] = field(default_factory=list[float])
    backward: list[float] = field(default_factory=list[float])


def _run(part: StagePart, taken: Sequence[Tensor], times: _Times, *, counted: bool) -> None:
    """Run a layer forward and backward, leaving the parameters' gradients alone."""
    needing = [tensor for tensor in (*taken, *part.parameters()) if tensor.requires_grad]
    began = time.perf_counter()
    outputs = part(*taken)
    forward = time.perf_counter() - began
    # Of a value that ways share, each has computed its own part.
    own = [getattr(output, "local", output) for output in outputs]
    results = [output for output in own if output.requires_grad]
    gradients = [torch.ones_like(output) for output in results]
    began = time.perf_counter()
    if results and needing:
        torch.autograd.grad(results, needing, gradients, allow_unused=True)
    if counted:
        times.forward.append(forward)
        times.backward.append(time.perf_counter() - began)
