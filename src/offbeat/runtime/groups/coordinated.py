"""Workers that meet through a coordinator, so that the others go on when one of them dies.

Parameters and gradients go to servers, or to neighbours; what is left to agree on goes through meetings of all live
workers, which complete without the dead. Most of it is small: reports, seeds, the end of the data. Whole models, which
gossip has averaged for evaluations, are summed by the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import RunError
from offbeat.protocols.servers.messages import ClusterView
from offbeat.runtime.groups.connection import line_of_presence, meet
from offbeat.runtime.groups.group import DONE, DirectGroup, Group, Pending
from offbeat.runtime.groups.membership import Membership
from offbeat.runtime.groups.presence import Presence
from offbeat.runtime.run.rank_environment import Place
from offbeat.runtime.servers.client import Client
from offbeat.runtime.servers.plan import ServerPlan

_WELCOME = "new workers being there"
_AT_ONCE = 4096
"""Numbers that one worker brings to a meeting in the header of its message; more are a row beside it."""
_SUMMED = (torch.float32, torch.float64)
"""Kinds of numbers that are summed as they are; others are as float64."""


class CoordinatedMeetings:
    """Meetings of all live workers at the coordinator, which one worker comes to one after the other."""

    def __init__(self, client: Client, rank: int, members: Callable[[], tuple[int, ...]], outside: bool) -> None:
        self.client, self._rank = client, rank
        self.outside = outside
        """Whether this worker is on its way into a run that the others have begun: it meets itself alone."""
        self.count = 0
        """How many meetings this worker has come to: all come to the same ones."""
        self.present = members()
        """Who came to the last meeting: the same answer for all who did."""
        self.waiting: tuple[int, ...] = ()
        """Who waited to join at the last meeting."""

    def meet(
        self, values: Sequence[float], what: str, row: NDArray[Any] | None = None
    ) -> tuple[tuple[int, ...], Tensor]:
        """Bring numbers, and perhaps a row that is summed; answers who came, and what numbers each brought."""
        if self.outside:
            return (self._rank,), torch.tensor([list(values)], dtype=torch.float64)
        self.count += 1
        met = self.client.meet(what, self.count, values, row=row)
        self.present, self.waiting = met.ranks, met.waiting
        width = max(map(len, met.values), default=0)
        table = torch.zeros(len(met.ranks), width, dtype=torch.float64)
        for line, brought in zip(table, met.values, strict=True):
            line[: len(brought)] = torch.tensor(brought, dtype=torch.float64)
        return met.ranks, table


class CoordinatedMembership(Membership):
    """The live workers, as the coordinator knows them; others may join."""

    def __init__(self, meetings: CoordinatedMeetings, rank: int, size: int) -> None:
        self._meetings, self._client = meetings, meetings.client
        self._rank, self._size = rank, size
        self.presence: Presence | None = None
        self.clock = 0
        """The clock from which servers wait for this worker, if it has joined later."""

    @property
    def outside(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether this worker is on its way into a run that the others have begun."""
        return self._meetings.outside

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the live workers, as far as is known here."""
        return self._client.view.workers

    @property
    def present(self) -> tuple[int, ...]:
        """Who came to the last meeting: the same answer for all who did."""
        return self._meetings.present

    @property
    def awaited(self) -> bool:
        """Whether anybody waited to join at the last meeting: the same answer for all who were there."""
        return bool(self._meetings.waiting)

    @property
    def leads(self) -> bool:
        """Whether this worker does what only one does; when worker 0 has died, the next one."""
        return not self.outside and self._rank == min(self.members, default=self._rank)

    def leader(self) -> int:
        """The first of those who are there; all live workers call this together."""
        return self._meetings.meet([], "agreeing on who leads")[0][0]

    def leave(self) -> None:
        """Say that this worker has done its last step, and meet all live ones at the end.

        Of its departure the coordinator tells the others, who go on without it.
        """
        if self.presence is not None:
            self.presence.leave()
        self._meetings.meet([], "the end of the run")

    def check(self) -> None:
        """Raise if this worker was declared dead, or its line is broken."""
        self._client.connection.check()

    def tell_of_changes(self, told: Callable[[Sequence[int]], None]) -> None:
        """Have this called, in any thread, when other workers take part than before, with the ranks of those gone.

        Another may be there in the place of one.
        """
        known = dict.fromkeys(range(self._size), 0)

        def heard(view: ClusterView) -> None:
            nonlocal known
            if known != view.members and self._rank in view.workers:
                gone = [rank for rank, life in known.items() if view.life(rank) != life]
                known = view.members
                told(gone)

        self._client.tell(heard)

    def admit(self) -> None:
        """Let in those who wait. All live workers call this between two steps, and have just written a checkpoint.

        From there the new ones go on: they come to the second meeting when they are where the others are.
        """
        meetings = self._meetings
        meetings.count += 1
        self._client.meet("letting others in", meetings.count, [float(meetings.count)], admits=True)
        meetings.meet([], _WELCOME)

    def knock(self) -> None:
        """Wait to be let in: the newest checkpoint is then what this worker goes on from."""
        joined = self._client.join()
        self.clock, self._meetings.count = joined.clock, int(joined.told[0])

    def come_in(self) -> None:
        """From now on this worker meets the others."""
        self._meetings.outside = False
        self._meetings.meet([], _WELCOME)


class CoordinatedGroup(Group):
    """The live workers of a run with servers.

    What it sends goes through its client, which counts it with what is sent to servers.
    """

    def __init__(self, place: Place, timeout: timedelta, plan: ServerPlan, joins: bool = False) -> None:
        super().__init__(place, timeout)
        self.client = Client(plan, place.rank, timeout.total_seconds(), joins)
        self._meetings = CoordinatedMeetings(self.client, self.rank, lambda: self.client.view.workers, joins)
        self._membership = CoordinatedMembership(self._meetings, self.rank, self.size)
        if place.size > 1:
            self.presence = self._membership.presence = self.client.presence = self._attend(place)

    def _attend(self, place: Place) -> Presence:
        """Tell the others where this worker is."""
        meetings, client = self._meetings, self.client
        line = line_of_presence(*meet(place, self.timeout))
        counts = lambda: {"meeting": meetings.count, "clock": client.clock}  # noqa: E731
        presence = Presence(line, self.rank, self.size, counts)
        presence.members = lambda: self._membership.members
        presence.break_off = client.connection.break_off
        return presence

    @property
    def membership(self) -> CoordinatedMembership:
        """The live workers."""
        return self._membership

    @property
    def calls(self) -> int:
        """How many meetings this worker has come to."""
        return self._meetings.count

    def gather(self, values: Sequence[float], what: str) -> Tensor:
        """A row of numbers from every live worker, in the order of their ranks."""
        return self._meetings.meet([float(value) for value in values], what)[1]

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
        if self._meetings.outside or not tensor.numel():
            return weight
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        row = real.to("cpu", torch.float64 if real.dtype not in _SUMMED else real.dtype, copy=True).reshape(-1)
        if len(row) < _AT_ONCE:
            table = self._meetings.meet([weight, *row.tolist()], what)[1].sum(0)
            total, weights = table[1:], float(table[0])
        else:
            weights = float(self._meetings.meet([weight], what, row.numpy())[1].sum())
            total = torch.from_numpy(self._brought(row.dtype))
        real.copy_(total.to(real.dtype).view(real.shape))
        return weights

    def _brought(self, kind: torch.dtype) -> NDArray[Any]:
        """The sum of what was brought to the last meeting."""
        total = self.client.total
        if total is None:
            raise RunError(f"worker {self.rank} brought a row to a meeting, which has no sum")
        return np.frombuffer(total, dtype=str(kind).removeprefix("torch.")).copy()

    def start_sum(self, tensor: Tensor, what: str) -> Pending:
        """The sum, which is complete when this returns."""
        self.sum(tensor, what)
        return DONE

    def sum_sparse(self, tensor: Tensor, what: str) -> Tensor:
        """A sparse tensor summed over the live workers, as a dense one."""
        return self.sum(tensor.to_dense(), what)

    def share(self, tensor: Tensor, what: str = "a broadcast", root: int = 0) -> Tensor:
        """`tensor` of worker `root` on every worker, in place; of the first live one if the root has died."""
        if self._meetings.outside or not tensor.numel():
            return tensor
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        ranks, told = (root,), None
        while told is None:
            # Should the root have died, nobody brings anything, and the first of those who came is the next root.
            told = self._told_by(ranks[0], raw, what)
            ranks = self._meetings.present
        tensor.copy_(torch.from_numpy(told).view(tensor.dtype).view(tensor.shape))
        return tensor

    def _told_by(self, root: int, raw: NDArray[np.uint8], what: str) -> NDArray[np.uint8] | None:
        """The bytes of this worker on every worker; None if it did not come."""
        if len(raw) < _AT_ONCE:
            mine = raw.astype(float).tolist() if root == self.rank else []
            ranks, table = self._meetings.meet(mine, what)
            return table[ranks.index(root)].numpy().astype(np.uint8) if root in ranks else None
        self._meetings.meet([], what, raw if root == self.rank else None)
        total = self.client.total
        return None if total is None else np.frombuffer(total, dtype=np.uint8).copy()

    def barrier(self, what: str = "a barrier") -> None:
        """Return when every live worker has called this."""
        self._meetings.meet([], what)

    def close(self) -> None:
        """Leave the run."""
        if self.presence is not None:
            self.presence.close()
        self.client.close()


def group_for(place: Place, timeout: timedelta, device: torch.device, plan: ServerPlan | None, joins: bool) -> Group:
    """The workers of a run: connected with each other, or, where there is a plan of servers, by the coordinator."""
    return DirectGroup(place, timeout, device) if plan is None else CoordinatedGroup(place, timeout, plan, joins)
