"""Workers that meet through a coordinator, so that the others go on when one of them dies.

Parameters and gradients go to servers; what is left to agree on is small: reports, seeds, the end of the data. It goes
as numbers through meetings of all live workers, which complete without the dead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.runtime.group import Group, Pending
from offbeat.runtime.place import Place
from offbeat.runtime.servers.client import Client
from offbeat.runtime.servers.plan import Plan

_WELCOME = "new workers being there"
_AT_ONCE = 4096
"""Numbers that one worker brings to one meeting; the header of a message has room for some thousands."""


class ServedGroup(Group):
    """The live workers of a run with servers."""

    def __init__(self, place: Place, timeout: timedelta, plan: Plan, joins: bool = False) -> None:
        super().__init__(dataclasses.replace(place, rank=0, size=1, local_size=1), timeout, torch.device("cpu"))
        self.rank, self.size = place.rank, place.size
        self.one_host = place.local_size == place.size
        self.client = Client(plan, place.rank, timeout.total_seconds(), joins)
        self.outside = joins
        self.clock = 0
        """The clock from which servers wait for this worker, if it has joined later."""
        self._meetings = 0
        self._waiting: tuple[int, ...] = ()
        self._present = self.members

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the live workers, as far as is known here."""
        return self.client.view.workers

    @property
    def leads(self) -> bool:
        """Whether this worker does what only one does; when worker 0 has died, the next one."""
        return not self.outside and self.rank == min(self.members, default=self.rank)

    @property
    def meetings(self) -> int:
        """How many meetings this worker has come to: all come to the same ones."""
        return self._meetings

    @property
    def present(self) -> tuple[int, ...]:
        """Who came to the last meeting: the same answer for all who did."""
        return self._present

    @property
    def awaited(self) -> bool:
        """Whether anybody waited to join at the last meeting: the same answer for all who were there."""
        return bool(self._waiting)

    def admit(self) -> None:
        """Let in those who wait. All live workers call this between two steps, and have just written a checkpoint.

        From there the new ones go on: they come to the second meeting when they are where the others are.
        """
        self._meetings += 1
        self.client.meet("letting others in", self._meetings, [float(self._meetings)], admits=True)
        self.barrier(_WELCOME)

    def knock(self) -> None:
        """Wait to be let in: the newest checkpoint is then what this worker goes on from."""
        joined = self.client.join()
        self.clock, self._meetings = joined.clock, int(joined.told[0])

    def come_in(self) -> None:
        """From now on this worker meets the others."""
        self.outside = False
        self.barrier(_WELCOME)

    def leader(self) -> int:
        """The first of those who are there; all live workers call this together."""
        return self._meet([], "agreeing on who leads")[0][0]

    def _meet(self, values: Sequence[float], what: str) -> tuple[tuple[int, ...], Tensor]:
        if self.outside:
            return (self.rank,), torch.tensor([list(values)], dtype=torch.float64)
        self._meetings += 1
        met = self.client.meet(what, self._meetings, values)
        ranks, rows = met.ranks, met.values
        self._present, self._waiting = ranks, met.waiting
        width = max(map(len, rows), default=0)
        table = torch.zeros(len(rows), width, dtype=torch.float64)
        for row, brought in zip(table, rows, strict=True):
            row[: len(brought)] = torch.tensor(brought, dtype=torch.float64)
        return ranks, table

    def gather(self, values: Sequence[float], what: str) -> Tensor:
        """A row of numbers from every live worker, in the order of their ranks."""
        return self._meet([float(value) for value in values], what)[1]

    def sum(self, tensor: Tensor, what: str = "a sum") -> Tensor:
        """`tensor` summed over the live workers, in place."""
        flat = tensor.detach().reshape(-1).double()
        total = [self._meet(flat[at : at + _AT_ONCE].tolist(), what)[1].sum(0) for at in range(0, len(flat), _AT_ONCE)]
        if total:
            tensor.copy_(torch.cat(total).to(tensor.dtype).view(tensor.shape))
        return tensor

    def start_sum(self, tensor: Tensor, what: str) -> Pending:
        """The sum, which is complete when this returns."""
        self.sum(tensor, what)
        return _Complete()

    def sum_sparse(self, tensor: Tensor, what: str) -> Tensor:
        """A sparse tensor summed over the live workers, as a dense one."""
        return self.sum(tensor.to_dense(), what)

    def share(self, tensor: Tensor, what: str = "a broadcast", root: int = 0) -> Tensor:
        """`tensor` of worker `root` on every worker, in place; of the first live one if the root has died."""
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        words = np.frombuffer(raw.tobytes() + bytes(-len(raw) % 2), dtype=np.uint16)
        parts: list[Any] = []
        for at in range(0, len(words), _AT_ONCE):
            mine = words[at : at + _AT_ONCE].astype(float).tolist()
            ranks, table = self._meet(mine, what)
            parts.append(table[ranks.index(root) if root in ranks else 0].numpy())
        if parts:
            told = np.concatenate(parts).astype(np.uint16).view(np.uint8)[: len(raw)]
            tensor.copy_(torch.from_numpy(told.copy()).view(tensor.dtype).view(tensor.shape))
        return tensor

    def barrier(self, what: str = "a barrier") -> None:
        """Return when every live worker has called this."""
        self._meet([], what)

    def close(self) -> None:
        """Leave the run."""
        self.client.close()


class _Complete:
    def wait(self) -> None:
        """Nothing to wait for."""
