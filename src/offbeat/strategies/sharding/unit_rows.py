"""The units of a model's parameters as a worker holds them: its blocks, and the rows that it has gathered for now.

While a unit is in use, the one that followed it last time is gathered; all others are released. A released parameter
has its shape, but reads as NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from offbeat.runtime.gradients.slices import GradientSlices, Unit
from offbeat.runtime.groups.blocks import Blocks
from offbeat.runtime.groups.connection import ExchangeWait
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies.sharding.shards import row_of, show

_WHAT = "the gathering of parameters for their use (every worker must run the model, or save it, equally often)"


class _Use(NamedTuple):
    """A place of a step: the unit in use, and whether in backward."""

    unit: int
    backward: bool


class UnitRows:
    """Blocks and rows of one model's units."""

    def __init__(
        self, gradients: GradientSlices, units: Sequence[Unit], group: DirectGroup, stopwatch: Stopwatch
    ) -> None:
        self.parameters = gradients.parameters
        self._units, self._group, self._stopwatch, self._blocks = units, group, stopwatch, Blocks(group)
        self.slices = [torch.empty(0)] * len(self.parameters)
        """This worker's part of each parameter."""
        self.own: list[Tensor] = []
        """This worker's block of each unit."""
        for unit in units:
            own = self._blocks.own(row_of(self.parameters, unit, group.size)).clone()
            self.own.append(own)
            at = 0
            for i in unit.members:
                low, high = gradients.ranges[i]
                self.slices[i] = own[at : at + high - low]
                at += high - low
        self._released = [_without_memory(p) for p in self.parameters]
        self.rows: dict[int, Tensor] = {}
        """What is gathered, by the number of the unit."""
        self.by_storage: dict[int, int] = {}
        """The units of these rows, by their addresses."""
        self._pending: dict[int, tuple[Tensor, ExchangeWait]] = {}
        self._next_of: dict[_Use, int] = {}
        self._used: _Use | None = None
        self.whole_depth = 0
        """How many wish that everything is gathered."""
        self.most_bytes = 0
        """The most bytes that were gathered at once, while nobody wished for everything."""
        self.order = 0
        """A checksum of the units gathered so far, in their order: the same on all workers."""
        for n in range(len(units)):
            self._release(n)

    def use(self, units: Iterable[int], backward: bool) -> None:
        """These units are needed now: gather them, start to gather the next one, and release all others."""
        if self.whole_depth:
            return
        wanted = list(dict.fromkeys(units))
        last = self._used
        for n in wanted:
            if self._used is not None and self._used.unit != n:
                self._next_of[self._used] = n
            self._used = _Use(n, backward)
        if last == self._used and all(n in self.rows for n in wanted):
            return
        # Tensors made in inference mode could not become parameters again.
        with torch.inference_mode(False), torch.no_grad():
            following = self._next_of.get(self._used) if self._used is not None else None
            for n in [n for n in (*self.rows, *self._pending) if n not in wanted and n != following]:
                if n in self._pending:
                    self._land(n)
                self._release(n)
            for n in wanted:
                self._land(n)
            if following is not None and following not in self.rows:
                self._start(following)

    def _start(self, n: int) -> None:
        if n in self._pending:
            return
        own = self.own[n]
        row = torch.empty(own.numel() * self._group.size, dtype=own.dtype, device=own.device)
        self._blocks.own(row).copy_(own)
        self.order = zlib.crc32(n.to_bytes(4, "little"), self.order)
        self._pending[n] = row, self._blocks.start_gather(row, _WHAT)
        if not self.whole_depth:
            held = [*self.rows.values(), *(waiting for waiting, _ in self._pending.values())]
            self.most_bytes = max(self.most_bytes, sum(row.nbytes for row in held))

    def _land(self, n: int) -> None:
        if n in self.rows:
            return
        self._start(n)
        row, pending = self._pending.pop(n)
        with self._stopwatch.spent_on("communicate"):
            pending.wait()
        self.rows[n] = row
        self.by_storage[row.untyped_storage().data_ptr()] = n
        show(self.parameters, self._units[n], row)

    def _release(self, n: int) -> None:
        row = self.rows.pop(n, None)
        if row is not None:
            del self.by_storage[row.untyped_storage().data_ptr()]
        for i in self._units[n].members:
            self.parameters[i].data = self._released[i]

    def release_all(self) -> None:
        """Release everything: nothing is in use."""
        with torch.inference_mode(False):
            for n in [*self.rows, *self._pending]:
                self._land(n)
                self._release(n)
        self._used = None

    def gather_all(self) -> None:
        """Gather everything, until as many calls of `leave_whole` follow."""
        self.whole_depth += 1
        with torch.inference_mode(False), torch.no_grad():
            for n in range(len(self._units)) if self.whole_depth == 1 else ():
                self._land(n)

    def leave_whole(self) -> None:
        """Release everything that is not needed whole elsewhere; changes are kept."""
        self.whole_depth -= 1
        if not self.whole_depth:
            with torch.no_grad():
                for n, row in self.rows.items():
                    self.own[n].copy_(self._blocks.own(row))
            self.release_all()


def _without_memory(parameter: Parameter) -> Tensor:
    """A tensor of the parameter's shape in which every element is the same NaN."""
    return torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
