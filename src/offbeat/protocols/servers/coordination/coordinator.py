"""Who takes part: hears signs of life, declares the silent dead, lets others take over, and holds meetings.

There is one coordinator, in the process that started all others; if it ends, the run does. So views need no vote: it
alone makes them, and counts them. A view is sent to everyone when it changes, and again to whoever shows by the epoch
in its sign of life that it has not heard. Beside that it holds `meetings` and takes `snapshots`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from offbeat.protocols.machine import Done, Effect, Effects, Ended, Event, Name, Payload, Received, Timer
from offbeat.protocols.servers.coordination.liveness import Liveness
from offbeat.protocols.servers.coordination.meetings import Meetings
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    Acknowledged,
    BackupReady,
    ClusterView,
    Gone,
    Heartbeat,
    JoinRequest,
    Leave,
    Lost,
    MeetingArrival,
    ShardRecorded,
    SnapshotWritten,
    Timeouts,
    Viewed,
    Volunteer,
    Want,
    worker_name,
)
from offbeat.protocols.servers.snapshots import Snapshots

TICK = "tick"


@dataclass(frozen=True, slots=True)
class Changed:
    """There is a new view; work of the coordinator, for the run to know."""

    view: ClusterView
    died: tuple[Name, ...] = ()
    joined: tuple[int, ...] = ()
    copied: tuple[Name, ...] = ()
    """Servers that hold a copy of their shard from now on, in place of others that had died."""
    left: tuple[int, ...] = ()


class CoordinatorMachine:
    """Makes the views."""

    def __init__(self, view: ClusterView, *, name: Name = COORDINATOR, timing: Timeouts | None = None) -> None:
        self.name = name
        self.view = view
        self.lost: tuple[int, ...] = ()
        """Shards that have no replica left."""
        self.waiting: dict[int, int] = {}
        """Workers that wait to be let in, and their processes."""
        self.snapshots = Snapshots()
        """What is recorded of the run while it goes on."""
        self.meetings = Meetings()
        self._liveness = Liveness(timing or Timeouts())
        self._told: dict[int, tuple[float, ...]] = {}
        self._copies = [1 + len(backups) for backups in view.backups]
        self._buried: set[Name] = set()
        self._lives = view.members
        self._processes: dict[int, int] = {}
        self._out = Effects()

    def begin(self, now: float) -> Sequence[Effect]:
        """Begin to listen."""
        self._out = Effects()
        self._liveness.begin(now)
        self._out.timer(self._liveness.heartbeat, TICK)
        return self._out.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Take a message, a timer, or the news that a process has ended."""
        self._out = Effects()
        match event:
            case Received():
                self._received(event, now)
            case Ended():
                self.waiting = {who: process for who, process in self.waiting.items() if worker_name(who) != event.name}
                self._bury([event.name])
            case Timer():
                self._tick(now)
            case Done(("total", str(what)), Payload() as total):
                self.meetings.summed(what, total)
                self._hold_meetings()
            case _:
                pass
        return self._out.done

    def _received(self, event: Received, now: float) -> None:
        sender, message = event.sender, event.message
        match message:
            case Heartbeat():
                self._alive(sender, message, now)
            case JoinRequest() if sender == worker_name(message.worker):
                self._hello(sender, message, now)
            case Leave() if sender == worker_name(message.worker):
                self._leave(sender, message)
            case Volunteer():
                self._volunteer(sender, message.shard, now)
            case BackupReady():
                self._promote(sender, message)
            case MeetingArrival() if sender == worker_name(message.worker):
                self._meet(message, event.payload)
            case Want():
                self.snapshots.want()
                self.snapshots.look(self.view, self.meetings.open, now, self._out)
            case SnapshotWritten() if sender == worker_name(message.worker):
                self._out.send(sender, Acknowledged(life=message.life, number=message.number))
                self.snapshots.recorded(message, self.view, self._out)
            case ShardRecorded():
                self._out.send(sender, Acknowledged(number=message.colour))
                self.snapshots.recorded_shard(sender, message, self.view, self._out)
            case _:
                pass

    # Signs of life.

    def _alive(self, sender: Name, message: Heartbeat, now: float) -> None:
        if sender not in self.view.names:
            self._out.send(sender, Gone(self.view.epoch))
            return
        self._liveness.hear(sender, now, message.burden)
        if message.epoch < self.view.epoch:
            self._out.send(sender, Viewed(self.view))

    def _tick(self, now: float) -> None:
        """Look who is silent."""
        self._out.timer(self._liveness.heartbeat, TICK)
        silent = self._liveness.silent(self.view.names, now)
        if all(worker_name(worker) in silent for worker in self.view.workers):
            # Without them nobody could go on; they may have been stopped together, and come back.
            silent = [name for name in silent if name in self.view.servers]
        self._bury([name for name in silent if name not in self._last_copies(silent)])
        self.snapshots.look(self.view, self.meetings.open, now, self._out)

    def _last_copies(self, silent: Sequence[Name]) -> set[Name]:
        """All that there is of a shard, if it has stood still together.

        To give it up would lose the shard, and it may come back; who has ended is told of, and is lost.
        """
        copies = [(first, *rest) for first, rest in zip(self.view.primaries, self.view.backups, strict=True)]
        still = [names for names in copies if all(name in silent and self._liveness.knows(name) for name in names)]
        return {name for names in still for name in names}

    # Views.

    def _bury(self, names: Sequence[Name]) -> None:
        """Take the dead out of the view; their backups take over."""
        died = tuple(name for name in names if name in self.view.names)
        if not died:
            return
        for name in died:
            self._liveness.forget(name)
        self.view = self.view.without(died)
        lost = [shard for shard, name in enumerate(self.view.primaries) if not name and shard not in self.lost]
        self._buried.update(died)
        workers = [worker for worker in self.view.workers if worker_name(worker) not in died]
        self._change(workers, Changed(self.view, died=died))
        self._announce_lost(lost)

    def _change(self, workers: Sequence[int], news: Changed) -> None:
        """Make the next view, tell everyone (servers first, so that they are ready), and see who has met."""
        lives = tuple(self._lives[worker] for worker in workers)
        self.view = structs.replace(self.view, epoch=self.view.epoch + 1, workers=tuple(workers), lives=lives)
        for name in (*self.view.servers, *map(worker_name, workers)):
            self._out.send(name, Viewed(self.view))
        self._out.start(Changed(self.view, news.died, news.joined, news.copied, news.left))
        self._turn_away()
        self._hold_meetings()

    def _announce_lost(self, lost: Sequence[int]) -> None:
        self.lost += tuple(lost)
        for shard in lost:
            self._out.start(Lost(shard))
            for worker in self.view.workers:
                self._out.send(worker_name(worker), Lost(shard))

    def _volunteer(self, sender: Name, shard: int, now: float) -> None:
        """Let a new process be brought up to date, if its shard lacks a copy and no other is; else it asks again."""
        if sender in self.view.names:
            self._liveness.hear(sender, now)
            self._out.send(sender, Viewed(self.view))
            return
        there = self.view.replicas(shard) if 0 <= shard < len(self.view.primaries) else ()
        if not there or sender in self._buried or len(there) >= self._copies[shard]:
            self._out.send(sender, Gone(self.view.epoch))
        elif not self.view.novice(shard):
            self._liveness.hear(sender, now)
            self.view = self.view.with_novice(shard, sender)
            self._change(self.view.workers, Changed(self.view))

    def _promote(self, sender: Name, message: BackupReady) -> None:
        """A novice holds all that its primary has answered, and will: it can take over."""
        known = 0 <= message.shard < len(self.view.primaries) and sender == self.view.primaries[message.shard]
        if not known or self.view.novice(message.shard) != message.name:
            return
        backups = list(self.view.backups)
        backups[message.shard] += (message.name,)
        self.view = structs.replace(self.view.with_novice(message.shard, ""), backups=tuple(backups))
        self._change(self.view.workers, Changed(self.view, copied=(message.name,)))

    def _hello(self, sender: Name, message: JoinRequest, now: float) -> None:
        """Let a worker in, in a new life unless it is in already; the process before it, if it lives, is out."""
        worker = message.worker
        if worker not in self.view.workers or self._processes.get(worker, 0) != message.process:
            if message.patient:
                self.waiting[worker] = message.process
                self._turn_away()
                return
            self._let_in({worker: message.process})
        self._liveness.hear(sender, now)
        self._out.send(sender, Viewed(self.view, message.process, self._told.get(worker, ())))

    def _let_in(self, processes: Mapping[int, int]) -> None:
        for worker, process in processes.items():
            self._processes[worker] = process
            self._lives[worker] = self._lives.get(worker, -1) + 1
        self._change(sorted({*self.view.workers, *processes}), Changed(self.view, joined=tuple(processes)))

    def _turn_away(self) -> None:
        """Nobody is left who could let anybody in: those who wait need not wait."""
        if not self.view.workers:
            for worker in self.waiting:
                self._out.send(worker_name(worker), Gone(self.view.epoch))
            self.waiting.clear()

    def _admit(self, told: tuple[float, ...]) -> None:
        """Let in all who wait. Whoever has not heard of it asks again."""
        processes, self.waiting = self.waiting, {}
        if processes:
            self._told |= dict.fromkeys(processes, told)
            self._let_in(processes)
            for worker, process in processes.items():
                self._out.send(worker_name(worker), Viewed(self.view, process, told))

    def _leave(self, sender: Name, message: Leave) -> None:
        if self.view.life(message.worker) == message.life:
            self._liveness.forget(sender)
            workers = [worker for worker in self.view.workers if worker != message.worker]
            self._change(workers, Changed(self.view, left=(message.worker,)))
        self._out.send(sender, Viewed(self.view))

    # Meetings.

    def _meet(self, message: MeetingArrival, row: Payload) -> None:
        if self.view.life(message.worker) != message.life:
            self._out.send(worker_name(message.worker), Gone(self.view.epoch))
            return
        self.meetings.come(message, row, self.view.workers, self._out)
        self._hold_meetings()

    def _hold_meetings(self) -> None:
        """End the meetings to which all who live have come, tell those who wait, and let in whom they let in."""
        self.meetings.conclude(self.view.workers, self.waiting, self._out)
        told = self.meetings.answer(self._out)
        if told is not None:
            self._admit(told)
