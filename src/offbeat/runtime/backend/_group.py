"""The process group that torch calls: collectives in shared memory, and Gloo for unusual calls.

Invalid calls go to Gloo, which refuses them as torch programs expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d  # pyright: ignore[reportPrivateUsage]

from offbeat.runtime.backend._call_ids import KIND_OF
from offbeat.runtime.backend._checks import (
    alike,
    also_called,
    cut,
    cuts_well,
    dense,
    in_lists,
    in_place,
    listed,
    options,
    rows,
)
from offbeat.runtime.backend._fast_path import DONE, ROOTED
from offbeat.runtime.backend._point_to_point import check_peer
from offbeat.runtime.backend._reducing_group import ReducingGroup

_NOTHING: tuple[Tensor, ...] = ()
_BROADCAST, _ALL_GATHER, _GATHER, _SCATTER, _ALL_TO_ALL, _BARRIER = (
    KIND_OF[what] for what in ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier")
)


class OffbeatGroup(ReducingGroup):
    """A torch process group for CPU tensors: shared memory inside a host, Gloo between hosts and for point-to-point.

    Operations of one group run in the order of their calls. A synchronous call runs at once if the queue is empty; all
    others run on a thread of the group, so that the caller can go on.
    """

    @also_called(tensor="tensors")
    def broadcast(self, tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None) -> Any:
        """Copy the root's tensor to every rank, in place."""
        begun = self._begin(_BROADCAST, ROOTED, opts, tensors, None)
        if begun is DONE:
            return DONE
        tensors, opts = listed(tensors), options(c10d.BroadcastOptions, opts, None, timeout, root)
        way, source = self._way, opts.rootRank
        if len(tensors) != 1 or opts.rootTensor or not self._fit.usual(source, tensors):
            return self._stock.broadcast(tensors, opts)

        def act() -> None:
            with in_place(tensors, self._rank != source) as (held,):
                way.broadcast(held, source)

        return self._do("broadcast", act, opts, tensors, tensors, begun)

    @also_called(input_tensor="input_tensors")
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Gather all ranks' tensors in a list on every rank; sizes may differ."""
        begun = self._begin(_ALL_GATHER, 0, opts, output_tensors, input_tensors)
        if begun is DONE:
            return DONE
        output_tensors, input_tensors = in_lists(output_tensors, input_tensors)
        opts = options(c10d.AllgatherOptions, opts, None, timeout)
        way = self._way
        if not self._fit.one_for_each(output_tensors, input_tensors, uneven=True):
            return self._stock.allgather(output_tensors, input_tensors, opts)
        outputs, tensor = output_tensors[0], input_tensors[0]

        def act() -> None:
            with in_place(outputs) as held:
                way.all_gather(held, dense(tensor))

        return self._do("all_gather", act, opts, input_tensors, outputs, begun)

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
        begun = self._begin(_ALL_GATHER, 0, opts, output, input)
        if begun is DONE:
            return DONE
        opts = opts or c10d.AllgatherOptions()
        if not self._fit.times([output], [input]):
            return self._stock._allgather_base(output, input, opts)
        act = partial(_gather_rows, self._way, self._size, [output], [input])
        return self._do("all_gather_into_tensor", act, opts, [input], [output], begun)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._fit.check_times(outputs, inputs)
        act = partial(_gather_rows, self._way, self._size, outputs, inputs)
        return self._do("all_gather_into_tensor_coalesced", act, opts or c10d.AllgatherOptions(), inputs, outputs)

    @also_called(input_tensor="input_tensors")
    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None
    ) -> Any:
        """Gather all ranks' tensors in a list at the root."""
        begun = self._begin(_GATHER, ROOTED, opts, output_tensors, input_tensors)
        if begun is DONE:
            return DONE
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

        return self._do("gather", act, opts, input_tensors, outputs, begun)

    @also_called(output_tensor="output_tensors")
    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None
    ) -> Any:
        """Send each rank one of the root's tensors."""
        begun = self._begin(_SCATTER, ROOTED, opts, output_tensors, input_tensors)
        if begun is DONE:
            return DONE
        input_tensors, output_tensors = in_lists(input_tensors, output_tensors)
        opts = options(c10d.ScatterOptions, opts, None, timeout, root)
        way, source = self._way, opts.rootRank
        if not self._fit.at_root(source, input_tensors, output_tensors):
            return self._stock.scatter(output_tensors, input_tensors, opts)
        inputs: Sequence[Tensor] = input_tensors[0] if self._rank == source else ()

        def act() -> None:
            with in_place(output_tensors) as (held,):
                way.scatter(held, [dense(tensor) for tensor in inputs], source)

        return self._do("scatter", act, opts, output_tensors, output_tensors, begun)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Make tensor t of rank s tensor s of rank t; sizes may differ."""
        begun = self._begin(_ALL_TO_ALL, 0, opts, output_tensors, input_tensors)
        if begun is DONE:
            return DONE
        opts = opts or c10d.AllToAllOptions()
        way, size = self._way, self._size
        if not len(output_tensors) == len(input_tensors) == size or not alike([*output_tensors, *input_tensors]):
            return self._stock.alltoall(output_tensors, input_tensors, opts)

        def act() -> None:
            with in_place(output_tensors) as held:
                way.all_to_all(held, [dense(tensor) for tensor in input_tensors])

        def unequal() -> None:
            way.large_all_to_all(output_tensors, input_tensors)

        return self._do("all_to_all", act, opts, input_tensors, output_tensors, begun, unequal)

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
        begun = None if output_splits or input_splits else self._begin(_ALL_TO_ALL, 0, opts, output, input)
        if begun is DONE:
            return DONE
        opts = opts or c10d.AllToAllOptions()
        way, size = self._way, self._size
        fits = cuts_well(output, output_splits, size) and cuts_well(input, input_splits, size)
        if not fits or not alike([output, input]):
            return self._stock.alltoall_base(output, input, output_splits, input_splits, opts)

        def act() -> None:
            with in_place([output]) as (held,):
                whole = dense(input)
                splits = (*output_splits, "to", *input_splits) if output_splits or input_splits else ()
                outputs, inputs = cut(held, output_splits, size), cut(whole, input_splits, size)
                way.all_to_all(outputs, inputs, (held, whole), splits)

        def unequal() -> None:
            way.large_all_to_all(cut(output, (), size), cut(input, (), size))

        return self._do("all_to_all", act, opts, [input], [output], begun, unequal)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        begun = self._begin(_BARRIER, 0, opts, None, None)
        if begun is DONE:
            return DONE
        opts = options(c10d.BarrierOptions, opts, None, timeout)
        return self._do("barrier", self._way.barrier, opts, _NOTHING, _NOTHING, begun)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    def send(self, tensors: Any, dst: int = -1, tag: int = 0, *, dstRank: int | None = None) -> Any:  # noqa: N803 - torch's name
        return self._messages.send(tensors, dst if dstRank is None else dstRank, tag)

    def recv(self, tensors: Any, src: int = -2, tag: int = 0, *, srcRank: int | None = None) -> Any:  # noqa: N803 - torch's name
        source = src if srcRank is None else srcRank
        check_peer(source, self._size)
        return self._messages.recv(tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._messages.recv(tensors, -1, tag)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the missing ranks at rank 0."""
        self._gloo.monitored_barrier(self._calls.timeout if timeout is None else timeout, wait_all_ranks)


def _gather_rows(way: Any, size: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        with in_place([output]) as (held,):
            way.all_gather(rows(held, size), dense(tensor), held)
