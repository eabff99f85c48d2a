"""The workers that share the operators of one replica, and what they exchange."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp

from offbeat.runtime.groups.connection import ExchangeWait
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.tensor_parallel.cuts import Cut

_LARGEST = AllreduceOptions()
_LARGEST.reduceOp = ReduceOp(ReduceOp.MAX)
_LARGEST.asyncOp = False


class TensorWays:
    """The workers that share the operators of one replica.

    Inside a host all of these exchanges go through shared memory. Sums have the same bits on all ways.
    """

    def __init__(self, group: DirectGroup, stopwatch: Stopwatch | None = None) -> None:
        self.group, self.stopwatch = group, stopwatch
        self.rank, self.size = group.rank, group.size

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        # A copied model has the same workers.
        return self

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """`tensor` summed over the ways, in place."""
        before = self._communicating()
        self.group.sum(tensor, what)
        self._done(before)
        return tensor

    def largest(self, tensor: Tensor, what: str) -> Tensor:
        """The largest of each element over the ways, in place."""
        if self.size > 1:
            before, group = self._communicating(), self.group
            group.note("all_reduce", tensor.nbytes, tensor.itemsize)
            with ExchangeWait(group.waits, what):
                group.process_group.allreduce([tensor], _LARGEST).wait()
            self._done(before)
        return tensor

    def whole(self, tensor: Tensor, cut: Cut, what: str) -> Tensor:
        """The whole tensor of which every way has a part."""
        if self.size == 1:
            return tensor
        before = self._communicating()
        row = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        even = cut.size // cut.blocks % self.size == 0
        parts: list[Tensor] = []
        for way, payload in enumerate(self.group.payloads(row, fixed=even, what=what)):
            shape = list(tensor.shape)
            shape[cut.dim] = cut.length(way, self.size)
            parts.append(payload.view(tensor.dtype).view(shape))
        self._done(before)
        return cut.whole(parts)

    def part(self, tensor: Tensor, cut: Cut) -> Tensor:
        """The part of a whole tensor that this way has."""
        return cut.part(tensor, self.rank, self.size)

    def _communicating(self) -> Any:
        return None if self.stopwatch is None else self.stopwatch.switch("communicate")

    def _done(self, before: Any) -> None:
        if self.stopwatch is not None:
            self.stopwatch.switch(before)
