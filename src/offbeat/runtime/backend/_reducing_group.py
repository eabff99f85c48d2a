"""The half of the process group that reduces: all-reduce, reduce and reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d  # pyright: ignore[reportPrivateUsage]
from torch._C._distributed_c10d import AllreduceOptions

from offbeat.protocols.schedule import Schedule
from offbeat.runtime.backend._call_ids import KIND_OF
from offbeat.runtime.backend._checks import (
    alike,
    also_called,
    dense,
    in_lists,
    in_place,
    listed,
    operation_of,
    options,
    rows,
)
from offbeat.runtime.backend._core import Core
from offbeat.runtime.backend._fast_path import DONE, REDUCES

_ALL_REDUCE, _REDUCE_SCATTER = KIND_OF["all_reduce"], KIND_OF["reduce_scatter"]


class ReducingGroup(Core):
    """A torch process group with the collectives that reduce."""

    def allreduce(
        self, tensors: Any = None, opts: Any = None, op: Any = None, timeout: Any = None, *, tensor: Any = None
    ) -> Any:
        """Reduce one tensor over all ranks, in place."""
        begun = self._begin(_ALL_REDUCE, REDUCES, opts, tensors, None)
        if begun is DONE:
            return DONE
        tensors, opts = listed(tensors if tensor is None else tensor), options(AllreduceOptions, opts, op, timeout)
        if len(tensors) != 1 or not alike(tensors):
            return self._stock.allreduce(tensors, opts)
        act = partial(self._way.all_reduce, tensors, operation_of(opts))
        return self._do("all_reduce", act, opts, tensors, tensors, begun)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Reduce several tensors of one dtype over all ranks, in place."""
        opts, tensors = opts or c10d.AllreduceCoalescedOptions(), list(tensors)
        if not tensors or not alike(tensors):
            return self._stock.allreduce_coalesced(tensors, opts)
        act = partial(self._way.all_reduce_coalesced, tensors, operation_of(opts))
        return self._do("all_reduce", act, opts, tensors, tensors)

    def mix_in_place(self, tensors: Sequence[Tensor], schedule: Schedule, what: str) -> None:
        """Mix tensors in place, as one row, through shared memory, by a schedule with weights."""
        local: Any = self.local

        def act() -> None:
            with in_place(tensors) as held:
                local.mix(held, schedule)

        self.at_once(act, what, tensors)

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

    @also_called(output="output_tensors", input="input_tensors")
    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> Any:
        """Give rank r the reduction of all ranks' tensor r."""
        begun = self._begin(_REDUCE_SCATTER, REDUCES, opts, output_tensors, input_tensors)
        if begun is DONE:
            return DONE
        input_tensors, output_tensors = in_lists(input_tensors, output_tensors)
        opts = options(c10d.ReduceScatterOptions, opts, op, timeout)
        way = self._way
        if not self._fit.one_for_each(input_tensors, output_tensors, uneven=True):
            return self._stock.reduce_scatter(output_tensors, input_tensors, opts)
        output, inputs, operation = output_tensors[0], input_tensors[0], operation_of(opts)

        def act() -> None:
            with in_place([output]) as (held,):
                way.reduce_scatter(held, [dense(tensor) for tensor in inputs], operation)

        return self._do("reduce_scatter", act, opts, inputs, output_tensors, begun)

    @also_called(outputTensor="output", inputTensor="input")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        """Give rank r the r-th part of the reduction of all ranks' tensor."""
        begun = self._begin(_REDUCE_SCATTER, REDUCES, opts, output, input)
        if begun is DONE:
            return DONE
        opts = opts or c10d.ReduceScatterOptions()
        if not self._fit.times([input], [output]):
            return self._stock._reduce_scatter_base(output, input, opts)
        act = partial(_reduce_rows, self._way, self._size, [output], [input], operation_of(opts))
        return self._do("reduce_scatter_tensor", act, opts, [input], [output], begun)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._fit.check_times(inputs, outputs)
        opts = opts or c10d.ReduceScatterOptions()
        act = partial(_reduce_rows, self._way, self._size, outputs, inputs, operation_of(opts))
        return self._do("reduce_scatter_tensor_coalesced", act, opts, inputs, outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _reduce_rows(way: Any, size: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: Any) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        with in_place([output]) as (held,):
            whole = dense(tensor)
            way.reduce_scatter(held, rows(whole, size), operation, whole)
