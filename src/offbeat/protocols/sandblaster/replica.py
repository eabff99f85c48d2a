"""A copy of a shard of Sandblaster as a machine: it orders requests into a log that all copies hold, and answers.

Whatever changes a shard (batches of commands, gradients, parameters) is an entry of its log, whatever the commands are.
The primary applies and answers an entry once all copies hold it. They apply the same entries in the same order to the
same bits, so that the one that takes over goes on where the primary stopped, in the middle of a line search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offbeat.protocols.machine import Done, Effect, Effects, Event, Name, Payload, Received, Timer
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.sandblaster.shard import CommandedShard, packed
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    ClusterView,
    Fenced,
    Gone,
    Replicated,
    Timeouts,
    Viewed,
    server_name,
)
from offbeat.protocols.servers.replica.fencing import Fence
from offbeat.protocols.servers.replica.replication import Replication

TICK = "tick"


class VectorShard:
    """One copy of a shard, as primary or as backup: the view says which."""

    def __init__(self, shard: int, view: ClusterView, replica: int = 0, *, timing: Timeouts | None = None) -> None:
        self.name = server_name(shard, replica)
        self.shard = CommandedShard()  # What this copy holds.
        self.fence = Fence(self.name, shard, view, joins=False)
        self.replication: Replication[msg.LogEntry] = Replication(view.backups[shard], msg.Forward)
        self._number, self._timing = shard, timing or Timeouts()
        self._logged: set[tuple[Name, str, int]] = set()  # Requests that are in the log and not applied.
        self._out = Effects()

    def begin(self, now: float) -> Sequence[Effect]:
        """Send the first heartbeat."""
        return self.on(Timer(TICK), now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle a message, a timer, or the end of work."""
        out = self._out = Effects()
        if self.fence.retired:
            return out.done
        match event:
            case Received():
                self._received(event, now)
            case Done(("batch", str(sender), int(number)), values):
                self.shard.carried_out(number, values)
                if self.fence.serving:
                    out.send(sender, msg.Scalars(number, self.shard.memory.values))
            case Done(("memory", str(sender), int(number)), names):
                out.send(sender, msg.Recovered(number, tuple(names)), packed(self.shard.memory))
            case Done(("read", str(sender), int(number)), Payload() as row):
                out.send(sender, msg.Values(number), row)
            case Timer():
                self._tick(now)
            case _:
                pass
        return out.done

    def _received(self, event: Received, now: float) -> None:
        message = event.message
        match message:
            case msg.Forward():
                self._hold(event, message)
            case Replicated(epoch, index) if self.fence.serving and epoch == self.fence.view.epoch:
                self.replication.feed.answered(event.sender, index + 1, now)
                self._advance(now)
            case Fenced() | Gone():
                self.fence.step_down(message, self._out)
            case Viewed(view) if event.sender == COORDINATOR and view.epoch > self.fence.view.epoch:
                self._change(view, now)
            case _:
                self._request(event, now)

    # Requests of workers and of the coordinator of the optimization.

    def _request(self, event: Received, now: float) -> None:
        if not (self.fence.serving and self.replication.settled):
            self.fence.keep(event)  # The view that makes this the primary may be on its way.
            return
        request: Any = event.message
        if self.shard.answer(event.sender, request, self._out):
            return
        key = (event.sender, type(request).__name__, request.number)
        if key not in self._logged:
            self._logged.add(key)
            self.fence.burden = max(self.fence.burden, event.payload.nbytes)
            self.replication.log.append(msg.LogEntry(event.sender, request), event.payload)
            self._advance(now)

    def _advance(self, now: float) -> None:
        """Send copies what is due, and apply and answer what all of them hold."""
        unsettled = not self.replication.settled
        self.replication.send(self.fence.view.epoch, now, self._out)
        for entry, payload in self.replication.to_apply():
            self._logged.discard((entry.sender, type(entry.request).__name__, entry.request.number))
            self.shard.apply(entry, payload, self._out)
            if not isinstance(entry.request, msg.CommandBatch):  # Those are answered when they have given numbers.
                self.shard.answer(entry.sender, entry.request, self._out)
        if unsettled and self.replication.settled:
            self._open_stash(now)

    # Copies and views.

    def _hold(self, event: Received, message: msg.Forward) -> None:
        if not self.fence.follows(event, message.epoch, self._out):
            return
        self.fence.burden = max(self.fence.burden, event.payload.nbytes)
        for entry, payload in self.replication.hold(message, event.payload):
            self.shard.apply(entry, payload, self._out)
        self._out.send(event.sender, Replicated(self.fence.view.epoch, self.replication.log.end - 1))

    def _change(self, view: ClusterView, now: float) -> None:
        """Adopt a new view, perhaps as the primary."""
        before = self.fence.view.primaries[self._number]
        self.replication.ahead.clear()  # The new primary resends what came early.
        if not self.fence.enter(view):
            return
        if view.primaries[self._number] == self.name:
            backups = view.backups[self._number]
            if before == self.name:
                self.replication.feed = self.replication.feed.changed(backups, now)
            else:
                self.replication.take_over(backups, now)
            self._advance(now)
        self._open_stash(now)

    def _open_stash(self, now: float) -> None:
        """Handle what was kept for later."""
        kept, self.fence.later = self.fence.later, []
        for event in kept:
            self._received(event, now)

    def _tick(self, now: float) -> None:
        self._out.timer(self._timing.heartbeat, TICK)
        self.fence.sign_of_life(self._out)
        if self.fence.serving:
            patience = self._timing.patience(self.fence.burden)
            self.replication.send(self.fence.view.epoch, now, self._out, patience)
            self._advance(now)
