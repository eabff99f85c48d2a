"""Which epoch a replica of a shard is in, and whether it may serve.

Epochs keep two primaries apart. A backup answers only its primary, and only in its own epoch; messages from an
earlier one are answered `Fenced`. So a primary that was stopped, declared dead and continued finds no backup to help
it acknowledge a push, unless its successor held that push before it took over. Told of a later epoch it serves nothing
until it knows that epoch's view, and if it is not in it, never again.
"""

from __future__ import annotations

from offbeat.protocols.machine import Effects, Name, Received
from offbeat.protocols.servers.messages import COORDINATOR, ClusterView, Fenced, Gone, Heartbeat, Request, Volunteer

STASH = 1024  # Messages from a future epoch that are kept until it begins; more are dropped, and will be resent.


class Fence:
    """A replica's place in the newest view that it knows."""

    def __init__(self, name: Name, shard: int, view: ClusterView, joins: bool) -> None:
        self.view = view
        self.retired = False  # Whether this replica was declared dead, and no longer serves.
        self.burden = 0  # Bytes of the largest payload handled so far.
        self.later: list[Received] = []  # Messages kept for later.
        self._name, self._shard, self._joins = name, shard, joins
        self._epoch = view.epoch  # The newest epoch heard of.

    @property
    def serving(self) -> bool:
        """Whether this is the primary, as far as it knows."""
        return not self.retired and self._epoch <= self.view.epoch and self.view.primaries[self._shard] == self._name

    @property
    def novice(self) -> bool:
        """Whether this replica is becoming a backup."""
        return self.view.novice(self._shard) == self._name

    def sign_of_life(self, out: Effects) -> None:
        """Send the coordinator a heartbeat; it answers with a newer view, or adds a volunteer to the next."""
        message = Volunteer(self._shard) if self._joins else Heartbeat(self.view.epoch, self.burden)
        out.send(COORDINATOR, message)

    def step_down(self, message: Fenced | Gone, out: Effects) -> None:
        """Stop serving until the view of that epoch is known, or for ever if this replica is not in it."""
        if message.epoch > self.view.epoch:
            self._epoch = max(self._epoch, message.epoch)
            self.retired = isinstance(message, Gone)
            if not self.retired:
                self.sign_of_life(out)

    def enter(self, view: ClusterView) -> bool:
        """Adopt a view; False if this replica is not in it."""
        self.view = view
        self._epoch = max(self._epoch, view.epoch)
        if self._name in view.replicas(self._shard):
            self._joins = False
            return True
        self.retired = not self._joins
        return False

    def follows(self, event: Received, epoch: int, out: Effects) -> bool:
        """Whether this is from this replica's primary; older epochs are answered `Fenced`, newer ones kept."""
        if epoch < self._epoch:
            out.send(event.sender, Fenced(self._epoch))
        elif epoch > self.view.epoch:
            self.keep(event)
            self.sign_of_life(out)
        else:
            return event.sender == self.view.primaries[self._shard]
        return False

    def admits(self, event: Received, request: Request, out: Effects) -> bool:
        """Whether a worker's request can be handled now; else it is kept, or its sender told why not."""
        if request.epoch > self.view.epoch:
            self.keep(event)
            self.sign_of_life(out)
        elif not self.serving:
            out.send(event.sender, Fenced(self._epoch))
        elif self.view.life(request.worker) != request.life:
            out.send(event.sender, Gone(self.view.epoch))
        else:
            return True
        return False

    def keep(self, event: Received) -> None:
        """Keep a message until its epoch begins, or until it can be handled."""
        if len(self.later) < STASH:
            self.later.append(event)
