"""How a shard that has lost a copy gets a new one, while it goes on.

A new server process volunteers to the coordinator, which names it the shard's *novice* in a view. The primary waits for
a moment between two steps. There it hands the novice the whole state (numbers, optimizer, clocks, and how many pushes
of whom it has taken), and from the same moment on answers no push that the novice does not hold, too. So the pause is
that of one transfer. What was answered before is in the state; what is answered after it the novice has in its log.

Once the novice holds the state, the primary says so to the coordinator (`BackupReady`), and the next view has the
novice as the shard's last backup. Until then it cannot take over: if the primary dies, the novice is handed the
state anew by whoever takes over, or the shard is lost if nobody can. There is one novice of a shard at a time, so
that copies have an order in which each holds all that the next one does.
"""

from __future__ import annotations

from offbeat.protocols.machine import Effects, Name, Payload
from offbeat.protocols.servers.messages import BackupReady, Install, ShardState
from offbeat.protocols.servers.replica.works import ReadShard, Release


class Renewal:
    """A primary's side: what the shard's novice is given, and whether it has it."""

    def __init__(self, shard: int, coordinator: Name) -> None:
        self.novice: Name = ""
        """Who is being brought up to date; empty: nobody."""
        self.begun = False
        """Whether the state was taken: from then on the novice must hold what is answered."""
        self.installed = False
        """Whether the novice holds it."""
        self._shard, self._coordinator = shard, coordinator
        self._number = 0
        """Tells this transfer from others of the same primary."""
        self._index = 0
        self._state: ShardState | None = None
        self._payload: Payload | None = None
        self._sent_at = 0.0

    def follow(self, novice: Name, out: Effects) -> None:
        """Bring the view's novice up to date, unless that is under way."""
        if novice != self.novice:
            self._release(out)
            self.novice, self.begun, self.installed = novice, False, False
            self._number += 1

    def take(self, index: int, state: ShardState, out: Effects) -> None:
        """The shard as it is after so many entries of the log: have its numbers read."""
        self.begun, self._index, self._state = True, index, state
        out.start(ReadShard(state=True, kept=True), ("renewal", self._number))

    def read(self, number: int, payload: Payload, epoch: int, now: float, out: Effects) -> None:
        """The numbers are there: hand over."""
        if number == self._number and self.novice:
            self._payload = payload
            self._send(epoch, now, out)

    def look(self, epoch: int, patience: float, now: float, out: Effects) -> None:
        """Hand over again what was not answered for so long, and say again what the coordinator may not have heard."""
        if self.installed:
            out.send(self._coordinator, BackupReady(self._shard, self.novice))
        elif self.begun and now - self._sent_at >= patience:
            self._send(epoch, now, out)

    def answered(self, name: Name, out: Effects) -> None:
        """Somebody holds entries; if it is the novice, it has the state, and can take over from now on."""
        if name == self.novice and self.begun and not self.installed:
            self.installed = True
            self._release(out)
            out.send(self._coordinator, BackupReady(self._shard, self.novice))

    def _release(self, out: Effects) -> None:
        if self._payload is not None:
            out.start(Release(self._payload))
        self._state = self._payload = None

    def _send(self, epoch: int, now: float, out: Effects) -> None:
        if self._state is not None and self._payload is not None:
            self._sent_at = now
            message = Install(epoch=epoch, number=self._number, index=self._index, state=self._state)
            out.send(self.novice, message, self._payload)
