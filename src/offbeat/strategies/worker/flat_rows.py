"""Parameters as flat buffers (rows), for strategies that average models instead of gradients."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.exchanges import SMALL_GRADIENT
from offbeat.runtime.collectives.one_sided.native import overlap
from offbeat.runtime.groups.group import Group
from offbeat.runtime.split.absent import is_absent

SHARING = "the sharing of parameters"
LINE = 64
"""Bytes of a cache line, which no two tensors share."""


class Rows:
    """Tensors side by side, in one row for each dtype and device: almost always one. Absent ones are omitted."""

    def __init__(self, tensors: Iterable[Tensor], every_kind: bool = False) -> None:
        # Tied weights have several names.
        distinct = {id(t): t for t in tensors if t.numel() and not is_absent(t)}.values()
        self.tensors = [t for t in distinct if every_kind or t.is_floating_point() or t.is_complex()]
        kinds = sorted({(t.dtype, t.device) for t in self.tensors}, key=str)
        self._by_kind = [[t for t in self.tensors if (t.dtype, t.device) == kind] for kind in kinds]
        self.shapes = [[tuple(t.shape) for t in same_kind] for same_kind in self._by_kind]
        """Of the tensors in each row."""

    def read(self) -> list[Tensor]:
        """A copy of the tensors' values."""
        return [torch.cat([t.detach().reshape(-1) for t in same_kind]) for same_kind in self._by_kind]

    def write(self, rows: Sequence[Tensor]) -> None:
        """Set the tensors to the values of these rows."""
        for same_kind, row in zip(self._by_kind, rows, strict=True):
            _hand_back(same_kind, row)

    @contextmanager
    def copied(self) -> Generator[list[list[Tensor]]]:
        """For each row a copy of its tensors, which is written back."""
        rows = self.read()
        yield [[row] for row in rows]
        self.write(rows)

    @contextmanager
    def in_place(self) -> Generator[list[list[Tensor]]]:
        """For each row the tensors themselves, to be changed in place; small ones as a copy, which is written back."""
        opened: list[list[Tensor]] = []
        copied: list[tuple[list[Tensor], Tensor]] = []
        for same_kind in self._by_kind:
            large = [t.detach() for t in same_kind if t.numel() > SMALL_GRADIENT and not t.is_complex()]
            others = [t for t in same_kind if t.numel() <= SMALL_GRADIENT or t.is_complex()]
            if overlap([(t.data_ptr(), t.nbytes) for t in large]):  # Each place must be changed only once.
                large, others = [], same_kind
            if others:
                flat = torch.cat([t.detach().reshape(-1) for t in others])
                copied.append((others, flat))
                large.append(flat)
            opened.append(large)
        yield opened
        for tensors, flat in copied:
            _hand_back(tensors, flat)


def _hand_back(tensors: Sequence[Tensor], row: Tensor) -> None:
    """Set tensors to the values of a row."""
    with torch.no_grad():
        for tensor, piece in zip(tensors, row.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """All parameters of an optimizer, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def still_fits(rows: Rows, optimizer: Optimizer, strategy: str) -> None:
    """Refuse parameters that were added to an optimizer after its rows were laid out."""
    if len(Rows(parameters_of(optimizer)).tensors) != len(rows.tensors):
        raise StrategyError(
            f"{type(optimizer).__name__} was given more parameters after its first step, which {strategy} cannot "
            f"average any more. Give it all parameters before training begins, frozen if need be, or use allreduce."
        )


def share_parameters(parameters: Sequence[Parameter], group: Group) -> None:
    """Move these into shared memory of all workers of the host, with worker 0's values."""
    if not parameters:
        return
    offsets = np.cumsum([0, *(-(-p.nbytes // LINE) * LINE for p in parameters)]).tolist()
    segment = group.direct.shared_segment(offsets[-1], SHARING)
    for parameter, offset in zip(parameters, offsets, strict=False):
        shared = segment.tensor(offset, parameter.numel(), parameter.dtype).view(parameter.shape)
        if group.rank == 0:
            shared.copy_(parameter.data)
        parameter.data = shared  # This keeps the segment alive.
    group.barrier(SHARING)


class Idle:
    """Keeps a worker without examples from stepping, while it still takes part in exchanges."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Parameter, Tensor]] = []

    def hide(self, optimizer: Optimizer) -> None:
        """Before a step: hide the optimizer's gradients."""
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def restore(self) -> None:
        """After it: restore them."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()


@contextmanager
def averaged_parameters(models: Sequence[nn.Module], group: Group, weight: float = 1.0) -> Generator[list[float]]:
    """Inside, every worker holds the weighted mean of the replicas; afterwards its own parameters are restored.

    Yields every worker's distance to that mean. If all weights are 0, replicas count equally.
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
