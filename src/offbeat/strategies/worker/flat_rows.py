"""The parameters of an optimizer as flat rows, for strategies that average models instead of gradients."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.runtime.groups.group import Group

SHARING = "the sharing of parameters"
LINE = 64
"""Bytes of a line of the cache, in which no two tensors lie."""


class Rows:
    """Some tensors side by side, in one row for each kind of number: almost always one."""

    def __init__(self, tensors: Iterable[Tensor], every_kind: bool = False) -> None:
        distinct = {id(t): t for t in tensors if t.numel()}.values()  # Tied weights have several names.
        self.tensors = [t for t in distinct if every_kind or t.is_floating_point() or t.is_complex()]
        kinds = sorted({(t.dtype, t.device) for t in self.tensors}, key=str)
        self._alike = [[t for t in self.tensors if (t.dtype, t.device) == kind] for kind in kinds]
        self.shapes = [[tuple(t.shape) for t in alike] for alike in self._alike]
        """Of the tensors in each row."""

    def read(self, into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """What the tensors hold; `into` are rows to use again."""
        made: list[Tensor] = []
        with torch.no_grad():
            for number, alike in enumerate(self._alike):
                flat = [t.detach().reshape(-1) for t in alike]
                made.append(torch.cat(flat) if into is None else torch.cat(flat, out=into[number]))
        return made

    def write(self, rows: Sequence[Tensor]) -> None:
        """Give the tensors what these rows hold."""
        with torch.no_grad():
            for alike, row in zip(self._alike, rows, strict=True):
                pieces = row.split([t.numel() for t in alike])
                for tensor, piece in zip(alike, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """All that an optimizer updates, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def still_fits(rows: Rows, optimizer: Optimizer, strategy: str) -> None:
    """Refuse parameters that an optimizer was given after its rows were laid out."""
    if len(Rows(parameters_of(optimizer)).tensors) != len(rows.tensors):
        raise StrategyError(
            f"{type(optimizer).__name__} was given more parameters after its first step, which {strategy} cannot "
            f"average any more. Give it all parameters before training begins, frozen if need be, or use allreduce."
        )


def share_parameters(parameters: Sequence[Parameter], group: Group) -> None:
    """Let these lie once in memory that all workers of the host have, with worker 0's numbers in it."""
    if not parameters:
        return
    offsets = np.cumsum([0, *(-(-p.nbytes // LINE) * LINE for p in parameters)]).tolist()
    segment = group.direct.shared_segment(offsets[-1], SHARING)
    for parameter, offset in zip(parameters, offsets, strict=False):
        shared = segment.tensor(offset, parameter.numel(), parameter.dtype).view(parameter.shape)
        if group.rank == 0:
            shared.copy_(parameter.data)
        parameter.data = shared  # Which keeps the segment.
    group.barrier(SHARING)


class Idle:
    """Keeps a worker without examples from stepping: it keeps the others company, and changes nothing."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Parameter, Tensor]] = []

    def hide(self, optimizer: Optimizer) -> None:
        """Before its step: the optimizer finds no gradients."""
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def restore(self) -> None:
        """After it: they are there again."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()


@contextmanager
def averaged_parameters(models: Sequence[nn.Module], group: Group, weight: float = 1.0) -> Generator[list[float]]:
    """Inside, every worker holds the mean of the replicas by their weights; afterwards its own again.

    Gives every worker's distance to that mean. If all weights are 0, all count alike.
    """
    rows = Rows(p for model in models for p in model.parameters())
    if group.size == 1 or not rows.tensors:
        yield [0.0] * group.size
        return
    own = rows.read()
    means = [group.mean(row.clone(), "the mean of models", weight) for row in own]
    apart = sum(float((row - mean).abs().double().square().sum()) for row, mean in zip(own, means, strict=True))
    distances = group.gather([apart**0.5], "the distance of models")[:, 0].tolist()
    rows.write(means)
    try:
        yield distances
    finally:
        rows.write(own)


def state_tensors(optimizer: Optimizer, parameter: Parameter) -> list[tuple[str, Tensor]]:
    """What an optimizer remembers of a parameter number by number: momentum, moments; by name."""
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    held = [(name, value) for name, value in sorted(state.items()) if isinstance(value, Tensor)]
    alike = [(name, value) for name, value in held if value.shape == parameter.shape]
    return [(name, value) for name, value in alike if value.is_floating_point() or value.is_complex()]
