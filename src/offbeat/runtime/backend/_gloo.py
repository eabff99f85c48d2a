"""Collectives between ranks that share no memory: by Gloo, in a group of its own, with Gloo's gaps filled.

Gloo mishandles tensors that are not contiguous, knows no short integers, needs equal sizes where torch does not, and
has calls that Python cannot reach. Tensors are contiguous when they get here; the rest is handled here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # pyright: ignore[reportPrivateUsage]

from offbeat.runtime.backend._across_hosts import AcrossHosts
from offbeat.runtime.backend._checks import in_place
from offbeat.runtime.collectives.one_sided.kernels import ways_of

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


class Far:
    """The collectives of `OffbeatGroup` over Gloo; tensors are contiguous, and every call blocks until done."""

    def __init__(
        self, gloo: Any, spread: AcrossHosts | None, rank: int, size: int, timeout: Callable[[], float]
    ) -> None:
        self._gloo, self._spread, self._rank, self._size = gloo, spread, rank, size
        self._timeout = timeout

    def _set(self, options: Any, operation: Any = None, root: int | None = None) -> Any:
        options.timeout = timedelta(seconds=self._timeout())
        if operation is not None:
            options.reduceOp = dist.ReduceOp.SUM if operation == dist.ReduceOp.AVG else operation
        if root is not None:
            options.rootRank = root
        return options

    def _divide(self, tensor: Tensor, operation: Any) -> None:
        """Turn the sum of an AVG into a mean."""
        if operation == dist.ReduceOp.AVG:
            tensor.detach().div_(self._size, rounding_mode=None if tensor.is_floating_point() else "trunc")

    def _widened(self, tensor: Tensor, operation: Any, copy: bool = False) -> Tensor:
        """The tensor in a dtype that Gloo can reduce; impossible reductions are refused before any rank waits."""
        ways_of(operation, tensor.dtype, self._size)
        return tensor.detach().to(_WIDER.get(tensor.dtype, tensor.dtype), copy=copy)

    def all_reduce(self, tensors: Sequence[Tensor], operation: Any) -> None:
        """Reduce in place; these tensors need not be contiguous."""
        with in_place(tensors) as rows:
            for row in rows:
                held = self._widened(row, operation)
                if self._spread is not None:
                    self._spread.all_reduce(held, operation)
                else:
                    self._gloo.allreduce([held], self._set(c10d.AllreduceOptions(), operation)).wait()
                    self._divide(held, operation)
                if held.dtype != row.dtype:
                    row.detach().copy_(held)

    all_reduce_coalesced = all_reduce

    def broadcast(self, tensor: Tensor, root: int) -> None:
        if tensor.numel():
            self._gloo.broadcast([_bytes(tensor)], self._set(c10d.BroadcastOptions(), root=root)).wait()

    def reduce(self, tensor: Tensor, operation: Any, root: int) -> None:
        if not tensor.numel():
            return
        held = self._widened(tensor, operation, copy=True)
        self._gloo.reduce([held], self._set(c10d.ReduceOptions(), operation, root)).wait()
        if self._rank == root:
            self._divide(held, operation)
            tensor.detach().copy_(held)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, whole: Tensor | None = None) -> None:
        del whole
        rows, mine = [_bytes(output) for output in outputs], _bytes(tensor)
        if len({row.numel() for row in rows}) == 1:
            if mine.numel():
                self._gloo.allgather([rows], [mine], self._set(c10d.AllgatherOptions())).wait()
            return
        rows[self._rank].copy_(mine)
        in_flight = [
            self._gloo.broadcast([row], self._set(c10d.BroadcastOptions(), root=rank))
            for rank, row in enumerate(rows)
            if row.numel()
        ]
        for work in in_flight:
            work.wait()

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        if tensor.numel():
            rows = [[_bytes(output) for output in outputs]] if self._rank == root else []
            self._gloo.gather(rows, [_bytes(tensor)], self._set(c10d.GatherOptions(), root=root)).wait()

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        if output.numel():
            rows = [[_bytes(tensor) for tensor in inputs]] if self._rank == root else []
            self._gloo.scatter([_bytes(output)], rows, self._set(c10d.ScatterOptions(), root=root)).wait()

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], operation: Any, whole: Tensor | None = None
    ) -> None:
        del whole
        held = self._widened(output, operation)
        rows = [self._widened(tensor, operation).reshape(-1) for tensor in inputs]
        if sum(row.numel() for row in rows):
            row = held.reshape(-1)
            self._gloo.reduce_scatter([row], [rows], self._set(c10d.ReduceScatterOptions(), operation)).wait()
            self._divide(row, operation)
            held = row.view(output.shape)
        if held.data_ptr() != output.data_ptr():
            output.detach().copy_(held)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wholes: Sequence[Tensor] = (), splits: Any = ()
    ) -> None:
        del wholes, splits
        sent, rows = [_bytes(tensor) for tensor in inputs], [_bytes(tensor) for tensor in outputs]
        sizes = [row.numel() for row in rows]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        options = self._set(c10d.AllToAllOptions())
        self._gloo.alltoall_base(received, torch.cat(sent), sizes, [row.numel() for row in sent], options).wait()
        for row, piece in zip(rows, received.split(sizes), strict=True):
            row.copy_(piece)

    def barrier(self) -> None:
        self._gloo.barrier(self._set(c10d.BarrierOptions())).wait()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
