"""How a shard that has lost a copy gets a new one, while it goes on.

A new server process volunteers to the coordinator, which names it the shard's *novice* in a view. The primary waits for
a moment between two steps. There it hands the novice the whole state (numbers, optimizer, clocks, and how many pushes
of whom it has taken), and from the same moment on answers no push that the novice does not hold, too. So the pause is
that of one transfer. What was answered before is in the state; what is answered after it the novice has in its log.

Once the novice holds the state, the primary says so to the coordinator (`Ready`), and the next view has the novice as
the shard's last backup. Until then it cannot take over: if the primary dies, the novice is handed the state anew by
whoever takes over, or the shard is lost if nobody can. There is one novice of a shard at a time, so that copies have an
order in which each holds all that the next one does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.protocols.machine import Effects, Name, Payload
from offbeat.protocols.servers.messages import Install, Ready, ShardState
from offbeat.protocols.servers.works import Release


@dataclass(slots=True)
class Renewal:
    """A primary's side: what its novice is given, and whether it has it."""

    name: Name
    number: int
    """Tells this transfer from others of the same primary."""
    index: int = -1
    """How many entries of the log are in the state; -1: it was not taken yet."""
    installed: bool = False
    """Whether the novice holds it."""
    _state: ShardState | None = None
    _payload: Payload | None = None
    _sent_at: float = field(default=0.0)

    @property
    def begun(self) -> bool:
        """Whether the state was taken: from then on the novice must hold what is answered."""
        return self.index >= 0

    def take(self, index: int, state: ShardState) -> None:
        """The shard as it is after so many entries; its numbers are being read."""
        self.index, self._state = index, state

    def read(self, payload: Payload, epoch: int, now: float, out: Effects) -> None:
        """The numbers are there: hand over."""
        self._payload = payload
        self._send(epoch, now, out)

    def look(self, epoch: int, patience: float, now: float, out: Effects) -> None:
        """Hand over again what was not answered for so long."""
        if self.begun and not self.installed and now - self._sent_at >= patience:
            self._send(epoch, now, out)

    def answered(self, shard: int, to: Name, out: Effects) -> None:
        """The novice holds the state: it can take over from now on."""
        self.installed = True
        self.release(out)
        self.report(shard, to, out)

    def report(self, shard: int, to: Name, out: Effects) -> None:
        """Say so, if it is so."""
        if self.installed:
            out.send(to, Ready(shard, self.name))

    def release(self, out: Effects) -> None:
        """The state need not be handed over any more."""
        if self._payload is not None:
            out.start(Release(self._payload))
        self._state = self._payload = None

    def _send(self, epoch: int, now: float, out: Effects) -> None:
        if self._state is not None and self._payload is not None:
            self._sent_at = now
            message = Install(epoch=epoch, number=self.number, index=self.index, state=self._state)
            out.send(self.name, message, self._payload)
