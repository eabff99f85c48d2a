"""The process group itself: what torch calls, in front of the collectives in shared memory and of Gloo behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from offbeat.runtime.backend._checks import (
    as_many,
    check_splits,
    cut,
    in_place,
    listed,
    operation_of,
    options,
    plain,
    rows,
    same_kind,
    times,
    within,
)
from offbeat.runtime.backend._line import Finished, Line, Pending
from offbeat.runtime.backend._local import Local
from offbeat.runtime.backend._marks import CollectiveError, in_words, ranks_in_words, shapes
from offbeat.runtime.backend._meeting import Hosts, find_hosts, open_room
from offbeat.runtime.backend._spread import Spread
from offbeat.runtime.shared.kernels import as_words
from offbeat.runtime.shared.room import FAILED, SMALL

# Torch's annotations do not know what its groups really take.
_ProcessGroup: Any = dist.ProcessGroup
_DONE = Finished()
_UNSET = timedelta(milliseconds=-1)
ReduceOp = dist.ReduceOp
_STRIDED = torch.strided
_NOTHING: tuple[Tensor, ...] = ()


class OffbeatGroup(_ProcessGroup):
    """A torch process group for CPU tensors: shared memory inside a host, Gloo between hosts and for point-to-point.

    Operations of one group are done in the order in which they were asked for. One that its caller waits for is done
    at once if nothing stands in line; all others are done by a thread of the group, so that its caller can go on.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = dist.default_pg_timeout,
        names: Sequence[int] = (),
        label: str = "",
        host: str | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self._label, self._timeout = label, timeout
        self._names = tuple(names) or tuple(range(size))
        self._line = Line(label)
        self._now: tuple[str, Sequence[Tensor], Any] = ("its first operation", (), None)
        meeting = dist.PrefixStore("offbeat/", store)
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.hosts = find_hosts(meeting, rank, size, host) if size > 1 else Hosts((0,), 0)
        """Which ranks share a host."""
        room = open_room(meeting, self.hosts, self._names, timeout, self._explained) if size > 1 else None
        if room is not None:
            room.timeout = self._patience
        self._room = room
        self.local = Local(room) if room is not None and self.hosts.count == 1 else None
        """The collectives in shared memory; None where ranks live on several hosts or cannot share memory."""
        several = room is not None and 1 < self.hosts.count < size
        self._spread = Spread(room, self.hosts, store, timeout) if room is not None and several else None

    # -- what went wrong, in words -----------------------------------------------------------------------------------

    def _patience(self) -> float:
        options = self._now[2]
        own = getattr(options, "timeout", _UNSET)
        return (own if own > timedelta(0) else self._timeout).total_seconds()

    def _explained(self, why: str, peers: Sequence[int]) -> Exception:
        room: Any = self._room
        what, tensors, _ = self._now
        number = room.calls
        places = room.whereabouts()
        there = [room.names[rank] for rank, (calls, _) in enumerate(places) if calls >= number]
        absent = [rank for rank, (calls, _) in enumerate(places) if calls < number]
        me = f"rank {room.names[room.rank]} in {what} #{number}"
        shape = f" of shape {shapes(tensors)}" if tensors else ""
        arrived = f"{ranks_in_words(there)} had arrived"
        if why == FAILED and absent:
            why = ""  # Whoever failed gave up waiting for the same ones.
        if why and peers:
            who = ranks_in_words([room.names[peer] for peer in peers])
            return CollectiveError(f"{who} {why}: {me}{shape} cannot be finished. {arrived[0].upper()}{arrived[1:]}.")
        if why:
            return CollectiveError(f"{why}: {me}{shape} cannot be finished")
        late = absent or list(peers)
        lasts = "; ".join(
            f"rank {room.names[rank]} was last seen in {in_words(places[rank][1])} #{places[rank][0]}" for rank in late
        )
        return CollectiveError(
            f"Timed out after {room.waited():.3g} s: {me}{shape} of group {self._label or 'default'!s} waited for "
            f"{ranks_in_words([room.names[rank] for rank in late])}; {arrived}. {lasts}."
        )

    # -- in line -----------------------------------------------------------------------------------------------------

    def _do(self, what: str, act: Callable[[], None], options: Any, tensors: Sequence[Tensor], result: Any) -> Any:
        """Do it now if its caller waits for it and nothing stands in line; else stand in line."""

        def acted() -> None:
            self._now = (what, tensors, options)
            act()

        if not options.asyncOp and self._line.idle():
            try:
                acted()
            finally:
                self._line.leave()
            return _DONE
        return self._line.put(acted, result)

    def at_once(self, act: Callable[[OffbeatGroup], None], what: str, tensors: Sequence[Tensor] = ()) -> None:
        """Let `act` use the shared memory when all that stands in line is done; every rank calls this with the same."""
        with self._line.turn():
            self._now = (what, tensors, None)
            act(self)

    def later(self, act: Callable[[], None], what: str, tensors: Sequence[Tensor]) -> Pending:
        """Do `act` on the group's thread, when all that stands in line is done; every rank asks for the same."""

        def acted() -> None:
            self._now = (what, tensors, None)
            act()

        return self._line.put(acted, tensors)

    def sum_now(
        self, tensor: Tensor, operation: Any = ReduceOp.SUM, stock: bool = False, name: str | None = None
    ) -> None:
        """All-reduce in the middle of something that has the turn: by ourselves, by Gloo, or by a named algorithm."""
        if self._spread is not None and not stock:
            self._spread.all_reduce_all([tensor], operation)
        elif stock or self.local is None:
            opts = AllreduceOptions()
            opts.reduceOp = operation
            self._gloo.allreduce([tensor], opts).wait()
        elif name is None:
            self._all_reduce([tensor], operation)
        else:
            self.local.all_reduce([as_words(tensor)], tensor.dtype, operation, algorithm=name)

    @property
    def messages(self) -> Any:
        """Where single messages go."""
        return self._gloo

    # -- torch's names -----------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """What it is registered as."""
        return "offbeat"

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """Its own number."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """How many ranks there are."""
        return self._size

    def get_group_store(self) -> dist.Store:
        """Where its ranks met."""
        return self._store

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Combine one tensor over all ranks, in place."""
        if type(tensors) is not list or opts is None or not isinstance(opts, AllreduceOptions):
            tensors, opts = listed(tensors), options(AllreduceOptions(), opts, op, timeout)
        local, line = self.local, self._line
        (tensor,) = tensors
        if tensor.layout is not _STRIDED or not tensor.is_cpu:
            return self._gloo.allreduce(tensors, opts)
        operation = operation_of(opts)
        if local is None:
            return self._all_reduce_between(tensors, operation, opts)
        if not opts.asyncOp and tensor.is_contiguous() and tensor.nbytes <= SMALL and line.idle():
            self._now = ("all_reduce", tensors, opts)
            try:
                local.all_reduce_small(local.known(tensor, int(operation)))
            finally:
                line.leave()
            return _DONE
        return self._do("all_reduce", lambda: self._all_reduce(tensors, operation), opts, tensors, tensors)

    def _all_reduce_between(self, tensors: Sequence[Tensor], operation: Any, opts: Any) -> Any:
        spread = self._spread
        if spread is None:
            return self._gloo.allreduce(tensors, opts)
        act = partial(spread.all_reduce_all, tensors, operation)
        return self._do("all_reduce", act, opts, tensors, tensors)

    def _all_reduce(self, tensors: Sequence[Tensor], operation: Any) -> None:
        local: Any = self.local
        dtype = tensors[0].dtype
        if len(tensors) == 1 and local.sharing and tensors[0].nbytes > SMALL:
            live = local.shared_rows(tensors[0])
            if live is not None:
                local.all_reduce_live(live, dtype, operation)
                return
        with in_place(tensors) as held:
            if len(held) == 1 and held[0].nbytes <= SMALL:
                local.all_reduce_small(local.known(held[0], int(operation)))
            else:
                local.all_reduce([as_words(tensor) for tensor in held], dtype, operation)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Combine several tensors of one kind over all ranks, in place."""
        opts = opts or AllreduceCoalescedOptions()
        if self.local is None or not plain(tensors):
            return self._gloo.allreduce_coalesced(list(tensors), opts)
        same_kind(tensors, "all_reduce_coalesced")
        operation = operation_of(opts)
        return self._do("all_reduce", lambda: self._all_reduce_packed(tensors, operation), opts, tensors, tensors)

    def _all_reduce_packed(self, tensors: Sequence[Tensor], operation: Any) -> None:
        """Small tensors travel together in one, which saves a round trip for each."""
        small = [tensor for tensor in tensors if tensor.nbytes <= SMALL]
        large = [tensor for tensor in tensors if tensor.nbytes > SMALL]
        if small:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in small])
            self._all_reduce([flat], operation)
            pieces = flat.split([tensor.numel() for tensor in small])
            for tensor, piece in zip(small, pieces, strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))
        if large:
            self._all_reduce(large, operation)

    def broadcast(self, tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None) -> Any:
        """The root's tensor, on every rank, in place."""
        if not isinstance(opts, BroadcastOptions):
            root = opts if isinstance(opts, int) else root
            tensors, opts = listed(tensors), options(BroadcastOptions(), None, None, timeout)
            opts.rootRank = root or 0
        local, tensor = self.local, tensors[0]
        if local is None or not plain(tensors):
            return self._gloo.broadcast(tensors, opts)
        within(opts.rootRank, self._size, "broadcast")
        source = opts.rootRank

        def act() -> None:
            with in_place([tensor]) as (held,):
                local.broadcast(held, source)

        return self._do("broadcast", act, opts, tensors, tensors)

    def reduce(
        self, tensors: Any, opts: Any = None, root: int | None = None, op: Any = None, timeout: Any = None
    ) -> Any:
        """Combine one tensor over all ranks, at the root, in place."""
        if not isinstance(opts, ReduceOptions):
            root = opts if isinstance(opts, int) else root
            tensors, opts = listed(tensors), options(ReduceOptions(), None, op, timeout)
            opts.rootRank = root or 0
        local, tensor = self.local, tensors[0]
        if local is None or not plain(tensors):
            return self._gloo.reduce(tensors, opts)
        within(opts.rootRank, self._size, "reduce")
        source, operation = opts.rootRank, operation_of(opts)

        def act() -> None:
            with in_place([tensor]) as (held,):
                local.reduce(held, operation, source)

        return self._do("reduce", act, opts, tensors, tensors)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Everybody's tensor, on every rank, in a list; sizes may differ."""
        if isinstance(input_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = opts if isinstance(opts, AllgatherOptions) else options(AllgatherOptions(), opts, None, timeout)
        local, outputs, given = self.local, output_tensors[0], input_tensors[0]
        if local is None or not plain([given, *outputs]):
            return self._gloo.allgather(output_tensors, input_tensors, opts)
        as_many(outputs, self._size, "all_gather")
        same_kind([given, *outputs], "all_gather")

        def act() -> None:
            with in_place(outputs) as held:
                local.all_gather(held, given.contiguous())

        return self._do("all_gather", act, opts, input_tensors, output_tensors)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        """Several all-gathers in one call; the result lists are by rank, then by tensor."""
        opts = opts or AllgatherOptions()
        local = self.local
        if local is None or not plain([*input_list, *(tensor for row in output_lists for tensor in row)]):
            return self._gloo.allgather_coalesced(output_lists, input_list, opts)

        def act() -> None:
            for number, given in enumerate(input_list):
                with in_place([row[number] for row in output_lists]) as held:
                    local.all_gather(held, given.contiguous())

        return self._do("all_gather", act, opts, input_list, input_list)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        """Everybody's tensor, on every rank, one after the other in one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Several of them in one call."""
        opts = opts or AllgatherOptions()
        local = self.local
        if local is None or not plain([*outputs, *inputs]):
            return self._gloo.allgather_into_tensor_coalesced(list(outputs), list(inputs), opts)
        for output, given in zip(outputs, inputs, strict=True):
            same_kind([output, given], "all_gather_into_tensor")
            times(output, given, self._size, "output of all_gather_into_tensor")

        def act() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                with in_place([output]) as (held,):
                    local.all_gather(rows(held, self._size), given.contiguous())

        return self._do("all_gather", act, opts, inputs, outputs)

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None
    ) -> Any:
        """Everybody's tensor, at the root, in a list."""
        if isinstance(input_tensors, Tensor):
            root = opts if isinstance(opts, int) else root
            output_tensors, input_tensors = [output_tensors] if output_tensors else [], [input_tensors]
            opts = options(GatherOptions(), None, None, timeout)
            opts.rootRank = root or 0
        opts = opts or GatherOptions()
        local, given, source = self.local, input_tensors[0], opts.rootRank
        outputs: Sequence[Tensor] = output_tensors[0] if output_tensors else ()
        if local is None or not plain([given, *outputs]):
            return self._gloo.gather(output_tensors, input_tensors, opts)
        within(source, self._size, "gather")
        if self._rank == source:
            as_many(outputs, self._size, "gather")
            same_kind([given, *outputs], "gather")
        elif outputs:
            raise ValueError("gather: only the root gives outputs")

        def act() -> None:
            with in_place(outputs) as held:
                local.gather(held, given.contiguous(), source)

        return self._do("gather", act, opts, input_tensors, outputs)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None
    ) -> Any:
        """The root's tensors, one for each rank."""
        if isinstance(output_tensors, Tensor):
            root = opts if isinstance(opts, int) else root
            output_tensors, input_tensors = [output_tensors], [input_tensors] if input_tensors else []
            opts = options(ScatterOptions(), None, None, timeout)
            opts.rootRank = root or 0
        opts = opts or ScatterOptions()
        local, output, source = self.local, output_tensors[0], opts.rootRank
        given: Sequence[Tensor] = input_tensors[0] if input_tensors else ()
        if local is None or not plain([output, *given]):
            return self._gloo.scatter(output_tensors, input_tensors, opts)
        within(source, self._size, "scatter")
        if self._rank == source:
            as_many(given, self._size, "scatter")
            same_kind([output, *given], "scatter")
        elif given:
            raise ValueError("scatter: only the root gives inputs")

        def act() -> None:
            with in_place([output]) as (held,):
                local.scatter(held, [tensor.contiguous() for tensor in given], source)

        return self._do("scatter", act, opts, output_tensors, output_tensors)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> Any:
        """Rank r gets the combination of everybody's tensor r."""
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if not isinstance(opts, ReduceScatterOptions):
            opts = options(ReduceScatterOptions(), None, opts if opts is not None else op, timeout)
        local, output, inputs = self.local, output_tensors[0], input_tensors[0]
        if local is None or not plain([output, *inputs]):
            return self._gloo.reduce_scatter(output_tensors, input_tensors, opts)
        as_many(inputs, self._size, "reduce_scatter")
        same_kind([output, *inputs], "reduce_scatter")
        operation = operation_of(opts)

        def act() -> None:
            with in_place([output]) as (held,):
                local.reduce_scatter(held, [tensor.contiguous() for tensor in inputs], operation)

        return self._do("reduce_scatter", act, opts, inputs, output_tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        """Rank r gets the r-th part of the combination of everybody's tensor."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Several of them in one call."""
        opts = opts or ReduceScatterOptions()
        local = self.local
        if local is None or not plain([*outputs, *inputs]):
            return self._gloo.reduce_scatter_tensor_coalesced(list(outputs), list(inputs), opts)
        for output, given in zip(outputs, inputs, strict=True):
            same_kind([output, given], "reduce_scatter_tensor")
            times(given, output, self._size, "input of reduce_scatter_tensor")
        operation = operation_of(opts)

        def act() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                with in_place([output]) as (held,):
                    local.reduce_scatter(held, rows(given.contiguous(), self._size), operation)

        return self._do("reduce_scatter", act, opts, inputs, outputs)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Tensor t of rank s becomes tensor s of rank t; sizes may differ."""
        opts = opts or AllToAllOptions()
        local = self.local
        if local is None or not plain([*output_tensors, *input_tensors]):
            return self._gloo.alltoall(output_tensors, input_tensors, opts)
        as_many(output_tensors, self._size, "all_to_all")
        as_many(input_tensors, self._size, "all_to_all")
        same_kind([*output_tensors, *input_tensors], "all_to_all")

        def act() -> None:
            with in_place(output_tensors) as held:
                local.all_to_all(held, [tensor.contiguous() for tensor in input_tensors])

        return self._do("all_to_all", act, opts, input_tensors, output_tensors)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - as torch calls it
        output_splits: Any,
        input_splits: Any,
        opts: Any = None,
    ) -> Any:
        """The same on parts of one tensor, cut along its first dimension."""
        opts = opts or AllToAllOptions()
        local = self.local
        if local is None or not plain([output, input]):
            return self._gloo.alltoall_base(output, input, output_splits, input_splits, opts)
        same_kind([output, input], "all_to_all_single")
        check_splits(output, output_splits, self._size)
        check_splits(input, input_splits, self._size)

        def act() -> None:
            with in_place([output]) as (held,):
                given = cut(input.contiguous(), input_splits, self._size)
                local.all_to_all(cut(held, output_splits, self._size), given)

        return self._do("all_to_all", act, opts, [input], [output])

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Return when all ranks have come."""
        if not isinstance(opts, BarrierOptions):
            opts = options(BarrierOptions(), None, None, opts if timeout is None else timeout)
        if self.local is None:
            return self._gloo.barrier(opts)
        return self._do("barrier", self.local.barrier, opts, _NOTHING, _NOTHING)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- point to point, and what else Gloo does ---------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send one tensor to one rank."""
        return self._gloo.send(listed(tensors), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive one tensor from one rank."""
        return self._gloo.recv(listed(tensors), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive one tensor from whoever sends first."""
        return self._gloo.recv_anysource(listed(tensors), tag)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names at rank 0 who has not come."""
        self._gloo.monitored_barrier(timeout or self._timeout, wait_all_ranks)

    def shared_tensor(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that the others of the group can read: all-reducing it copies nothing. All ranks call this.

        It is all zeros. Where memory cannot be shared, it is an ordinary tensor.
        """
        made: list[Tensor] = []
        if self.local is None:
            return torch.zeros(count, dtype=dtype)
        local = self.local
        self.at_once(lambda _: made.append(local.shared_tensor(count, dtype)), "shared_tensor")
        return made[0]

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations wait that say nothing else."""
        self._timeout = timeout
        self._gloo._set_default_timeout(timeout)

    def abort(self) -> None:
        """Give up whatever is going on here; those who wait for it get an error."""
        if self._room is not None:
            self._room.aborted = True
            self._room.fail()

    def shutdown(self) -> None:
        """Leave the group."""
        self._line.close(self.abort)
        if self._room is not None:
            self._room.leave()
        self._gloo.shutdown()
