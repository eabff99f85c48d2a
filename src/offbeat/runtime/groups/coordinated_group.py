"""Workers that meet through a coordinator, so that the others go on when one of them dies.

Parameters and gradients go to servers or neighbours; everything else goes through meetings of all live workers, which
complete without the dead.
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
from offbeat.runtime.groups.connection import meet, presence_store
from offbeat.runtime.groups.group import DONE, DirectGroup, Group, Pending
from offbeat.runtime.groups.presence import Presence
from offbeat.runtime.run.rank_environment import Place
from offbeat.runtime.servers.client import Client
from offbeat.runtime.servers.plan import ServerPlan

_WELCOME = "new workers being there"
_AT_ONCE = 4096  # Numbers that one worker can bring to a meeting in the header of its message; more go as a payload.
_SUMMED = (torch.float32, torch.float64)  # Dtypes that are summed as they are; others are summed as float64.


class CoordinatedMembership:
    """The live workers, according to the coordinator, and their meetings; others may join."""

    def __init__(self, client: Client, rank: int, size: int, outside: bool) -> None:
        self._client, self._rank, self._size = client, rank, size
        self.outside = outside
        """Whether this worker is joining a run that the others have begun: until then it meets only itself."""
        self.meetings = 0  # Meetings that this worker has come to: all come to the same ones.
        self.present = self.members  # Ranks at the last meeting: the same for all that were there.
        self.awaited = False  # Whether a worker waited to join at the last meeting: the same for all that were there.
        self.presence: Presence | None = None
        self.clock = 0  # The clock from which servers wait for this worker, if it has joined later.

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the live workers, as far as this one knows."""
        return self._client.view.workers

    @property
    def leads(self) -> bool:
        """Whether this worker does what only one does: the first live one."""
        return not self.outside and self._rank == min(self.members, default=self._rank)

    def meet(
        self, values: Sequence[float], what: str, row: NDArray[Any] | None = None
    ) -> tuple[tuple[int, ...], Tensor]:
        """Bring numbers, and perhaps a row to be summed; returns the ranks that came, and the numbers of each."""
        if self.outside:
            return (self._rank,), torch.tensor([list(values)], dtype=torch.float64)
        self.meetings += 1
        met = self._client.meet(what, self.meetings, values, row=row)
        self.present, self.awaited = met.ranks, bool(met.waiting)
        width = max(map(len, met.values), default=0)
        table = torch.zeros(len(met.ranks), width, dtype=torch.float64)
        for line, brought in zip(table, met.values, strict=True):
            line[: len(brought)] = torch.tensor(brought, dtype=torch.float64)
        return met.ranks, table

    def leader(self) -> int:
        """The first live worker; all live workers call this together."""
        return self.meet([], "agreeing on who leads")[0][0]

    def leave(self) -> None:
        """Report that this worker has done its last step, and meet all live ones at the end of the run."""
        if self.presence is not None:
            self.presence.leave()
        self.meet([], "the end of the run")

    def check(self) -> None:
        """Raise if this worker was declared dead, or its connection is broken."""
        self._client.connection.check()

    def tell_of_changes(self, changed: Callable[[Sequence[int]], None]) -> None:
        """Call `changed`, in any thread, when membership changes, with the ranks that are gone or replaced."""
        known = dict.fromkeys(range(self._size), 0)

        def heard(view: ClusterView) -> None:
            nonlocal known
            if known != view.members and self._rank in view.workers:
                gone = [rank for rank, life in known.items() if view.life(rank) != life]
                known = view.members
                changed(gone)

        self._client.tell(heard)

    def admit(self) -> None:
        """Admit waiting workers. All live workers call this between two steps, right after writing a checkpoint."""
        # The new workers resume from there, and come to the second meeting when they have caught up.
        self.meetings += 1
        self._client.meet("letting others in", self.meetings, [float(self.meetings)], admits=True)
        self.meet([], _WELCOME)

    def knock(self) -> None:
        """Wait to be admitted; this worker then resumes from the newest checkpoint."""
        joined = self._client.join()
        self.clock, self.meetings = joined.clock, int(joined.told[0])

    def come_in(self) -> None:
        """From now on this worker meets the others."""
        self.outside = False
        self.meet([], _WELCOME)


class CoordinatedGroup(Group):
    """The live workers of a run with servers; bytes are counted by its client, with those sent to servers."""

    def __init__(self, place: Place, timeout: timedelta, plan: ServerPlan, joins: bool = False) -> None:
        super().__init__(place, timeout)
        self.client = client = Client(plan, place.rank, timeout.total_seconds(), joins)
        self._membership = membership = CoordinatedMembership(client, self.rank, self.size, joins)
        self._direct: DirectGroup | None = None
        self.peers: Group = self  # The workers with the same part of the model; all, if each has a whole one.
        if place.size > 1:
            counts = lambda: {"meeting": membership.meetings, "clock": client.clock}  # noqa: E731
            presence = Presence(presence_store(*meet(place, timeout)), self.rank, self.size, counts)
            presence.members = lambda: membership.members
            presence.break_off = client.connection.break_off
            self.presence = membership.presence = client.presence = presence

    @property
    def membership(self) -> CoordinatedMembership:
        """The live workers."""
        return self._membership

    def connect_directly(self, place: Place) -> None:
        """Connect the workers with each other, too, for what passes within a replica; all call this together."""
        self._direct = DirectGroup(place, self.timeout, torch.device("cpu"))
        self._direct.sent = self.sent.lane()

    @property
    def direct(self) -> DirectGroup:
        """The same workers as a `DirectGroup`, if they are directly connected."""
        return self._direct or super().direct

    @property
    def calls(self) -> int:
        """Meetings that this worker has come to."""
        return self._membership.meetings

    def gather(self, values: Sequence[float], what: str) -> Tensor:
        """A row of numbers from every live worker, by rank."""
        return self._membership.meet([float(value) for value in values], what)[1]

    def sum(self, tensor: Tensor, what: str = "a sum") -> Tensor:
        """`tensor` summed in place over the live workers, which are then `present`."""
        self._sum(tensor, what)
        return tensor

    def mean(self, tensor: Tensor, what: str, weight: float | None = None) -> Tensor:
        """`tensor` averaged, in place, over the workers that are then `present`, by their weights unless all are 0."""
        own = tensor.clone()
        weights = self._sum(tensor.mul_(1.0 if weight is None else weight), what, 1.0 if weight is None else weight)
        return tensor.div_(weights or self._sum(tensor.copy_(own), what, 1.0))

    def _sum(self, tensor: Tensor, what: str, weight: float = 1.0) -> float:
        """Sum a tensor over the workers at one meeting; returns the sum of their weights."""
        if self._membership.outside or not tensor.numel():
            return weight
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        row = real.to("cpu", torch.float64 if real.dtype not in _SUMMED else real.dtype, copy=True).reshape(-1)
        if len(row) < _AT_ONCE:
            table = self._membership.meet([weight, *row.tolist()], what)[1].sum(0)
            total, weights = table[1:], float(table[0])
        else:
            weights = float(self._membership.meet([weight], what, row.numpy())[1].sum())
            if self.client.total is None:
                raise RunError(f"worker {self.rank} brought a row to a meeting, which has no sum")
            total = torch.from_numpy(np.frombuffer(self.client.total, dtype=row.numpy().dtype).copy())
        real.copy_(total.to(real.dtype).view(real.shape))
        return weights

    def start_sum(self, tensor: Tensor, what: str) -> Pending:
        """The sum, which is complete when this returns."""
        self.sum(tensor, what)
        return DONE

    def sum_sparse(self, tensor: Tensor, what: str) -> Tensor:
        """A sparse tensor summed over the live workers, as a dense one."""
        return self.sum(tensor.to_dense(), what)

    def share(self, tensor: Tensor, what: str = "a broadcast", root: int = 0) -> Tensor:
        """`tensor` of worker `root` on every worker, in place; of the first live one if the root has died."""
        if self._membership.outside or not tensor.numel():
            return tensor
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        ranks, shared = (root,), None
        while shared is None:
            # If the root has died, no worker brings anything, and the first of those present is the next root.
            shared = self._share_bytes(ranks[0], raw, what)
            ranks = self._membership.present
        tensor.copy_(torch.from_numpy(shared).view(tensor.dtype).view(tensor.shape))
        return tensor

    def _share_bytes(self, root: int, raw: NDArray[np.uint8], what: str) -> NDArray[np.uint8] | None:
        """The root's bytes; None if it did not come."""
        if len(raw) < _AT_ONCE:
            mine = raw.astype(float).tolist() if root == self.rank else []
            ranks, table = self._membership.meet(mine, what)
            return table[ranks.index(root)].numpy().astype(np.uint8) if root in ranks else None
        self._membership.meet([], what, raw if root == self.rank else None)
        total = self.client.total
        return None if total is None else np.frombuffer(total, dtype=np.uint8).copy()

    def barrier(self, what: str = "a barrier") -> None:
        """Return when every live worker has called this."""
        self._membership.meet([], what)

    def close(self) -> None:
        """Leave the run."""
        if self._direct is not None:
            self._direct.close()
        if self.presence is not None:
            self.presence.close()
        self.client.close()


def group_for(place: Place, timeout: timedelta, device: torch.device, plan: ServerPlan | None, joins: bool) -> Group:
    """The workers of a run: connected directly, or through the coordinator of a plan with servers."""
    return DirectGroup(place, timeout, device) if plan is None else CoordinatedGroup(place, timeout, plan, joins)
