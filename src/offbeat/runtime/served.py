"""Workers that meet through a coordinator, so that the others go on when one of them dies.

Parameters and gradients go to servers, or to neighbours; what is left to agree on goes through meetings of all live
workers, which complete without the dead. Most of it is small: reports, seeds, the end of the data. Whole models, which
gossip has averaged for evaluations, are summed by the coordinator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import RunError, WaitError
from offbeat.protocols.servers.messages import ClusterView
from offbeat.runtime.group import Group, Pending
from offbeat.runtime.place import Place
from offbeat.runtime.servers.client import Client
from offbeat.runtime.servers.plan import Plan

_WELCOME = "new workers being there"
_AT_ONCE = 4096
"""Numbers that one worker brings to a meeting in the header of its message; more are a row beside it."""
_SUMMED = (torch.float32, torch.float64)
"""Kinds of numbers that are summed as they are; others are as float64."""


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
        if place.size > 1:
            self._meet_at(place)
            self._attend(lambda: {"meeting": self._meetings, "clock": self.client.clock})

    def _attend(self, counts: Callable[[], Mapping[str, int]]) -> None:
        super()._attend(counts)
        if self.presence is not None:
            self.presence.members = lambda: self.members
            self.client.presence = self.presence

    def depart(self, failed: bool) -> None:
        """The coordinator tells the others, who go on without this worker."""

    def _break_off(self, error: WaitError) -> None:
        self.client.break_off(error)

    def leave(self) -> None:
        """Say that this worker has done its last step, and meet all live ones at the end."""
        if self.presence is not None:
            self.presence.leave()
        self.barrier("the end of the run")

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the live workers, as far as is known here."""
        return self.client.view.workers

    @property
    def leads(self) -> bool:
        """Whether this worker does what only one does; when worker 0 has died, the next one."""
        return not self.outside and self.rank == min(self.members, default=self.rank)

    def check(self) -> None:
        """Raise if this worker was declared dead, or its line is broken."""
        self.client.check()

    def tell_of_changes(self, told: Callable[[Sequence[int]], None]) -> None:
        """Have this called when other workers take part, with those gone; another may be there in the place of one."""
        known = dict.fromkeys(range(self.size), 0)

        def heard(view: ClusterView) -> None:
            nonlocal known
            if known != view.members and self.rank in view.workers:
                gone = [rank for rank, life in known.items() if view.life(rank) != life]
                known = view.members
                told(gone)

        self.client.tell(heard)

    @property
    def calls(self) -> int:
        """How many meetings this worker has come to."""
        return self._meetings

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

    def _meet(
        self, values: Sequence[float], what: str, row: NDArray[Any] | None = None
    ) -> tuple[tuple[int, ...], Tensor]:
        if self.outside:
            return (self.rank,), torch.tensor([list(values)], dtype=torch.float64)
        self._meetings += 1
        met = self.client.meet(what, self._meetings, values, row=row)
        ranks = met.ranks
        self._present, self._waiting = ranks, met.waiting
        width = max(map(len, met.values), default=0)
        table = torch.zeros(len(ranks), width, dtype=torch.float64)
        for line, brought in zip(table, met.values, strict=True):
            line[: len(brought)] = torch.tensor(brought, dtype=torch.float64)
        return ranks, table

    def gather(self, values: Sequence[float], what: str) -> Tensor:
        """A row of numbers from every live worker, in the order of their ranks."""
        return self._meet([float(value) for value in values], what)[1]

    def sum(self, tensor: Tensor, what: str = "a sum") -> Tensor:
        """`tensor` summed over the live workers, in place; all of it over the same ones, who are then `present`."""
        self._sum(tensor, what)
        return tensor

    def mean(self, tensor: Tensor, what: str, weight: float | None = None) -> Tensor:
        """`tensor` averaged, in place, over the workers that are then `present`, by their weights if not all are 0."""
        own = tensor.clone()
        weights = self._sum(tensor.mul_(1.0 if weight is None else weight), what, 1.0 if weight is None else weight)
        if weights:
            return tensor.div_(weights)
        weights = self._sum(tensor.copy_(own), what, 1.0)
        return tensor.div_(weights)

    def _sum(self, tensor: Tensor, what: str, weight: float = 1.0) -> float:
        """Sum a tensor over those who come to one meeting, and their weights."""
        if self.outside or not tensor.numel():
            return weight
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        row = real.to("cpu", torch.float64 if real.dtype not in _SUMMED else real.dtype, copy=True).reshape(-1)
        if len(row) < _AT_ONCE:
            table = self._meet([weight, *row.tolist()], what)[1].sum(0)
            total, weights = table[1:], float(table[0])
        else:
            weights = float(self._meet([weight], what, row.numpy())[1].sum())
            total = torch.from_numpy(self._brought(row.dtype))
        real.copy_(total.to(real.dtype).view(real.shape))
        return weights

    def _brought(self, kind: torch.dtype) -> NDArray[Any]:
        """The sum of what was brought to the last meeting."""
        total = self.client.total
        if total is None:
            raise RunError(f"worker {self.rank} brought a row to a meeting, which has no sum")
        self._sent.counted += total.nbytes
        return np.frombuffer(total, dtype=str(kind).removeprefix("torch.")).copy()

    def start_sum(self, tensor: Tensor, what: str) -> Pending:
        """The sum, which is complete when this returns."""
        self.sum(tensor, what)
        return _Complete()

    def sum_sparse(self, tensor: Tensor, what: str) -> Tensor:
        """A sparse tensor summed over the live workers, as a dense one."""
        return self.sum(tensor.to_dense(), what)

    def share(self, tensor: Tensor, what: str = "a broadcast", root: int = 0) -> Tensor:
        """`tensor` of worker `root` on every worker, in place; of the first live one if the root has died."""
        if self.outside or not tensor.numel():
            return tensor
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        ranks, told = (root,), None
        while told is None:
            # Should the root have died, nobody brings anything, and the first of those who came is the next root.
            told = self._told_by(ranks[0], raw, what)
            ranks = self._present
        tensor.copy_(torch.from_numpy(told).view(tensor.dtype).view(tensor.shape))
        return tensor

    def _told_by(self, root: int, raw: NDArray[np.uint8], what: str) -> NDArray[np.uint8] | None:
        """The bytes of this worker on every worker; None if it did not come."""
        if len(raw) < _AT_ONCE:
            mine = raw.astype(float).tolist() if root == self.rank else []
            ranks, table = self._meet(mine, what)
            return table[ranks.index(root)].numpy().astype(np.uint8) if root in ranks else None
        self._meet([], what, raw if root == self.rank else None)
        total = self.client.total
        if root == self.rank:
            self._sent.counted += raw.nbytes
        return None if total is None else np.frombuffer(total, dtype=np.uint8).copy()

    def barrier(self, what: str = "a barrier") -> None:
        """Return when every live worker has called this."""
        self._meet([], what)

    def close(self) -> None:
        """Leave the run."""
        if self.presence is not None:
            self.presence.close()
        self.client.close()


class _Complete:
    def wait(self) -> None:
        """Nothing to wait for."""
