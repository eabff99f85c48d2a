"""Collectives between ranks that share no memory: by Gloo, in a group of its own, with what Gloo lacks made up for.

Gloo gets tensors wrong that do not lie in a row, knows no short integers, wants equal sizes where torch does not, and
has calls that Python cannot reach. What comes here lies in a row already; the rest is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from offbeat.runtime.backend._across_hosts import AcrossHosts
from offbeat.runtime.backend._checks import in_place
from offbeat.runtime.collectives.one_sided.kernels import ways_of

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


class Far:
    """The same calls as in shared memory; tensors are contiguous. Every call returns when it is done here."""

    def __init__(
        self, gloo: Any, spread: AcrossHosts | None, rank: int, size: int, timeout: Callable[[], float]
    ) -> None:
        self._gloo, self._spread, self._rank, self._size = gloo, spread, rank, size
        self._timeout = timeout

    def _asked(self, options: Any, operation: Any = None, root: int | None = None) -> Any:
        options.timeout = timedelta(seconds=self._timeout())
        if operation is not None:
            options.reduceOp = dist.ReduceOp.SUM if operation == dist.ReduceOp.AVG else operation
        if root is not None:
            options.rootRank = root
        return options

    def _shared_out(self, tensor: Tensor, operation: Any) -> None:
        """A sum becomes a mean, if that was asked for."""
        if operation == dist.ReduceOp.AVG:
            tensor.detach().div_(self._size, rounding_mode=None if tensor.is_floating_point() else "trunc")

    def _widened(self, tensor: Tensor, operation: Any, copy: bool = False) -> Tensor:
        """Numbers that Gloo can combine; what nobody can is refused on all ranks, before any waits for another."""
        ways_of(operation, tensor.dtype, self._size)
        return tensor.detach().to(_WIDER.get(tensor.dtype, tensor.dtype), copy=copy)

    def all_reduce(self, tensors: Sequence[Tensor], operation: Any) -> None:
        """In place; these may lie in any order."""
        with in_place(tensors) as rows:
            for row in rows:
                held = self._widened(row, operation)
                if self._spread is not None:
                    self._spread.all_reduce(held, operation)
                else:
                    self._gloo.allreduce([held], self._asked(AllreduceOptions(), operation)).wait()
                    self._shared_out(held, operation)
                if held.dtype != row.dtype:
                    row.detach().copy_(held)

    all_reduce_coalesced = all_reduce

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """The root's numbers, on every rank, in place."""
        if tensor.numel():
            self._gloo.broadcast([_bytes(tensor)], self._asked(BroadcastOptions(), root=root)).wait()

    def reduce(self, tensor: Tensor, operation: Any, root: int) -> None:
        """Combined at the root, in place; the others keep theirs."""
        if not tensor.numel():
            return
        held = self._widened(tensor, operation, copy=True)
        self._gloo.reduce([held], self._asked(ReduceOptions(), operation, root)).wait()
        if self._rank == root:
            self._shared_out(held, operation)
            tensor.detach().copy_(held)

    def all_gather(self, outputs: Sequence[Tensor], given: Tensor) -> None:
        """Everybody's tensor, on every rank; sizes may differ."""
        rows, mine = [_bytes(output) for output in outputs], _bytes(given)
        if len({row.numel() for row in rows}) == 1:
            if mine.numel():
                self._gloo.allgather([rows], [mine], self._asked(AllgatherOptions())).wait()
            return
        rows[self._rank].copy_(mine)
        under_way = [
            self._gloo.broadcast([row], self._asked(BroadcastOptions(), root=rank))
            for rank, row in enumerate(rows)
            if row.numel()
        ]
        for work in under_way:
            work.wait()

    def gather(self, outputs: Sequence[Tensor], given: Tensor, root: int) -> None:
        """Everybody's tensor, at the root."""
        if given.numel():
            rows = [[_bytes(output) for output in outputs]] if self._rank == root else []
            self._gloo.gather(rows, [_bytes(given)], self._asked(GatherOptions(), root=root)).wait()

    def scatter(self, output: Tensor, given: Sequence[Tensor], root: int) -> None:
        """The root's tensors, one for each rank."""
        if output.numel():
            rows = [[_bytes(tensor) for tensor in given]] if self._rank == root else []
            self._gloo.scatter([_bytes(output)], rows, self._asked(ScatterOptions(), root=root)).wait()

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], operation: Any) -> None:
        """Rank r gets the combination of everybody's tensor r."""
        held = self._widened(output, operation)
        rows = [self._widened(tensor, operation).reshape(-1) for tensor in inputs]
        if sum(row.numel() for row in rows):
            row = held.reshape(-1)
            self._gloo.reduce_scatter([row], [rows], self._asked(ReduceScatterOptions(), operation)).wait()
            self._shared_out(row, operation)
            held = row.view(output.shape)
        if held.data_ptr() != output.data_ptr():
            output.detach().copy_(held)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Tensor t of rank s becomes tensor s of rank t; sizes may differ."""
        brought, rows = [_bytes(tensor) for tensor in inputs], [_bytes(tensor) for tensor in outputs]
        given, into = [row.numel() for row in brought], [row.numel() for row in rows]
        found = torch.empty(sum(into), dtype=torch.uint8)
        options = self._asked(AllToAllOptions())
        self._gloo.alltoall_base(found, torch.cat(brought), into, given, options).wait()
        for row, piece in zip(rows, found.split(into), strict=True):
            row.copy_(piece)

    def barrier(self) -> None:
        """Return when all ranks have come."""
        self._gloo.barrier(self._asked(BarrierOptions())).wait()


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, where they lie."""
    return tensor.detach().reshape(-1).view(torch.uint8)
