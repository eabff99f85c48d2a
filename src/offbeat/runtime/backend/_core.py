"""What a process group is made of: who is where, whose turn it is, and what to say when something goes wrong."""

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
from offbeat.runtime.allocation import keep_freed_memory
from offbeat.runtime.backend._checks import flat, in_place
from offbeat.runtime.backend._far import Far
from offbeat.runtime.backend._line import Line, Pending, may_be_waited_for_by_tensor
from offbeat.runtime.backend._local import Local
from offbeat.runtime.backend._marks import CollectiveError, in_words, ranks_in_words, shapes
from offbeat.runtime.backend._meeting import Hosts, anew, find_hosts, open_room
from offbeat.runtime.backend._native import GLOO, native
from offbeat.runtime.backend._quick import DONE, profiling, quick
from offbeat.runtime.backend._spread import AcrossHosts
from offbeat.runtime.shared.room import FAILED, ONE_SHOT, SMALL
from offbeat.runtime.shared.segment import Segment

# Torch's annotations do not know what its groups really take.
_ProcessGroup: Any = dist.ProcessGroup
_UNSET = timedelta(milliseconds=-1)
ReduceOp = dist.ReduceOp
_begin_event: Any = torch._C._autograd._record_function_with_args_enter  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
# A forked child must not tear down its parent's groups: Gloo would wait for threads that the child does not have. So
# those that are alive, or not yet collected, when a process forks are kept in the child for ever.
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
        self._label = label
        self._names = tuple(names) or tuple(range(size))
        self._line = Line(label)
        self._asked = self._messages = 0
        self._now: tuple[str, Sequence[Tensor], Any] = ("its first operation", (), None)
        self._spoiled = ""
        with anew(store, rank) as own:
            self._open(own, timeout, host)

    def _open(self, store: dist.Store, timeout: timedelta, host: str | None) -> None:
        rank, size, label = self._rank, self._size, self._label
        meeting = dist.PrefixStore("offbeat/", store)
        self.hosts = find_hosts(meeting, rank, self._names, timeout, label, host) if size > 1 else Hosts((0,), 0)
        """Which ranks share a host."""
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._stock = _as_torch_asks(self._gloo, store, rank, size)
        """Gloo behind torch's dispatcher, which knows what to do with tensors that have no numbers to send."""
        # The room must not keep the group alive: it should go, with its threads and memory, when it is let go.
        me: Any = weakref.ref(self)
        room = None
        if size > 1:
            room = open_room(meeting, self.hosts, self._names, timeout, lambda why, peers: me()._explained(why, peers))
        if room is not None:
            room.timeout = lambda: me()._patience()
        self._room = room
        keep_freed_memory()  # Gradients come and go with every step.
        self.local = Local(room) if room is not None and self.hosts.count == 1 else None
        """The collectives in shared memory; None where ranks live on several hosts or cannot share memory."""
        local: Any = self.local
        self._plans: dict[Any, Any] = {} if local is None else local.plans
        self._quick = quick(self._plans, self._line, None if local is None else local.compiled.start_turn)
        self._begin = self._quick.begin
        several = room is not None and 1 < self.hosts.count < size
        self._spread = AcrossHosts(room, self.hosts, store, timeout) if room is not None and several else None
        self._way: Any = self.local or self._far(dist.PrefixStore("far/", store))
        """Who does collectives: shared memory, or Gloo where ranks share none."""

    def _far(self, store: dist.Store) -> Far:
        gloo = dist.ProcessGroupGloo(store, self._rank, self._size, self._timeout) if self._size > 1 else self._gloo
        me: Any = weakref.ref(self)
        return Far(gloo, self._spread, self._rank, self._size, lambda: me()._patience())

    # -- what went wrong, in words -----------------------------------------------------------------------------------

    @property
    def _timeout(self) -> timedelta:
        """Torch tells the Gloo group beside this one when it is to be another (`_set_pg_timeout`)."""
        return self._gloo.options._timeout

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
            f"{me}{shape} of group {self._label or 'default'!s}: Timed out after {room.waited():.3g} s of waiting for "
            f"{ranks_in_words([room.names[rank] for rank in late])}; {arrived}. {lasts}."
        )

    # -- in line -----------------------------------------------------------------------------------------------------

    def _do(self, what: str, act: Callable[[], None], options: Any, tensors: Sequence[Tensor], result: Any) -> Any:
        """Do it now if its caller waits for it and nothing stands in line; else stand in line."""
        self._asked += 1

        def acted() -> None:
            self._now = (what, tensors, options)
            self._in_step(act)

        if profiling():
            acted = self._recorded(what, acted, tensors)
        elif not options.asyncOp and self._line.idle():
            try:
                acted()
            finally:
                self._line.leave()
            return DONE
        pending = self._line.put(acted, result)
        if may_be_waited_for_by_tensor():
            pending.announce(flat(result))
        return pending

    def _in_step(self, act: Callable[[], None]) -> None:
        """Do it, unless an earlier one broke off in the middle: signals and slots would be taken for another's."""
        if self._spoiled:
            raise CollectiveError(
                f"{self._now[0]} cannot be done, because ranks of this group may be out of step since {self._spoiled}. "
                f"Destroy the group and make a new one."
            )
        room: Any = self._room
        before = 0 if room is None else room.calls
        try:
            act()
        except BaseException as error:
            if room is not None and room.calls != before:
                self._spoil(error)
            raise

    def _spoil(self, error: BaseException) -> None:
        """Let nobody use the shared memory again, here or on other ranks."""
        room: Any = self._room
        if not self._spoiled:
            what = str(error).split(". ")[0] or type(error).__name__
            self._spoiled = f"{self._now[0]} #{room.calls} failed ({what})"
        self._plans.clear()
        room.fail()

    def _recorded(self, what: str, act: Callable[[], None], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """An event for torch's profiler, as Gloo makes them: from the call until it is done, on another thread."""
        record = _begin_event(f"{self.getBackendName()}:{what}", *tensors)
        done: Any = torch.futures.Future()
        # The profiler is the caller's alone: another thread ends an event only through a future, which brings it along.
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, done)

        def recorded() -> None:
            try:
                act()
            finally:
                done.set_result(None)

        return recorded

    def at_once(self, act: Callable[[], None], what: str, tensors: Sequence[Tensor] = ()) -> None:
        """Let `act` use the shared memory when all that stands in line is done; every rank calls this with the same."""
        with self._line.turn():
            self._now = (what, tensors, None)
            self._in_step(act)

    def later(self, act: Callable[[], None], what: str, tensors: Sequence[Tensor]) -> Pending:
        """Do `act` on the group's thread, when all that stands in line is done; every rank asks for the same."""

        def acted() -> None:
            self._now = (what, tensors, None)
            self._in_step(act)

        return self._line.put(acted, tensors)

    def sum_now(
        self, tensor: Tensor, operation: Any = ReduceOp.SUM, stock: bool = False, name: str | None = None
    ) -> None:
        """All-reduce in the middle of something that has the turn: by ourselves, by Gloo, or by a named algorithm."""
        if self._spread is not None and not stock:
            with in_place([tensor]) as (held,):
                self._spread.all_reduce(held, operation)
        elif stock or self.local is None:
            opts = AllreduceOptions()
            opts.reduceOp = operation
            self._gloo.allreduce([tensor], opts).wait()
        elif name is None:
            self._all_reduce([tensor], operation)
        else:
            self.local.all_reduce([tensor], operation, algorithm=name)

    def algorithm(self, collective: Collective, nbytes: int, stock: bool = False) -> str:
        """Which algorithm this group, or Gloo in it, does a collective by, with so many bytes of each rank."""
        if stock:
            return GLOO[collective]
        return native(collective, nbytes, self.local is not None, self._spread is not None)

    @property
    def messages(self) -> Any:
        """Where single messages go."""
        return self._gloo

    def _all_reduce(self, tensors: Sequence[Tensor], operation: Any) -> None:
        local: Any = self.local
        dtype = tensors[0].dtype
        if len(tensors) == 1 and local.sharing and tensors[0].nbytes > SMALL:
            live = local.shared_rows(tensors[0])
            if live is not None:
                local.all_reduce_live(live, dtype, operation)
                return
        with in_place(tensors) as held:
            if len(held) == 1 and held[0].nbytes <= ONE_SHOT:
                local.all_reduce_small(local.known(held[0], int(operation)))
            else:
                local.all_reduce(held, operation)

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

    # -- what torch asks of any group ---------------------------------------------------------------------------------

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

    def _get_sequence_number_for_group(self) -> int:
        """How many operations were asked for."""
        return self._asked + self._quick.asked

    def _set_sequence_number_for_group(self) -> None:
        """Every group begins with 0."""

    def shared_tensor(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that the others of the group can read: all-reducing it copies nothing. All ranks call this.

        It is all zeros. Where memory cannot be shared, it is an ordinary tensor.
        """
        made: list[Tensor] = []
        if self.local is None:
            return torch.zeros(count, dtype=dtype)
        local = self.local
        self.at_once(lambda: made.append(local.shared_tensor(count, dtype)), "shared_tensor")
        return made[0]

    def share_segment(self, size: int, what: str) -> Segment:
        """So many bytes of memory that all ranks have, who share some; all call this together."""
        made: list[Segment] = []
        local: Any = self.local
        self.at_once(lambda: made.append(local.room.share_segment(size)), what)
        return made[0]

    def sum_in_place(self, tensors: Sequence[Tensor], weight: float, own_blocks: bool, what: str) -> None:
        """Sum tensors times a weight where they lie, through shared memory; or only this rank's blocks of them."""
        local: Any = self.local
        if own_blocks:
            self.at_once(partial(local.sum_own_blocks, tensors, weight), what, tensors)
        else:
            self.at_once(partial(local.all_reduce, tensors, ReduceOp.SUM, weight), what, tensors)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations wait that say nothing else."""
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


def _as_torch_asks(gloo: Any, store: dist.Store, rank: int, size: int) -> Any:
    """The same Gloo group in one of torch's own, so that calls of it take the way that they take in any program."""
    group = _ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group
