"""The parts of a process group: which host each rank is on, who runs its collectives, and its management calls."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from offbeat.protocols.collectives import Collective
from offbeat.runtime.backend._across_hosts import AcrossHosts
from offbeat.runtime.backend._calls import Calls
from offbeat.runtime.backend._checks import Fit, in_place
from offbeat.runtime.backend._default_algorithm import GLOO, native
from offbeat.runtime.backend._gloo import Far
from offbeat.runtime.backend._host_discovery import RankHosts, anew, find_hosts, open_arena
from offbeat.runtime.backend._op_queue import QueuedOp
from offbeat.runtime.backend._point_to_point import GlooMessages, HostMessages
from offbeat.runtime.backend.in_host.collectives import HostCollectives
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.system.malloc import keep_freed_memory

# Torch's annotations of its groups are incomplete.
_ProcessGroup: Any = dist.ProcessGroup
ReduceOp = dist.ReduceOp
# A forked child must not tear down its parent's groups: Gloo would wait for threads that the child does not have. So
# groups that are alive, or not yet collected, when a process forks are kept in the child forever.
ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()
_INHERITED: list[Any] = []
os.register_at_fork(after_in_child=lambda: _INHERITED.extend(ALIVE))


class Core(_ProcessGroup):
    """A torch process group without its collectives."""

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
        ALIVE.add(self)
        self._rank, self._size, self._store = rank, size, store
        with anew(store, rank) as own:
            self._open(own, timeout, tuple(names) or tuple(range(size)), label, host)

    def _open(
        self, store: dist.Store, timeout: timedelta, names: tuple[int, ...], label: str, host: str | None
    ) -> None:
        rank, size = self._rank, self._size
        meeting = dist.PrefixStore("offbeat/", store)
        self.hosts = find_hosts(meeting, rank, names, timeout, label, host) if size > 1 else RankHosts((0,), 0)
        """Which host each rank is on."""
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout)
        _carry(self, self._gloo)
        self._stock = _ProcessGroup(store, rank, size)
        """Gloo behind torch's dispatcher, which handles tensors that have no data to send."""
        _carry(self._stock, self._gloo)
        self._calls = Calls(label, self.getBackendName(), self._gloo)
        # The arena must not keep the group alive, or its threads and memory would outlive the last reference to it.
        calls: Any = weakref.ref(self._calls)
        arena = None
        if size > 1:
            arena = open_arena(meeting, self.hosts, names, timeout, lambda why, peers: calls().explained(why, peers))
        if arena is not None:
            arena.timeout = lambda: calls().patience()
        self._arena = arena
        keep_freed_memory()  # Gradients are freed and allocated in every step.
        self.local = HostCollectives(arena) if arena is not None and self.hosts.count == 1 else None
        """The collectives in shared memory; None where ranks are on several hosts or cannot share memory."""
        self._calls.use(arena, self.local)
        self._do, self._begin = self._calls.do, self._calls.begin
        self._fit = Fit(rank, size)
        self._messages = self._open_messages(names, lambda: calls().timeout.total_seconds())
        several = arena is not None and 1 < self.hosts.count < size
        self._spread = AcrossHosts(arena, self.hosts, store, timeout) if arena is not None and several else None
        self._way: Any = self.local
        """Runs collectives: shared memory, or Gloo where ranks share none."""
        if self.local is None:
            own = self._gloo
            if size > 1:
                own = dist.ProcessGroupGloo(dist.PrefixStore("far/", store), rank, size, timeout)
            self._way = Far(own, self._spread, rank, size, lambda: calls().patience())

    def _open_messages(self, names: Sequence[int], timeout: Callable[[], float]) -> GlooMessages | HostMessages:
        arena, gloo = self._arena, GlooMessages(self._gloo, self._stock, self._rank, names, self._arena)
        channels = arena.open_channels() if arena is not None and self.hosts.count == 1 else None
        if arena is None or channels is None:
            return gloo
        return HostMessages(channels, arena, gloo, timeout, self.getBackendName())

    def at_once(self, act: Callable[[], None], what: str, tensors: Sequence[Tensor] = ()) -> None:
        """Let `act` use the shared memory once the queue is empty; every rank calls this with the same."""
        self._calls.at_once(act, what, tensors)

    def later(self, act: Callable[[], None], what: str, tensors: Sequence[Tensor]) -> QueuedOp:
        """Queue `act` for the group's thread; every rank calls this with the same."""
        return self._calls.later(act, what, tensors)

    def sum_now(
        self, tensor: Tensor, operation: Any = ReduceOp.SUM, stock: bool = False, name: str | None = None
    ) -> None:
        """All-reduce inside an operation that holds the turn: natively, by Gloo, or by a named algorithm."""
        if self._spread is not None and not stock:
            with in_place([tensor]) as (held,):
                self._spread.all_reduce(held, operation)
        elif stock or self.local is None:
            opts = AllreduceOptions()
            opts.reduceOp = operation
            self._gloo.allreduce([tensor], opts).wait()
        elif name is None:
            self.local.all_reduce([tensor], operation)
        else:
            self.local.all_reduce_by(name, [tensor], operation)

    def algorithm(self, collective: Collective, nbytes: int, stock: bool = False) -> str:
        """The algorithm of this group, or of Gloo in it, for a collective with `nbytes` of each rank."""
        if stock:
            return GLOO[collective]
        return native(collective, nbytes, self.local is not None, self._spread is not None)

    @property
    def messages(self) -> Any:
        """Sends and receives single messages."""
        return self._messages

    def shared_tensor(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of zeros that the other ranks can read, so that all-reducing it copies nothing. All ranks call this.

        Where memory cannot be shared, it is an ordinary tensor.
        """
        result: list[Tensor] = []
        if self.local is None:
            return torch.zeros(count, dtype=dtype)
        local = self.local
        self.at_once(lambda: result.append(local.shared_tensor(count, dtype)), "shared_tensor")
        return result[0]

    def share_segment(self, size: int, what: str) -> Segment:
        """A segment of `size` bytes that all ranks of the host have mapped; all call this together."""
        result: list[Segment] = []
        local: Any = self.local
        self.at_once(lambda: result.append(local.arena.share_segment(size)), what)
        return result[0]

    def sum_in_place(self, tensors: Sequence[Tensor], weight: float, own_blocks: bool, what: str) -> None:
        """Sum tensors times a weight in place, through shared memory; or only this rank's blocks of them."""
        local: Any = self.local
        if own_blocks:
            self.at_once(partial(local.sum_own_blocks, tensors, weight), what, tensors)
        else:
            self.at_once(partial(local.all_reduce_by, "two_shot", tensors, ReduceOp.SUM, weight), what, tensors)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "offbeat"

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        return self._size

    def get_group_store(self) -> dist.Store:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.asked

    def _set_sequence_number_for_group(self) -> None:
        """Every group begins with 0."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._gloo._set_default_timeout(timeout)

    def abort(self) -> None:
        self._calls.abort()

    def shutdown(self) -> None:
        self._calls.line.close(self._calls.abort)
        if self._arena is not None:
            self._arena.leave()
        self._messages.close()
        self._gloo.shutdown()


def _carry(group: Any, gloo: Any) -> None:
    """Make a Gloo group the backend of a torch group, as in any program."""
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
