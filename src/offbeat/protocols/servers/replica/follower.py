"""A backup's side of a shard's log: entries are taken from the primary in order, applied, and acknowledged."""

from __future__ import annotations

from collections.abc import Iterable

from offbeat.protocols.machine import Effects, Name, Payload, Received
from offbeat.protocols.servers.messages import Entry, Install, Replicate, Replicated
from offbeat.protocols.servers.replica.fencing import Fence
from offbeat.protocols.servers.replica.replication import Replication
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.works import Restore


class Follower:
    """What a replica that does not serve does with what its primary sends."""

    def __init__(self, shard: Shard, fence: Fence, replication: Replication) -> None:
        self.installed: tuple[Name, int] | None = None
        """Which state this replica was given as a novice: by whom, and which transfer of theirs."""
        self._shard, self._fence, self._replication = shard, fence, replication

    def replicate(self, event: Received, message: Replicate, out: Effects) -> None:
        """Take an entry of the log."""
        if not self._fence.follows(event, message.epoch, out):
            return
        if self._fence.novice and self.installed is None:
            self._replication.keep(message, event.payload)  # It has overtaken the state.
            return
        self._take(self._replication.hold(message, event.payload), event.sender, out)

    def install(self, event: Received, message: Install, out: Effects) -> None:
        """Be what the primary is; once, however often it is said."""
        if not self._fence.follows(event, message.epoch, out):
            return
        given = (event.sender, message.number)
        if self._fence.novice and self.installed != given:
            self.installed = given
            self._shard.adopt(message.state)
            out.start(Restore(event.payload, message.state.version))
            self._replication.restart(message.index)
        self._take(self._replication.in_turn(), event.sender, out)

    def _take(self, entries: Iterable[tuple[Entry, Payload]], sender: Name, out: Effects) -> None:
        """Apply entries, and say how many are held."""
        for entry in entries:
            self._shard.apply(*entry, out)
        out.send(sender, Replicated(self._fence.view.epoch, self._replication.log.end - 1))
