"""A shard's log: which replica holds how much of it, a backup's side of it, and how a new copy is brought up to date.

Backups are fed in turn: the second gets an entry once the first holds it, and so on. So each holds everything that the
next one does, and the first, which takes over if the primary dies, lacks nothing that any other has applied. An entry
is committed once all backups hold it; nobody hears of it before.

A shard that has lost a copy gets a new one while it runs. A new server process volunteers to the coordinator, which
names it the shard's *novice* in a view. The primary waits for a moment between two steps. There it sends the novice
the whole state (numbers, optimizer, clocks, and how many pushes of each worker it has taken), and from then on answers
no push that the novice does not hold, too. So the pause is that of one transfer: what was answered before is in the
state, what is answered after it is in the novice's log. Once the novice holds the state, the primary tells the
coordinator (`BackupReady`), and the next view has the novice as the shard's last backup. Until then it cannot take
over: if the primary dies, its successor sends the state anew, or the shard is lost if there is none. A shard has one
novice at a time, so that copies have an order in which each holds everything that the next one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from msgspec import Struct

from offbeat.protocols.machine import NOTHING, Effects, Name, Payload, Received
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.messages import Install, Replicate, Replicated, ShardState
from offbeat.protocols.servers.replica.fencing import Fence
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.works import ReadShard, Release, Restore

WINDOW = 64  # Entries that are resent at once to a backup that does not answer.
E = TypeVar("E")


class EntryLog(Generic[E]):
    """Entries by index, from the first that some replica may lack."""

    def __init__(self, start: int = 0) -> None:
        self.end = start  # Number of entries so far.
        self._kept: dict[int, tuple[E, Payload]] = {}
        self._first = start

    def append(self, entry: E, payload: Payload = NOTHING) -> None:
        """Add an entry."""
        self._kept[self.end] = (entry, payload)
        self.end += 1

    def __getitem__(self, index: int) -> tuple[E, Payload]:
        return self._kept[index]

    def forget(self, end: int) -> None:
        """Drop the entries before `end`: all replicas hold them."""
        for index in range(self._first, min(end, self.end)):
            del self._kept[index]
        self._first = max(self._first, min(end, self.end))


class _Backup(Struct):
    held: int  # How many entries it is known to hold.
    sent: int  # How many were sent in this epoch, or are known to be held.
    quiet_since: float  # When something was last sent to it or heard from it.


class BackupProgress:
    """What the primary knows of its backups, in their order."""

    def __init__(self, backups: Iterable[Name] = (), held: int = 0, now: float = 0.0) -> None:
        self._backups = {name: _Backup(held, held, now) for name in backups}

    def changed(self, backups: Iterable[Name], now: float) -> BackupProgress:
        """The same backups in the next epoch, without those that left; what is unanswered is resent."""
        feed = BackupProgress()
        for name in backups:
            if (known := self._backups.get(name)) is not None:
                feed._backups[name] = _Backup(known.held, known.held, now)
        return feed

    def add(self, name: Name, held: int, now: float) -> None:
        """Add a backup, fed after all others, that is being given everything up to this entry."""
        self._backups[name] = _Backup(held, held, now)

    def committed(self, end: int) -> int:
        """How many of `end` entries all backups hold."""
        return min([end, *(backup.held for backup in self._backups.values())])

    def answered(self, name: Name, held: int, now: float) -> None:
        """A backup holds this many entries."""
        if (backup := self._backups.get(name)) is not None:
            backup.quiet_since = now
            backup.held = max(backup.held, held)
            backup.sent = max(backup.sent, backup.held)

    def due(self, end: int, now: float) -> Iterator[tuple[Name, int]]:
        """Which backup must be sent which entry now, of `end` that there are."""
        for name, backup in self._backups.items():
            if backup.sent < end:
                backup.quiet_since = now
            while backup.sent < end:
                yield name, backup.sent
                backup.sent += 1
            end = min(end, backup.held)

    def overdue(self, patience: float, now: float) -> Iterator[tuple[Name, int]]:
        """Which backup must be resent which entry: those unanswered for longer than `patience`."""
        for name, backup in self._backups.items():
            if backup.held < backup.sent and now - backup.quiet_since >= patience:
                backup.quiet_since = now
                for index in range(backup.held, min(backup.sent, backup.held + WINDOW)):
                    yield name, index


class Replication(Generic[E]):
    """One replica's log: what it holds and has applied and, for a primary, what to send to its backups.

    What the entries are makes no difference to it; `envelope` makes the message that takes one to a backup.
    """

    def __init__(self, backups: Iterable[Name], envelope: Callable[..., Struct]) -> None:
        self._envelope = envelope
        self.log: EntryLog[E] = EntryLog()
        self.feed = BackupProgress(backups)
        self.applied = 0  # How many entries this replica has applied.
        self.committed = 0  # How many entries are known to be held by all replicas.
        self.ahead: dict[int, tuple[E, Payload]] = {}  # Entries that came before others with lower indices.
        self._settled_at = 0

    @property
    def settled(self) -> bool:
        """Whether all backups hold what was in the log when this replica took over."""
        return self.committed >= self._settled_at

    def take_over(self, backups: Iterable[Name], now: float) -> None:
        """Become primary with what this replica holds; it serves once all other backups hold it, too."""
        self.feed = BackupProgress(backups, self.committed, now)
        self._settled_at = self.log.end

    def send(self, epoch: int, now: float, out: Effects, patience: float | None = None) -> None:
        """Send backups what is due and see how much all of them hold; with `patience`, resend what is overdue."""
        entries = self.feed.due(self.log.end, now) if patience is None else self.feed.overdue(patience, now)
        for backup, index in entries:
            entry, payload = self.log[index]
            message = self._envelope(epoch=epoch, index=index, committed=self.committed - 1, entry=entry)
            out.send(backup, message, payload)
        if patience is None:
            self.committed = max(self.committed, self.feed.committed(self.log.end))

    def to_apply(self) -> Iterator[tuple[E, Payload]]:
        """For a primary: the entries that all replicas hold and that must be applied now."""
        while self.applied < self.committed:
            self.applied += 1
            yield self.log[self.applied - 1]
        self.log.forget(self.committed)

    def hold(self, message: Any, payload: Payload) -> Iterator[tuple[E, Payload]]:
        """For a backup: take an envelope; yields entries that must be applied now, none of which was answered yet."""
        if message.index >= self.log.end:
            self.ahead[message.index] = (message.entry, payload)
        yield from self.in_turn()
        self.committed = max(self.committed, message.committed + 1)
        self.log.forget(self.committed)

    def in_turn(self) -> Iterator[tuple[E, Payload]]:
        """The received entries that follow those that this replica holds."""
        while (following := self.ahead.pop(self.log.end, None)) is not None:
            self.log.append(*following)
            self.applied += 1
            yield following

    def restart(self, index: int) -> None:
        """Hold the first `index` entries, in a state that was handed over."""
        self.log = EntryLog(index)
        self.applied = self.committed = index


class Follower:
    """A backup's side: entries are taken from the primary in order, applied, and acknowledged."""

    def __init__(self, shard: Shard, fence: Fence, replication: Replication[msg.Entry]) -> None:
        self.installed: tuple[Name, int] | None = None
        """The state that this replica was given as a novice: from which primary, and which of its transfers."""
        self._shard, self._fence, self._replication = shard, fence, replication

    def replicate(self, event: Received, message: Replicate, out: Effects) -> None:
        """Take an entry of the log."""
        if not self._fence.follows(event, message.epoch, out):
            return
        if self._fence.novice and self.installed is None:  # It has overtaken the state.
            self._replication.ahead[message.index] = (message.entry, event.payload)
            return
        self._take(self._replication.hold(message, event.payload), event.sender, out)

    def install(self, event: Received, message: Install, out: Effects) -> None:
        """Adopt the primary's state; once per transfer, however often it is sent."""
        if not self._fence.follows(event, message.epoch, out):
            return
        transfer = (event.sender, message.number)
        if self._fence.novice and self.installed != transfer:
            self.installed = transfer
            self._shard.adopt(message.state)
            out.start(Restore(event.payload, message.state.version))
            self._replication.restart(message.index)
        self._take(self._replication.in_turn(), event.sender, out)

    def _take(self, entries: Iterable[tuple[msg.Entry, Payload]], sender: Name, out: Effects) -> None:
        for entry in entries:
            self._shard.apply(*entry, out)
        out.send(sender, Replicated(self._fence.view.epoch, self._replication.log.end - 1))


class Renewal:
    """A primary's side of a new copy: what the shard's novice is given, and whether it has it."""

    def __init__(self, shard: int) -> None:
        self.novice: Name = ""  # The server being brought up to date; empty: none.
        self.begun = False  # Whether the state was taken: from then on the novice must hold what is answered.
        self.installed = False  # Whether the novice holds it.
        self._shard = shard
        self._number = 0  # Tells this transfer from others of the same primary.
        self._index = 0
        self._state: ShardState | None = None
        self._payload: Payload | None = None
        self._sent_at = 0.0

    def follow(self, novice: Name, out: Effects) -> None:
        """Bring the view's novice up to date, unless that is in progress."""
        if novice != self.novice:
            self._release(out)
            self.novice, self.begun, self.installed = novice, False, False
            self._number += 1

    def take(self, index: int, state: ShardState, out: Effects) -> None:
        """Start reading the numbers of the shard as it is after `index` entries of the log."""
        self.begun, self._index, self._state = True, index, state
        out.start(ReadShard(state=True, kept=True), ("renewal", self._number))

    def read(self, number: int, payload: Payload, epoch: int, now: float, out: Effects) -> None:
        """The numbers are read: hand over."""
        if number == self._number and self.novice:
            self._payload = payload
            self._send(epoch, now, out)

    def look(self, epoch: int, patience: float, now: float, out: Effects) -> None:
        """Resend the state if unanswered for longer than `patience`, and what the coordinator may not have heard."""
        if self.installed:
            out.send(msg.COORDINATOR, msg.BackupReady(self._shard, self.novice))
        elif self.begun and now - self._sent_at >= patience:
            self._send(epoch, now, out)

    def answered(self, name: Name, out: Effects) -> None:
        """A backup holds entries; if it is the novice, it has the state, and can take over from now on."""
        if name == self.novice and self.begun and not self.installed:
            self.installed = True
            self._release(out)
            out.send(msg.COORDINATOR, msg.BackupReady(self._shard, self.novice))

    def _release(self, out: Effects) -> None:
        if self._payload is not None:
            out.start(Release(self._payload))
        self._state = self._payload = None

    def _send(self, epoch: int, now: float, out: Effects) -> None:
        if self._state is not None and self._payload is not None:
            self._sent_at = now
            message = Install(epoch=epoch, number=self._number, index=self._index, state=self._state)
            out.send(self.novice, message, self._payload)
