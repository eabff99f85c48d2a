"""Runs an all-reduce over several hosts: its parts inside a host in shared memory, those between hosts by Gloo.

`protocols.collectives.across_hosts` decides which rank does what, in which order and on which range.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from offbeat.protocols.collectives import Collective
from offbeat.protocols.collectives.across_hosts import parts_across_hosts
from offbeat.protocols.schedule import Layout, View
from offbeat.runtime.backend._host_discovery import RankHosts
from offbeat.runtime.backend.in_host.collectives import HostCollectives
from offbeat.runtime.collectives.one_sided.arena import Arena

_SIZES = 256
"""Sizes whose parts are cached."""
_OwnPart = tuple[int, Collective, str, int, int, tuple[int, ...]]
"""A part that this rank takes part in: its number, collective, algorithm, start, stop, and the parts before it."""


class AcrossHosts:
    """All-reduces of ranks on several hosts, of which at least one has several ranks."""

    def __init__(self, arena: Arena, hosts: RankHosts, store: dist.Store, timeout: timedelta) -> None:
        self._local = HostCollectives(arena) if arena.size > 1 else None
        self._view, self._rank = View.of(len(hosts.of), hosts.of), hosts.rank
        self._between: Any = None
        if hosts.rank in hosts.leaders:
            number = hosts.leaders.index(hosts.rank)
            self._between = dist.ProcessGroupGloo(dist.PrefixStore("leaders/", store), number, hosts.count, timeout)
        self._parts: dict[tuple[int, int], list[_OwnPart]] = {}

    def _own_parts(self, size: tuple[int, int]) -> list[_OwnPart]:
        """The parts for a tensor of this many elements of this many bytes."""
        if len(self._parts) >= _SIZES:
            self._parts.clear()
        parts = self._parts[size] = [
            (number, part.algorithm.collective, part.algorithm.name, part.start, part.stop, part.after)
            for number, part in enumerate(parts_across_hosts(self._view, Layout(*size)))
            if any(self._rank in group and len(group) > 1 for group in part.groups)
        ]
        return parts

    def all_reduce(self, row: Tensor, operation: Any) -> None:
        """All-reduce a contiguous tensor, in place. The root of a part is the first rank of those that do it."""
        average = operation == dist.ReduceOp.AVG
        kind: Any = dist.ReduceOp.SUM if average else operation
        flat, local = row.detach().view(-1), self._local
        in_flight: dict[int, Any] = {}
        size = flat.numel(), flat.element_size()
        for number, collective, algorithm, start, stop, after in self._parts.get(size) or self._own_parts(size):
            for earlier in after:
                if (work := in_flight.pop(earlier, None)) is not None:
                    work.wait()
            piece = flat[start:stop]
            if collective is Collective.ALL_REDUCE:
                if piece.numel():
                    options = AllreduceOptions()
                    options.reduceOp = kind
                    in_flight[number] = self._between.allreduce([piece], options)
            elif local is not None and collective is Collective.REDUCE:
                local.reduce(piece, kind, 0, algorithm)
            elif local is not None:
                local.broadcast(piece, 0, algorithm)
        for work in in_flight.values():
            work.wait()
        if average:
            flat.div_(self._view.size, rounding_mode=None if row.is_floating_point() else "trunc")
