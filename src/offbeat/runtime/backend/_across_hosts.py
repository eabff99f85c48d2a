"""Runs the parts of an all-reduce over several hosts: those inside a host in shared memory, those between by Gloo.

What is done by whom, in which order and on which range is `protocols.collectives.across_hosts`; nothing of it is
decided here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from offbeat.protocols.collectives import Collective
from offbeat.protocols.collectives.across_hosts import parts_across_hosts
from offbeat.protocols.schedule import Layout, View
from offbeat.runtime.backend._host_discovery import RankHosts
from offbeat.runtime.backend._in_host import HostCollectives
from offbeat.runtime.collectives.one_sided.arena import Room

_SIZES = 256
"""Sizes whose parts are remembered."""


class _OwnPart(NamedTuple):
    """A part that this rank has something to do in."""

    number: int
    collective: Collective
    algorithm: str
    start: int
    stop: int
    after: tuple[int, ...]


class AcrossHosts:
    """Ranks on several hosts, of which at least one has several."""

    def __init__(self, room: Room, hosts: RankHosts, store: dist.Store, timeout: timedelta) -> None:
        self._local = HostCollectives(room) if room.size > 1 else None
        self._view, self._rank = View.of(len(hosts.of), hosts.of), hosts.rank
        self._between: Any = None
        if hosts.rank in hosts.leaders:
            number = hosts.leaders.index(hosts.rank)
            self._between = dist.ProcessGroupGloo(dist.PrefixStore("leaders/", store), number, hosts.count, timeout)
        self._parts: dict[tuple[int, int], list[_OwnPart]] = {}

    def _own_parts(self, size: tuple[int, int]) -> list[_OwnPart]:
        """The parts of a row of so many elements of so many bytes, worked out once."""
        if len(self._parts) >= _SIZES:
            self._parts.clear()
        made = self._parts[size] = [
            _OwnPart(number, part.algorithm.collective, part.algorithm.name, part.start, part.stop, part.after)
            for number, part in enumerate(parts_across_hosts(self._view, Layout(*size)))
            if any(self._rank in group and len(group) > 1 for group in part.groups)
        ]
        return made

    def all_reduce(self, row: Tensor, operation: Any) -> None:
        """A contiguous tensor, in place."""
        average = operation == dist.ReduceOp.AVG
        kind = dist.ReduceOp.SUM if average else operation
        flat = row.detach().view(-1)
        under_way: dict[int, Any] = {}
        size = flat.numel(), flat.element_size()
        for part in self._parts.get(size) or self._own_parts(size):
            for earlier in part.after:
                if (work := under_way.pop(earlier, None)) is not None:
                    work.wait()
            self._begin(part, flat[part.start : part.stop], kind, under_way)
        for work in under_way.values():
            work.wait()
        if average:
            flat.div_(self._view.size, rounding_mode=None if row.is_floating_point() else "trunc")

    def _begin(self, part: _OwnPart, piece: Tensor, operation: Any, under_way: dict[int, Any]) -> None:
        """Do a part inside a host, or start one between hosts. The root is the first of the ranks that do it."""
        if part.collective is Collective.ALL_REDUCE:
            if piece.numel():
                options = AllreduceOptions()
                options.reduceOp = operation
                under_way[part.number] = self._between.allreduce([piece], options)
        elif self._local is not None and part.collective is Collective.REDUCE:
            self._local.reduce(piece, operation, 0, part.algorithm)
        elif self._local is not None:
            self._local.broadcast(piece, 0, part.algorithm)
