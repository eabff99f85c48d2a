"""The slices of parameters that a worker updates, and how all workers get the slices of the others (ZeRO).

Workers that share memory hold the parameters there once for all of them: a slice that its owner has updated is visible
to everyone, and nothing needs to be gathered. Elsewhere each worker has a copy, and slices are gathered after each
step; or, with `shard=parameters`, when they are used (`parameter_shards`).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from offbeat.protocols.exchanges import Exchanged
from offbeat.runtime.gradients.slices import GradientSlices, Range, Unit
from offbeat.runtime.groups.blocks import Blocks
from offbeat.runtime.groups.group import DirectGroup
from offbeat.strategies.worker.flat_rows import share_parameters


class Shards(ABC):
    """One model's parameters, and which slices of them this worker updates."""

    def __init__(self, gradients: GradientSlices, units: Sequence[Unit], group: DirectGroup) -> None:
        self.gradients, self.parameters = gradients, gradients.parameters
        self.slices: list[Tensor] = []
        """This worker's part of each parameter; empty where it has none."""
        self.exchanges: tuple[Exchanged, ...] = ()
        """The exchanges that distributed the last step's slices."""
        self._units, self._group = units, group

    def adopt(self, model: nn.Module) -> None:
        """Install hooks on the model, if any are needed."""
        del model

    def owned(self) -> list[list[Range]]:
        """Every rank's range of each parameter."""
        ranges = {i: list(of) for unit in self._units for i, *of in zip(unit.members, *unit.owned, strict=True)}
        return [ranges[i] for i in range(len(self.parameters))]

    def hand_gradients(self) -> None:
        """Give each slice its gradient."""
        for i, own in enumerate(self.slices):
            own.grad = self.gradients.of(i)

    def publish(self) -> None:
        """The worker's slices are updated: return when every worker has, or can get, every slice."""
        for own in self.slices:
            own.grad = None
        self._group.sent.record()
        self._distribute()
        self.exchanges = self._group.sent.recorded()

    @abstractmethod
    def _distribute(self) -> None:
        """Let every worker have the updated slices."""

    @contextmanager
    def whole(self) -> Generator[None]:
        """Inside, all parameters are whole; changes to them are kept. Collective, unless they always are."""
        yield

    @property
    @abstractmethod
    def parameter_bytes(self) -> int:
        """The most bytes of parameters that this worker has held at once; its share of those in shared memory."""

    def conclude(self) -> None:  # noqa: B027 - most have nothing to do
        """Training is over: let every worker have whole parameters, for good. Collective, unless it always has."""

    def close(self) -> None:
        """Remove hooks, and leave parameters in memory of this worker's own."""
        self.gradients.close()


class SharedShards(Shards):
    """Parameters that all workers of one host hold together in shared memory."""

    def __init__(self, gradients: GradientSlices, units: Sequence[Unit], group: DirectGroup) -> None:
        super().__init__(gradients, units, group)
        share_parameters(self.parameters, group)
        self.slices = _slices(self.parameters, gradients)

    def _distribute(self) -> None:
        self._group.barrier("the end of a step")

    @property
    def parameter_bytes(self) -> int:
        """An equal share for every worker."""
        return sum(p.nbytes for p in self.parameters) // self._group.size

    def close(self) -> None:
        """Give every worker a private copy."""
        super().close()
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()


class CopiedShards(Shards):
    """Parameters of which every worker has a copy, side by side in a row for each unit."""

    def __init__(self, gradients: GradientSlices, units: Sequence[Unit], group: DirectGroup) -> None:
        super().__init__(gradients, units, group)
        self._blocks = Blocks(group)
        self._rows = [row_of(self.parameters, unit, group.size) for unit in units]
        for unit, row in zip(units, self._rows, strict=True):
            show(self.parameters, unit, row)
        self.slices = _slices(self.parameters, gradients)

    def _distribute(self) -> None:
        what = "the gathering of parameters"
        frozen = [not any(self.parameters[i].requires_grad for i in unit.members) for unit in self._units]
        rows = [row for row, still in zip(self._rows, frozen, strict=True) if not still]
        for pending in [self._blocks.start_gather(row, what) for row in rows]:
            pending.wait()

    @property
    def parameter_bytes(self) -> int:
        """All of them."""
        return sum(row.nbytes for row in self._rows)


def row_of(parameters: Sequence[Parameter], unit: Unit, size: int) -> Tensor:
    """A copy of a unit's parameters, side by side and padded."""
    flat = torch.cat([parameters[i].detach().reshape(-1) for i in unit.members])
    return torch.nn.functional.pad(flat, (0, unit.block * size - flat.numel()))


def show(parameters: Sequence[Parameter], unit: Unit, row: Tensor) -> None:
    """Make the parts of a row the values of a unit's parameters."""
    at = 0
    for i in unit.members:
        parameter = parameters[i]
        parameter.data = row[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()


def _slices(parameters: Sequence[Parameter], gradients: GradientSlices) -> list[Tensor]:
    return [p.data.view(-1)[low:high] for p, (low, high) in zip(parameters, gradients.ranges, strict=True)]
