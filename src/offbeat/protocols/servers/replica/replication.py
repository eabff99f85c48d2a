"""A shard's log, and who holds how much of it.

Backups are told in turn: the second gets an entry once the first holds it, and so on. So each holds all that the next
one does, and the first, which takes over if the primary dies, lacks nothing that any other has applied. An entry is
committed once all backups hold it; nobody is told of it before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from offbeat.protocols.machine import NOTHING, Effects, Name, Payload
from offbeat.protocols.servers.messages import Entry, Replicate

WINDOW = 64
"""Entries that are sent again at once to a backup that does not answer."""


class EntryLog:
    """Entries by index, from the first that some replica may lack."""

    def __init__(self, start: int = 0) -> None:
        self.end = start
        """How many entries there have been."""
        self._kept: dict[int, tuple[Entry, Payload]] = {}
        self._first = start

    def append(self, entry: Entry, payload: Payload = NOTHING) -> None:
        """Add an entry."""
        self._kept[self.end] = (entry, payload)
        self.end += 1

    def __getitem__(self, index: int) -> tuple[Entry, Payload]:
        return self._kept[index]

    def forget(self, end: int) -> None:
        """Let go of the entries before `end`: all replicas hold them."""
        for index in range(self._first, min(end, self.end)):
            del self._kept[index]
        self._first = max(self._first, min(end, self.end))


@dataclass(slots=True)
class _Backup:
    held: int
    """How many entries it is known to hold."""
    sent: int
    """How many were sent in this epoch, or are known to be held."""
    quiet_since: float
    """When something was last sent to it or heard from it."""


class BackupProgress:
    """What the primary knows of its backups, in their order."""

    def __init__(self, backups: Iterable[Name] = (), held: int = 0, now: float = 0.0) -> None:
        self._backups = {name: _Backup(held, held, now) for name in backups}

    def changed(self, backups: Iterable[Name], now: float) -> BackupProgress:
        """The feed of the next epoch: those of these who were fed, and what is unanswered is to be sent anew."""
        feed = BackupProgress()
        for name in backups:
            if (known := self._backups.get(name)) is not None:
                feed._backups[name] = _Backup(known.held, known.held, now)
        return feed

    def add(self, name: Name, held: int, now: float) -> None:
        """One more, told after all others, which is being given all up to this entry."""
        self._backups[name] = _Backup(held, held, now)

    def committed(self, end: int) -> int:
        """How many of `end` entries all backups hold."""
        return min([end, *(backup.held for backup in self._backups.values())])

    def answered(self, name: Name, held: int, now: float) -> None:
        """A backup holds so many."""
        backup = self._backups.get(name)
        if backup is None:
            return
        backup.quiet_since = now
        if held > backup.held:
            backup.held = held
            backup.sent = max(backup.sent, held)

    def due(self, end: int, now: float) -> Iterator[tuple[Name, int]]:
        """Which backup is to be sent which entry now, of `end` that there are."""
        for name, backup in self._backups.items():
            if backup.sent < end:
                backup.quiet_since = now
            while backup.sent < end:
                yield name, backup.sent
                backup.sent += 1
            end = min(end, backup.held)

    def overdue(self, patience: float, now: float) -> Iterator[tuple[Name, int]]:
        """Which backup is to be sent which entry again: those that were not answered for so long."""
        for name, backup in self._backups.items():
            if backup.held < backup.sent and now - backup.quiet_since >= patience:
                backup.quiet_since = now
                for index in range(backup.held, min(backup.sent, backup.held + WINDOW)):
                    yield name, index


class Replication:
    """One replica's log: what it holds and has applied and, of a primary, what is to be sent to its backups."""

    def __init__(self, backups: Iterable[Name]) -> None:
        self.log = EntryLog()
        self.feed = BackupProgress(backups)
        self.applied = 0
        """How many entries this replica has applied."""
        self.committed = 0
        """How many entries are known to be held by all replicas."""
        self._settled_at = 0
        self._ahead: dict[int, tuple[Entry, Payload]] = {}
        """Entries that came before others with lower indices."""

    @property
    def settled(self) -> bool:
        """Whether all backups hold what was in the log when this replica took over."""
        return self.committed >= self._settled_at

    def take_over(self, backups: Iterable[Name], now: float) -> None:
        """What this replica holds is what the shard is; it serves once all other backups hold it, too."""
        self.feed = BackupProgress(backups, self.committed, now)
        self._settled_at = self.log.end

    def send(self, epoch: int, now: float, out: Effects) -> None:
        """Send backups what is due, and see how much all of them hold."""
        for backup, index in self.feed.due(self.log.end, now):
            self._send(backup, index, epoch, out)
        self.committed = max(self.committed, self.feed.committed(self.log.end))

    def send_again(self, epoch: int, patience: float, now: float, out: Effects) -> None:
        """Send again what was not answered for so long."""
        for backup, index in self.feed.overdue(patience, now):
            self._send(backup, index, epoch, out)

    def _send(self, backup: Name, index: int, epoch: int, out: Effects) -> None:
        entry, payload = self.log[index]
        out.send(backup, Replicate(epoch=epoch, index=index, committed=self.committed - 1, entry=entry), payload)

    def to_apply(self) -> Iterator[tuple[Entry, Payload]]:
        """Of a primary: the entries that all replicas hold and that are to be applied now."""
        while self.applied < self.committed:
            self.applied += 1
            yield self.log[self.applied - 1]
        self.log.forget(self.committed)

    def hold(self, message: Replicate, payload: Payload) -> Iterator[tuple[Entry, Payload]]:
        """Of a backup: take an entry; the entries that are to be applied now. They were never answered yet."""
        if message.index >= self.log.end:
            self.keep(message, payload)
        yield from self.in_turn()
        self.committed = max(self.committed, message.committed + 1)
        self.log.forget(self.committed)

    def keep(self, message: Replicate, payload: Payload) -> None:
        """Keep an entry until it is its turn."""
        self._ahead[message.index] = (message.entry, payload)

    def in_turn(self) -> Iterator[tuple[Entry, Payload]]:
        """The entries that have come and follow on what this replica holds."""
        while (following := self._ahead.pop(self.log.end, None)) is not None:
            self.log.append(*following)
            self.applied += 1
            yield following

    def drop_early(self) -> None:
        """Forget what came before its turn: whoever serves now sends it again."""
        self._ahead.clear()

    def restart(self, index: int) -> None:
        """Hold so many entries, in a state that was handed over."""
        self.log = EntryLog(index)
        self.applied = self.committed = index
