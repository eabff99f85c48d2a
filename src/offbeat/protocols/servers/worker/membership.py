"""How a worker is one of many: the view that it knows, the life that it is in, and how it joins and leaves.

One who has joined asks all shards to be waited for. Their clocks may differ, so the latest of them is then told to all.
"""

from __future__ import annotations

from typing import Literal

from offbeat.protocols.machine import Effects, Name
from offbeat.protocols.servers.messages import ClusterView, Heartbeat, JoinRequest, Leave, Viewed

_State = Literal["member", "gone", "joining", "entering", "leaving", "left"]


class WorkerMembership:
    """A worker's place in the newest view that it knows."""

    def __init__(self, worker: int, view: ClusterView, process: int, coordinator: Name) -> None:
        self.worker = worker
        self.view = view
        self.life = view.life(worker) or 0
        """How often this worker has joined anew."""
        self.state: _State = "gone" if view.life(worker) is None else "member"
        self.told: tuple[float, ...] = ()
        """What was brought to the meeting that let this worker in."""
        self._process, self._coordinator = process, coordinator
        self._patient = False
        self._clocks: dict[int, int] = {}
        """Of each shard, the clock from which it waits for this worker, while that enters."""

    @property
    def shards(self) -> range:
        """All shards."""
        return range(len(self.view.primaries))

    @property
    def present(self) -> bool:
        """Whether this worker takes part, or is about to."""
        return self.state in ("member", "entering")

    def sign_of_life(self, burden: int, out: Effects) -> None:
        """Also asks for what this worker needs of the coordinator: a newer view, to be let in, to be let go."""
        if self.present:
            out.send(self._coordinator, Heartbeat(self.view.epoch, burden))
        elif self.state == "joining":
            out.send(self._coordinator, JoinRequest(self.worker, self._process, self._patient))
        elif self.state == "leaving":
            out.send(self._coordinator, Leave(self.worker, self.life))

    def join(self, patient: bool) -> None:
        """Want to take part: at once, or when the others hold a meeting."""
        self.state, self._patient = "joining", patient

    def is_news(self, message: Viewed) -> bool:
        """Whether a view is newer than the one known, or lets this process in."""
        admitted = self.state == "joining" and message.process == self._process
        return message.view.epoch > self.view.epoch or (admitted and message.view.epoch == self.view.epoch)

    def follow(self, message: Viewed) -> Literal["enters", "stays", "out", ""]:
        """Go on to a view; whether this worker is let in by it, is in it still, or is in it no longer."""
        self.view = message.view
        life = self.view.life(self.worker)
        if self.state == "joining" and life is not None and message.process == self._process:
            self.state, self.life, self.told = "entering", life, message.told
            self._clocks.clear()
            return "enters"
        if self.present:
            return "stays" if life == self.life else "out"
        if self.state == "leaving" and life != self.life:
            self.state = "left"
        return ""

    def depart(self) -> bool:
        """Take part no longer; whether that is news for this worker."""
        if self.present or (self.state == "joining" and self._patient):
            self.state = "gone"
            return True
        if self.state == "leaving":
            self.state = "left"
        return False

    def enter(self, shard: int, clock: int) -> None:
        """A shard waits for this worker from this clock on."""
        self._clocks[shard] = clock

    def agreed(self) -> tuple[int, list[int]]:
        """The latest clock from which any shard waits for this worker, and the shards that are behind it."""
        clock = max(self._clocks.values(), default=0)
        return clock, [shard for shard in self.shards if self._clocks.get(shard, 0) < clock]
