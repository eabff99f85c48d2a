"""The process group that torch calls: collectives in shared memory, and Gloo for unusual calls.

Invalid calls go to Gloo, which refuses them as torch programs expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d  # pyright: ignore[reportPrivateUsage]
from torch._C._distributed_c10d import AllreduceOptions

from offbeat.runtime.backend._checks import (
    alike,
    also_called,
    cut,
    cuts_well,
    dense,
    in_lists,
    in_place,
    listed,
    operation_of,
    options,
    rows,
)
from offbeat.runtime.backend._core import Core
from offbeat.runtime.backend._fast_path import DONE

_NOTHING: tuple[Tensor, ...] = ()


class OffbeatGroup(Core):
    """A torch process group for CPU tensors: shared memory inside a host, Gloo between hosts and for point-to-point.

    Operations of one group run in the order of their calls. A synchronous call runs at once if the queue is empty; all
    others run on a thread of the group, so that the caller can go on.
    """

    def allreduce(
        self, tensors: Any = None, opts: Any = None, op: Any = None, timeout: Any = None, *, tensor: Any = None
    ) -> Any:
        """Reduce one tensor over all ranks, in place."""
        begun = self._begin(tensors, opts)
        if begun is DONE:
            return DONE
        if begun is not None:
            return self._calls.finish(begun, tensors, opts)
        tensors, opts = listed(tensors if tensor is None else tensor), options(AllreduceOptions, opts, op, timeout)
        if len(tensors) != 1 or not alike(tensors):
            return self._stock.allreduce(tensors, opts)
        return self._do(
            "all_reduce", partial(self._way.all_reduce, tensors, operation_of(opts)), opts, tensors, tensors
        )

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Reduce several tensors of one dtype over all ranks, in place."""
        opts, tensors = opts or c10d.AllreduceCoalescedOptions(), list(tensors)
        if not tensors or not alike(tensors):
            return self._stock.allreduce_coalesced(tensors, opts)
        act = partial(self._way.all_reduce_coalesced, tensors, operation_of(opts))
        return self._do("all_reduce", act, opts, tensors, tensors)

    @also_called(tensor="tensors")
    def broadcast(self, tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None) -> Any:
        """Copy the root's tensor to every rank, in place."""
        tensors, opts = listed(tensors), options(c10d.BroadcastOptions, opts, None, timeout, root)
        way, source = self._way, opts.rootRank
        if len(tensors) != 1 or opts.rootTensor or not self._fit.usual(source, tensors):
            return self._stock.broadcast(tensors, opts)

        def act() -> None:
            with in_place(tensors, self._rank != source) as (held,):
                way.broadcast(held, source)

        return self._do("broadcast", act, opts, tensors, tensors)

    @also_called(tensor="tensors")
    def reduce(
        self, tensors: Any, opts: Any = None, root: int | None = None, op: Any = None, timeout: Any = None
    ) -> Any:
        """Reduce one tensor over all ranks to the root, in place."""
        tensors, opts = listed(tensors), options(c10d.ReduceOptions, opts, op, timeout, root)
        way, source, operation = self._way, opts.rootRank, operation_of(opts)
        if len(tensors) != 1 or opts.rootTensor or not self._fit.usual(source, tensors):
            return self._stock.reduce(tensors, opts)

        def act() -> None:
            with in_place(tensors, self._rank == source) as (held,):
                way.reduce(held, operation, source)

        return self._do("reduce", act, opts, tensors, tensors)

    @also_called(input_tensor="input_tensors")
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Gather all ranks' tensors in a list on every rank; sizes may differ."""
        output_tensors, input_tensors = in_lists(output_tensors, input_tensors)
        opts = options(c10d.AllgatherOptions, opts, None, timeout)
        way = self._way
        if not self._fit.one_for_each(output_tensors, input_tensors, uneven=True):
            return self._stock.allgather(output_tensors, input_tensors, opts)
        outputs, tensor = output_tensors[0], input_tensors[0]

        def act() -> None:
            with in_place(outputs) as held:
                way.all_gather(held, dense(tensor))

        return self._do("all_gather", act, opts, input_tensors, outputs)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        """Several all-gathers in one call; results are by rank, then by tensor."""
        opts = opts or c10d.AllgatherOptions()
        way = self._way
        columns = list(zip(*output_lists, strict=False)) if len({len(row) for row in output_lists}) == 1 else []
        fits = len(columns) == len(input_list) and all(
            self._fit.one_for_each([column], [tensor]) for column, tensor in zip(columns, input_list, strict=True)
        )
        if not fits or not input_list:
            return self._stock.allgather_coalesced(output_lists, input_list, opts)

        def act() -> None:
            for column, tensor in zip(columns, input_list, strict=True):
                with in_place(column) as held:
                    way.all_gather(held, dense(tensor))

        return self._do("all_gather", act, opts, input_list, output_lists)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        """Gather all ranks' tensors, concatenated, on every rank."""
        opts = opts or c10d.AllgatherOptions()
        if not self._fit.times([output], [input]):
            return self._stock._allgather_base(output, input, opts)
        act = partial(_gather_rows, self._way, self._size, [output], [input])
        return self._do("all_gather_into_tensor", act, opts, [input], [output])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._fit.check_times(outputs, inputs)
        act = partial(_gather_rows, self._way, self._size, outputs, inputs)
        return self._do("all_gather_into_tensor_coalesced", act, opts or c10d.AllgatherOptions(), inputs, outputs)

    @also_called(input_tensor="input_tensors")
    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None
    ) -> Any:
        """Gather all ranks' tensors in a list at the root."""
        output_tensors, input_tensors = in_lists(output_tensors, input_tensors)
        opts = options(c10d.GatherOptions, opts, None, timeout, root)
        way, source = self._way, opts.rootRank
        if not self._fit.at_root(source, output_tensors, input_tensors):
            return self._stock.gather(output_tensors, input_tensors, opts)
        outputs: Sequence[Tensor] = output_tensors[0] if self._rank == source else ()
        tensor = input_tensors[0]

        def act() -> None:
            with in_place(outputs) as held:
                way.gather(held, dense(tensor), source)

        return self._do("gather", act, opts, input_tensors, outputs)

    @also_called(output_tensor="output_tensors")
    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None
    ) -> Any:
        """Send each rank one of the root's tensors."""
        input_tensors, output_tensors = in_lists(input_tensors, output_tensors)
        opts = options(c10d.ScatterOptions, opts, None, timeout, root)
        way, source = self._way, opts.rootRank
        if not self._fit.at_root(source, input_tensors, output_tensors):
            return self._stock.scatter(output_tensors, input_tensors, opts)
        inputs: Sequence[Tensor] = input_tensors[0] if self._rank == source else ()

        def act() -> None:
            with in_place(output_tensors) as (held,):
                way.scatter(held, [dense(tensor) for tensor in inputs], source)

        return self._do("scatter", act, opts, output_tensors, output_tensors)

    @also_called(output="output_tensors", input="input_tensors")
    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> Any:
        """Give rank r the reduction of all ranks' tensor r."""
        input_tensors, output_tensors = in_lists(input_tensors, output_tensors)
        opts = options(c10d.ReduceScatterOptions, opts, op, timeout)
        way = self._way
        if not self._fit.one_for_each(input_tensors, output_tensors, uneven=True):
            return self._stock.reduce_scatter(output_tensors, input_tensors, opts)
        output, inputs, operation = output_tensors[0], input_tensors[0], operation_of(opts)

        def act() -> None:
            with in_place([output]) as (held,):
                way.reduce_scatter(held, [dense(tensor) for tensor in inputs], operation)

        return self._do("reduce_scatter", act, opts, inputs, output_tensors)

    @also_called(outputTensor="output", inputTensor="input")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        """Give rank r the r-th part of the reduction of all ranks' tensor."""
        opts = opts or c10d.ReduceScatterOptions()
        if not self._fit.times([input], [output]):
            return self._stock._reduce_scatter_base(output, input, opts)
        act = partial(_reduce_rows, self._way, self._size, [output], [input], operation_of(opts))
        return self._do("reduce_scatter_tensor", act, opts, [input], [output])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._fit.check_times(inputs, outputs)
        opts = opts or c10d.ReduceScatterOptions()
        act = partial(_reduce_rows, self._way, self._size, outputs, inputs, operation_of(opts))
        return self._do("reduce_scatter_tensor_coalesced", act, opts, inputs, outputs)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Make tensor t of rank s tensor s of rank t; sizes may differ."""
        opts = opts or c10d.AllToAllOptions()
        way, size = self._way, self._size
        if not len(output_tensors) == len(input_tensors) == size or not alike([*output_tensors, *input_tensors]):
            return self._stock.alltoall(output_tensors, input_tensors, opts)

        def act() -> None:
            with in_place(output_tensors) as held:
                way.all_to_all(held, [dense(tensor) for tensor in input_tensors])

        return self._do("all_to_all", act, opts, input_tensors, output_tensors)

    @also_called(output_split_sizes="output_splits", input_split_sizes="input_splits")
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_splits: Any,
        input_splits: Any,
        opts: Any = None,
    ) -> Any:
        """The same with parts of one tensor, split along its first dimension."""
        opts = opts or c10d.AllToAllOptions()
        way, size = self._way, self._size
        fits = cuts_well(output, output_splits, size) and cuts_well(input, input_splits, size)
        if not fits or not alike([output, input]):
            return self._stock.alltoall_base(output, input, output_splits, input_splits, opts)

        def act() -> None:
            with in_place([output]) as (held,):
                pieces = cut(dense(input), input_splits, size)
                way.all_to_all(cut(held, output_splits, size), pieces)

        return self._do("all_to_all", act, opts, [input], [output])

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        return self._do(
            "barrier", self._way.barrier, options(c10d.BarrierOptions, opts, None, timeout), _NOTHING, _NOTHING
        )

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    @also_called(dstRank="dst")
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        tensors = listed(tensors)
        return self._messages.begin("send", tensors, dst, lambda gloo: gloo.send(tensors, dst, tag))

    @also_called(srcRank="src")
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        tensors = listed(tensors)
        return self._messages.begin("recv", tensors, src, lambda gloo: gloo.recv(tensors, src, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        tensors = listed(tensors)
        return self._messages.begin("recv", tensors, None, lambda gloo: gloo.recv_anysource(tensors, tag))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the missing ranks at rank 0."""
        self._gloo.monitored_barrier(self._calls.timeout if timeout is None else timeout, wait_all_ranks)


def _gather_rows(way: Any, size: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        with in_place([output]) as (held,):
            way.all_gather(rows(held, size), dense(tensor))


def _reduce_rows(way: Any, size: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: Any) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        with in_place([output]) as (held,):
            way.reduce_scatter(held, rows(dense(tensor), size), operation)
