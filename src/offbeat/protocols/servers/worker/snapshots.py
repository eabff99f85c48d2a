"""A worker's side of snapshots: it is cut between two steps, and says what it has recorded until that is heard."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.protocols.machine import NOTHING, Effect, Effects, Name, Send
from offbeat.protocols.servers.messages import SnapshotWritten, Turned, Want, WorkerCut
from offbeat.protocols.servers.snapshots import WorkerColour
from offbeat.protocols.servers.worker.compose import Composer
from offbeat.protocols.servers.worker.membership import WorkerMembership
from offbeat.protocols.servers.worker.requests import ASIDE, Outstanding


class WorkerSnapshots:
    """Which snapshots a worker has a part in, and what it says about them."""

    def __init__(
        self, membership: WorkerMembership, colour: WorkerColour, composer: Composer, outstanding: Outstanding, to: Name
    ) -> None:
        self._membership, self._colour, self._composer = membership, colour, composer
        self._outstanding, self._coordinator = outstanding, to

    def want(self) -> Sequence[Effect]:
        """Ask for a snapshot of the run."""
        return [Send(self._coordinator, Want(self._membership.worker))]

    def turn(self, now: float, *, clock: int, meetings: int) -> tuple[WorkerCut, Sequence[Effect]]:
        """At a boundary where a snapshot is due (`colour.due`): be cut here. The state is to be recorded now."""
        out, member, pushes = Effects(), self._membership, self._composer.pushes
        seen = self._colour.turn(self._composer.known)
        cut = WorkerCut(
            worker=member.worker,
            life=member.life,
            clock=clock,
            pushes=tuple(pushes),
            seen=tuple(seen.get(shard, -1) for shard in member.shards),
            meetings=meetings,
        )
        for shard in member.shards:
            turned = Turned(**self._composer.header(), colour=self._colour.own, pushes=pushes[shard])
            self._outstanding.enlist(ASIDE, shard, turned, NOTHING, now, out)
        return cut, out.done

    def recorded(self, colour: int, cut: WorkerCut | None, now: float, out: Effects | None = None) -> Sequence[Effect]:
        """The state of that cut is written down; or, without a cut, there is none."""
        out = Effects() if out is None else out
        message = SnapshotWritten(**self._composer.header(), colour=colour, cut=cut)
        self._outstanding.enlist(ASIDE, -1, message, NOTHING, now, out)
        return out.done

    def act(self, now: float, out: Effects) -> None:
        """Something that changes others is about to be sent; if that is too early for a snapshot, it is said."""
        missed = self._colour.missed
        self._colour.act()
        if self._colour.missed > missed:
            self.recorded(self._colour.missed, None, now, out)
