"""The workers of a run as one group: what they sum, share and gather together, with a deadline for every wait."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from offbeat.errors import UsageError
from offbeat.protocols.collectives import Collective
from offbeat.protocols.exchanges import Exchanged, sent_by, sum_in_memory
from offbeat.protocols.schedule import View
from offbeat.runtime.backend import GLOO, OffbeatGroup
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.collectives.two_sided import CompiledSchedule, run
from offbeat.runtime.gradients.algorithm_choice import Sums
from offbeat.runtime.groups.connection import Connection, ExchangeWait, Waits
from offbeat.runtime.groups.presence import Presence
from offbeat.runtime.run.rank_environment import Place

if TYPE_CHECKING:
    from offbeat.runtime.groups.coordinated_group import CoordinatedMembership

_CACHED = 4096  # Exchanges whose bytes are cached; sizes that differ each time must not fill the memory.
_WAITED_FOR = AllreduceOptions()
_WAITED_FOR.asyncOp = False


class Pending(Protocol):
    """An exchange in flight."""

    def wait(self) -> None:
        """Return when it is complete; raise a WaitError that names the missing workers when its deadline has passed."""


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


DONE = _Done()  # A complete exchange.


class Totals:
    """Bytes that a worker has sent over all lanes."""

    counted = 0  # In exchanges of the run.
    measured = 0  # In further exchanges, made only to time them.


class SentBytes:
    """Bytes sent over all lanes, and on request the exchanges over one of them."""

    def __init__(self, totals: Totals | None = None) -> None:
        self.totals = totals or Totals()
        self._recorded: list[Exchanged] | None = None

    def lane(self) -> SentBytes:
        """A counter for another lane of the same worker, with the same totals."""
        return SentBytes(self.totals)

    def add(self, nbytes: int, exchanged: Exchanged | None = None) -> None:
        """Count bytes, and record their exchange if requested."""
        self.totals.counted += nbytes
        if self._recorded is not None and exchanged is not None:
            self._recorded.append(exchanged)

    @contextmanager
    def measuring(self) -> Generator[None]:
        """Inside, exchanges count as measurements: not in a step, nor in the bytes of the run."""
        before, recorded = self.totals.counted, self._recorded
        self._recorded = None
        try:
            yield
        finally:
            self._recorded = recorded
            self.totals.measured += self.totals.counted - before
            self.totals.counted = before

    def record(self) -> None:
        """Start recording the exchanges over this lane."""
        self._recorded = []

    def recorded(self) -> tuple[Exchanged, ...]:
        """The exchanges since `record`; stops recording."""
        recorded, self._recorded = self._recorded, None
        return tuple(recorded or ())


class StaticMembership:
    """All workers, from the beginning to the end: a run ends with the first death."""

    outside = False  # Whether this worker is joining a run that the others have begun.
    awaited = False  # Whether a worker waits to join.

    def __init__(self, rank: int, size: int, presence: Presence | None, patience: float) -> None:
        self._presence, self._patience = presence, patience
        self.members = self.present = tuple(range(size))
        """Ranks of the workers that take part, and of those in the last exchange."""
        self.leads = rank == 0  # Whether this worker does what only one does: writes, reports, concludes.

    def leader(self) -> int:
        """The rank of the worker that leads, agreed by all; all workers call this together."""
        return 0

    def leave(self) -> None:
        """Report that this worker has done its last step, and wait until all others have: a team ends together."""
        if self._presence is not None:
            self._presence.leave()
            self._presence.await_others(self._patience)

    def depart(self, failed: bool) -> None:
        """Report that nothing more will come from this worker, so that no other waits for it."""
        if self._presence is not None:
            self._presence.gone(failed)


class Group(ABC):
    """The joint operations of the workers of one run, however they are connected."""

    def __init__(self, place: Place, timeout: timedelta) -> None:
        self.rank, self.size = place.rank, place.size
        self.timeout = timeout
        self.one_host = place.local_size == place.size
        self.sent = SentBytes()  # What this worker has sent, and its exchanges in a step.
        self.presence: Presence | None = None  # Notices waits for a worker that has left; None for one worker alone.

    @property
    @abstractmethod
    def membership(self) -> StaticMembership | CoordinatedMembership:
        """Which workers take part, and which of them leads."""

    @property
    def direct(self) -> DirectGroup:
        """The same workers as a `DirectGroup`, if they are directly connected."""
        raise UsageError(
            "these workers meet through a coordinator, and are not connected with each other: a strategy with servers "
            "cannot have lanes, shared memory or schedules of its own"
        )

    @property
    @abstractmethod
    def calls(self) -> int:
        """Exchanges with all others so far: the same on all workers that are in step."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this worker has sent, over all lanes."""
        return self.sent.totals.counted

    @abstractmethod
    def start_sum(self, tensor: Tensor, what: str) -> Pending:
        """Start to replace `tensor`, on every worker, by its sum over the workers."""

    @abstractmethod
    def sum(self, tensor: Tensor, what: str = "a sum") -> Tensor:
        """`tensor` summed over the workers, in place."""

    def mean(self, tensor: Tensor, what: str, weight: float | None = None) -> Tensor:
        """`tensor` averaged over the workers, in place; by their weights, unless they have none or all are 0."""
        if weight is None:
            return self.sum(tensor, what).div_(self.size)
        total = float(self.gather([weight], what).sum())
        return self.sum(tensor.mul_(weight / total if total else 1 / self.size), what)

    @abstractmethod
    def sum_sparse(self, tensor: Tensor, what: str) -> Tensor:
        """A sparse tensor summed over the workers."""

    @abstractmethod
    def share(self, tensor: Tensor, what: str = "a broadcast", root: int = 0) -> Tensor:
        """`tensor` of worker `root`, on every worker, in place."""

    @abstractmethod
    def gather(self, values: Sequence[float], what: str) -> Tensor:
        """A row of numbers from every worker that takes part, as a float64 matrix with a row for each."""

    def barrier(self, what: str = "a barrier") -> None:
        """Return when every worker has called this."""
        self.sum(torch.zeros(1), what)

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    def sums(self, tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """Named tensors, each summed over the workers; one exchange per dtype."""
        result = {name: value.detach().clone() for name, value in tensors.items()}
        kinds = sorted({value.dtype for value in result.values()}, key=str)
        for kind in kinds:
            names = [name for name in sorted(result) if result[name].dtype == kind]
            flat = torch.cat([result[name].reshape(-1) for name in names])
            self.sum(flat, what)
            for name, piece in zip(names, flat.split([result[name].numel() for name in names]), strict=True):
                result[name] = piece.view(result[name].shape)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Counters that a resumed run continues."""
        return {"bytes_sent": self.bytes_sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters."""
        self.sent.totals.counted = int(state["bytes_sent"])


class DirectGroup(Group):
    """Workers that are connected directly; of size 1 it needs no network, and every exchange is the identity."""

    def __init__(
        self, place: Place, timeout: timedelta, device: torch.device, connection: Connection | None = None
    ) -> None:
        super().__init__(place, timeout)
        self._connection = connection or (Connection(place, timeout, device) if self.size > 1 else None)
        self.sums_by: Sums | None = None  # The chosen algorithm; None: the process group's own.
        self.process_group: Any = None  # The torch process group underneath; None for one worker alone.
        self.view = View.of(self.size)  # The workers in schedules, and the host of each as far as it is known.
        self.waits = Waits(self.rank, self.size, timeout, self._connection)
        if self._connection is not None:
            self.process_group, self.view = self._connection.first, self._connection.view
            self.presence = None if self._connection.is_part else self.waits.presence

        @lru_cache(_CACHED)
        def traffic(what: str, nbytes: int, itemsize: int, by: str | None, root: int) -> tuple[int, Exchanged]:
            by = by or self.algorithm(Collective(what), nbytes)
            exchanged = Exchanged(what=cast("Any", what), by=by, nbytes=nbytes, itemsize=itemsize, root=root)
            return sent_by(*exchanged.part(self.size), self.view, self.rank), exchanged

        self._traffic = traffic  # The bytes that this worker sends in an exchange, and the exchange.
        self._membership = StaticMembership(self.rank, self.size, self.presence, timeout.total_seconds())

    def algorithm(self, collective: Collective, nbytes: int) -> str:
        """The algorithm of the process group for a collective with `nbytes` of each worker."""
        group = self.process_group
        return group.algorithm(collective, nbytes) if isinstance(group, OffbeatGroup) else GLOO[collective]

    @property
    def membership(self) -> StaticMembership:
        """All workers."""
        return self._membership

    @property
    def direct(self) -> DirectGroup:
        """Itself."""
        return self

    @property
    def calls(self) -> int:
        """Exchanges with all others so far over this lane."""
        return self.waits.count

    @property
    def connection(self) -> Connection:
        """The connection between the workers; refused for one worker alone."""
        if self._connection is None:
            raise UsageError("one worker alone has no connections: there is nothing to open or to choose")
        return self._connection

    def lane(self) -> DirectGroup:
        """The same workers over separate connections, whose exchanges need no order with these; a collective call."""
        if self.size == 1:
            return self
        lane = copy.copy(self)
        lane.process_group = self.connection.another()
        lane.waits = self.waits.lane(self.connection.lanes)
        lane.sent = self.sent.lane()
        return lane

    @property
    def shares_memory(self) -> bool:
        """Whether all workers are on one host and can read each other's memory."""
        return isinstance(self.process_group, OffbeatGroup) and self.process_group.local is not None

    def sum_by(self, name: str, stored: Path | None = None) -> Sums:
        """From now on, sum by this algorithm; `auto` measures all of them, or uses a `stored` choice."""
        self.sums_by = Sums(self.connection.own(self.process_group), name, stored)
        return self.sums_by

    def note(self, what: str, nbytes: int, itemsize: int = 1, by: str | None = None, root: int = 0) -> None:
        """Count an exchange by its schedule; without a name, that of the process group's own algorithm."""
        self.sent.add(*self._traffic(what, nbytes, itemsize, by, root))

    def sum_in_place(self, tensors: Sequence[Tensor], weight: float, own_blocks: bool, what: str) -> None:
        """Sum tensors times a weight in place, through shared memory; or only this worker's blocks of them."""
        exchange = sum_in_memory(sum(tensor.nbytes for tensor in tensors), tensors[0].itemsize, own_blocks)
        self.note(exchange.what, exchange.nbytes, exchange.itemsize, exchange.by)
        with ExchangeWait(self.waits, what):
            self.process_group.sum_in_place(tensors, weight, own_blocks, what)

    def shared_segment(self, size: int, what: str) -> Segment:
        """A segment of `size` bytes that all workers of the host have mapped; all call this together."""
        with ExchangeWait(self.waits, what):
            return self.process_group.share_segment(size, what)

    def run(
        self, program: CompiledSchedule, row: Tensor, scratch: Tensor, what: str, mixed: Exchanged | None = None
    ) -> None:
        """Run this worker's program of a schedule over messages, in place; `mixed` describes it as part of a step."""
        self.sent.add(program.sent * row.element_size(), mixed)
        group = self.process_group
        ours = isinstance(group, OffbeatGroup)

        def act() -> None:
            run(program, row, group.messages if ours else group, scratch=scratch)

        with ExchangeWait(self.waits, what):
            group.later(act, what, [row]).wait() if ours else act()

    def start_sum(self, tensor: Tensor, what: str) -> Pending:
        """Start to replace `tensor`, on every worker, by its sum over the workers."""
        if self.size == 1:
            return DONE
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        nbytes, itemsize, sums, wait = real.nbytes, real.itemsize, self.sums_by, ExchangeWait(self.waits, what)
        if sums is None:
            self.sent.add(*self._traffic("all_reduce", nbytes, itemsize, None, 0))
            with wait:
                wait.work = self.process_group.allreduce([real], AllreduceOptions())
            return wait
        with wait:
            wait.work = self.process_group.later(lambda: sums.sum(real), what, [real])
        # The sum itself may choose the algorithm.
        wait.then = lambda: self.note("all_reduce", nbytes, itemsize, sums.algorithm(nbytes))
        return wait

    def sum(self, tensor: Tensor, what: str = "a sum") -> Tensor:
        """`tensor` summed over the workers, in place."""
        if self.size == 1:
            return tensor
        if self.sums_by is not None:
            self.start_sum(tensor, what).wait()
            return tensor
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        self.sent.add(*self._traffic("all_reduce", real.nbytes, real.itemsize, None, 0))
        with ExchangeWait(self.waits, what):
            self.process_group.allreduce([real], _WAITED_FOR).wait()
        return tensor

    def sum_sparse(self, tensor: Tensor, what: str) -> Tensor:
        """A sparse tensor summed over the workers."""
        if self.size == 1:
            return tensor
        total = tensor.coalesce()
        self.note("all_gather", total.values().nbytes + total.indices().nbytes, by=GLOO[Collective.ALL_GATHER])
        with ExchangeWait(self.waits, what):
            self.process_group.allreduce([total]).wait()
        return total

    def share(self, tensor: Tensor, what: str = "a broadcast", root: int = 0) -> Tensor:
        """`tensor` of worker `root`, on every worker, in place."""
        if self.size > 1 and tensor.numel():
            self.note("broadcast", tensor.nbytes, root=root)
            held = tensor if tensor.is_contiguous() else tensor.contiguous()
            options = dist.BroadcastOptions()
            options.rootRank = root
            # As bytes, because backends do not support every dtype.
            raw = held.reshape(-1).view(torch.uint8)
            with ExchangeWait(self.waits, what):
                self.process_group.broadcast([raw], options).wait()
            if held is not tensor:
                tensor.copy_(held)
        return tensor

    def gather(self, values: Sequence[float], what: str) -> Tensor:
        """A row of numbers from every worker, as a float64 matrix with one row per worker."""
        table = torch.zeros(self.size, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor(values, dtype=torch.float64)
        return self.sum(table, what)

    def payloads(self, payload: Tensor, fixed: bool, what: str) -> list[Tensor]:
        """All workers' rows of bytes, by rank; `fixed` if all have the same length."""
        if self.size == 1:
            return [payload]
        lengths = [payload.numel()] * self.size
        if not fixed:
            lengths = [int(length) for length in self.gather([float(payload.numel())], what)[:, 0]]
        longest = max(lengths)
        # Gloo gathers rows of one length only.
        sizes = lengths if self.shares_memory else [longest] * self.size
        padded = torch.nn.functional.pad(payload, (0, sizes[self.rank] - payload.numel()))
        self.note("all_gather", padded.numel())
        outputs = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        if longest:
            with ExchangeWait(self.waits, what):
                self.process_group.allgather([outputs], [padded]).wait()
        return [output[:length] for output, length in zip(outputs, lengths, strict=True)]

    def close(self) -> None:
        """Leave the group, if it was opened here."""
        if self.presence is not None:
            self.presence.close()
        if self._connection is not None:
            self._connection.close()
        self.process_group = None


def part_of(group: DirectGroup, members: Sequence[int], name: str) -> DirectGroup:
    """Some of the workers, by rank, as a group of their own; each of them calls this, under the same name.

    Whether a wait there is hopeless is not known to the others: it ends with a death or at the deadline.
    """
    size, device = len(members), torch.device("cpu")
    if size == 1:
        part = DirectGroup(Place(), group.timeout, device)
    else:
        rank = members.index(group.rank)
        one_host = len({int(group.view.hosts[member]) for member in members}) == 1
        place = Place(rank=rank, size=size, local_rank=rank if one_host else 0, local_size=size if one_host else 1)
        part = DirectGroup(place, group.timeout, device, group.connection.part(members, name))
    part.sent = group.sent.lane()
    return part
