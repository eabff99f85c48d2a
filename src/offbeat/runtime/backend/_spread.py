"""An all-reduce over several hosts: inside each through shared memory, between their leaders by Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from offbeat.runtime.backend._local import Local
from offbeat.runtime.backend._meeting import Hosts
from offbeat.runtime.shared.room import Room

PIECE = 1 << 22
"""Bytes that travel between hosts at once, while the next are reduced inside and the last are handed round."""


class Spread:
    """Ranks on several hosts, of which at least one has several."""

    def __init__(self, room: Room, hosts: Hosts, store: dist.Store, timeout: timedelta) -> None:
        self._local = Local(room) if room.size > 1 else None
        self._size = len(hosts.of)
        self._between: Any = None
        if hosts.rank in hosts.leaders:
            number = hosts.leaders.index(hosts.rank)
            self._between = dist.ProcessGroupGloo(dist.PrefixStore("leaders/", store), number, hosts.count, timeout)

    def all_reduce(self, row: Tensor, operation: Any) -> None:
        """A contiguous tensor, in place."""
        average = operation == dist.ReduceOp.AVG
        kind = dist.ReduceOp.SUM if average else operation
        pieces = row.detach().view(-1).split(max(1, PIECE // row.element_size())) if row.numel() else [row.detach()]
        under_way: Any = None
        for number, piece in enumerate(pieces):
            if self._local is not None:
                self._local.reduce(piece, kind, 0)
            started = self._start(piece, kind)
            if number:
                self._hand_round(pieces[number - 1], under_way)
            under_way = started
        self._hand_round(pieces[-1], under_way)
        if average:
            row.detach().div_(self._size, rounding_mode=None if row.is_floating_point() else "trunc")

    def _start(self, piece: Tensor, operation: Any) -> Any:
        if self._between is None or not piece.numel():
            return None
        options = AllreduceOptions()
        options.reduceOp = operation
        return self._between.allreduce([piece], options)

    def _hand_round(self, piece: Tensor, under_way: Any) -> None:
        if under_way is not None:
            under_way.wait()
        if self._local is not None:
            self._local.broadcast(piece, 0)

    def all_reduce_all(self, tensors: Sequence[Tensor], operation: Any) -> None:
        """Several tensors, one after the other; those that do not lie in a row are copied into one and back."""
        for tensor in tensors:
            held = tensor if tensor.is_contiguous() else tensor.contiguous()
            self.all_reduce(held, operation)
            if held is not tensor:
                with torch.no_grad():
                    tensor.copy_(held)
