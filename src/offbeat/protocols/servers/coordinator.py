"""Who takes part: hears signs of life, declares the silent dead, lets others take over, and holds meetings.

There is one coordinator, in the process that started all others; if it ends, the run does. So views need no vote: it
alone makes them, and counts them. A view is sent to everyone when it changes, and again to whoever shows by the epoch
in its sign of life that it has not heard.

A meeting is the same for all who hear of it, whoever dies meanwhile: who came, what each brought, and, where they
brought rows of numbers, the sum of those. Rows are added as they come (`Add`), so that one sum is kept and no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct, structs

from offbeat.protocols.machine import NOTHING, Done, Effect, Effects, Ended, Event, Name, Payload, Received, Timer
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    Awaiting,
    Bring,
    ClusterView,
    Gone,
    Heartbeat,
    Hello,
    Leave,
    Lost,
    Meet,
    Met,
    Noted,
    Ready,
    Recorded,
    ShardRecorded,
    Timing,
    Viewed,
    Volunteer,
    Want,
    worker_name,
)
from offbeat.protocols.servers.snapshots import Snapshots

TICK = "tick"

REMEMBERED = 256
"""Meetings whose outcome is kept, for those who have not heard it."""


@dataclass(frozen=True, slots=True)
class Changed:
    """There is a new view; work of the coordinator, for the run to know."""

    view: ClusterView
    died: tuple[Name, ...] = ()
    joined: tuple[int, ...] = ()
    copied: tuple[Name, ...] = ()
    """Servers that hold a copy of their shard from now on, in place of others that had died."""
    left: tuple[int, ...] = ()


class Add(Struct, frozen=True):
    """Work: add this row to the sum of a meeting; it is to be read now."""

    what: str
    kind: str
    row: Payload


class Total(Struct, frozen=True):
    """Work: the sum of a meeting, as a payload. Nothing is added to it any more."""

    what: str


@dataclass(slots=True)
class _Meeting:
    values: dict[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    waiting: dict[int, Meet] = field(default_factory=dict[int, Meet])
    """Whom to answer."""
    over: bool = False
    summed: bool = False
    """Whether anybody has brought a row."""
    total: Payload | None = None
    """Of the rows; nothing, if there are none; None before it is known, and again when all have it."""
    colour: int = 0
    """The newest of those who have come."""
    joining: tuple[int, ...] = ()
    """Workers that waited to join when all had come."""


class CoordinatorMachine:
    """Makes the views."""

    def __init__(self, view: ClusterView, *, name: Name = COORDINATOR, timing: Timing | None = None) -> None:
        self.name = name
        self.view = view
        self.lost: tuple[int, ...] = ()
        """Shards that have no replica left."""
        self.waiting: dict[int, int] = {}
        """Workers that wait to be let in, and their processes."""
        self.snapshots = Snapshots()
        """What is recorded of the run while it goes on."""
        self._told: dict[int, tuple[float, ...]] = {}
        self._timing = timing or Timing()
        self._copies = [1 + len(backups) for backups in view.backups]
        self._buried: set[Name] = set()
        self._lives = view.members
        self._processes: dict[int, int] = {}
        self._heard: dict[Name, float] = {}
        self._burden = 0
        self._begun = 0.0
        self._ticked = 0.0
        self._meetings: dict[str, _Meeting] = {}
        self._out = Effects()

    def begin(self, now: float) -> Sequence[Effect]:
        """Begin to listen."""
        self._begun = self._ticked = now
        self._out = Effects()
        self._out.timer(self._timing.heartbeat, TICK)
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
                self._summed(what, total)
            case _:
                pass
        return self._out.done

    def _received(self, event: Received, now: float) -> None:
        sender, message = event.sender, event.message
        match message:
            case Heartbeat():
                self._alive(sender, message, now)
            case Hello() if sender == worker_name(message.worker):
                self._hello(sender, message, now)
            case Leave() if sender == worker_name(message.worker):
                self._leave(sender, message)
            case Volunteer():
                self._volunteer(sender, message.shard, now)
            case Ready():
                self._promote(sender, message)
            case Meet() if sender == worker_name(message.worker):
                self._meet(message, event.payload)
            case Want():
                self.snapshots.want()
                self._look_at_snapshots(now)
            case Recorded() if sender == worker_name(message.worker):
                self._out.send(sender, Noted(life=message.life, number=message.number))
                self.snapshots.recorded(message, self.view, self._out)
            case ShardRecorded():
                self._out.send(sender, Noted(number=message.colour))
                self.snapshots.recorded_shard(sender, message, self.view, self._out)
            case _:
                pass

    # Signs of life.

    def _members(self) -> list[Name]:
        return [*map(worker_name, self.view.workers), *self.view.servers]

    def _alive(self, sender: Name, message: Heartbeat, now: float) -> None:
        if sender not in self._members():
            self._out.send(sender, Gone(self.view.epoch))
            return
        self._heard[sender] = now
        self._burden = max(self._burden, message.burden)
        if message.epoch < self.view.epoch:
            self._out.send(sender, Viewed(self.view))

    def _tick(self, now: float) -> None:
        """Look who is silent. The time that the coordinator itself was stopped for counts against nobody."""
        asleep = max(0.0, now - self._ticked - 2 * self._timing.heartbeat)
        self._ticked = now
        self._out.timer(self._timing.heartbeat, TICK)
        self._begun += asleep
        self._heard = {name: heard + asleep for name, heard in self._heard.items()}
        silent = [name for name in self._members() if self._is_silent(name, now)]
        if all(worker_name(worker) in silent for worker in self.view.workers):
            # Without them nobody could go on; they may have been stopped together, and come back.
            silent = [name for name in silent if name in self.view.servers]
        self._bury([name for name in silent if name not in self._last_copies(silent)])
        self._look_at_snapshots(now)

    def _last_copies(self, silent: Sequence[Name]) -> set[Name]:
        """All that there is of a shard, if it has stood still together.

        To give it up would lose the shard, and it may come back; who has ended is told of, and is lost.
        """
        found: set[Name] = set()
        for first, rest in zip(self.view.primaries, self.view.backups, strict=True):
            if all(name in silent and name in self._heard for name in (first, *rest)):
                found |= {first, *rest}
        return found

    def _look_at_snapshots(self, now: float) -> None:
        meeting = any(meeting.waiting for meeting in self._meetings.values() if not meeting.over)
        self.snapshots.look(self.view, meeting, now, self._out)

    def _is_silent(self, name: Name, now: float) -> bool:
        if name not in self._heard:
            return now - self._begun > self._timing.startup
        return now - self._heard[name] > self._timing.longest_silence(self._burden)

    # Views.

    def _bury(self, names: Sequence[Name]) -> None:
        """Take the dead out of the view; their backups take over."""
        died = tuple(name for name in names if name in self._members())
        if not died:
            return
        for name in died:
            self._heard.pop(name, None)
        replicas = [
            [name for name in (first, *rest) if name and name not in died]
            for first, rest in zip(self.view.primaries, self.view.backups, strict=True)
        ]
        lost = [shard for shard, left in enumerate(replicas) if not left and shard not in self.lost]
        self.view = structs.replace(
            self.view,
            primaries=tuple(left[0] if left else "" for left in replicas),
            backups=tuple(tuple(left[1:]) for left in replicas),
            novices=tuple(
                self.view.novice(shard) if left and self.view.novice(shard) not in died else ""
                for shard, left in enumerate(replicas)
            ),
        )
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
        for what in list(self._meetings):
            if what in self._meetings:
                self._conclude(what)

    def _announce_lost(self, lost: Sequence[int]) -> None:
        self.lost += tuple(lost)
        for shard in lost:
            self._out.start(Lost(shard))
            for worker in self.view.workers:
                self._out.send(worker_name(worker), Lost(shard))

    def _volunteer(self, sender: Name, shard: int, now: float) -> None:
        """Let a new process be brought up to date, if its shard lacks a copy and no other is; else it asks again."""
        if sender in self._members():
            self._heard[sender] = now
            self._out.send(sender, Viewed(self.view))
            return
        there = self.view.replicas(shard) if 0 <= shard < len(self.view.primaries) else ()
        if not there or sender in self._buried or len(there) >= self._copies[shard]:
            self._out.send(sender, Gone(self.view.epoch))
        elif not self.view.novice(shard):
            self._heard[sender] = now
            self._set_novice(shard, sender)
            self._change(self.view.workers, Changed(self.view))

    def _set_novice(self, shard: int, name: Name) -> None:
        named = tuple(
            name if number == shard else self.view.novice(number) for number in range(len(self.view.primaries))
        )
        self.view = structs.replace(self.view, novices=named)

    def _promote(self, sender: Name, message: Ready) -> None:
        """A novice holds all that its primary has answered, and will: it can take over."""
        known = 0 <= message.shard < len(self.view.primaries) and sender == self.view.primaries[message.shard]
        if not known or self.view.novice(message.shard) != message.name:
            return
        self._set_novice(message.shard, "")
        backups = list(self.view.backups)
        backups[message.shard] += (message.name,)
        self.view = structs.replace(self.view, backups=tuple(backups))
        self._change(self.view.workers, Changed(self.view, copied=(message.name,)))

    def _hello(self, sender: Name, message: Hello, now: float) -> None:
        """Let a worker in, in a new life unless it is in already; the process before it, if it lives, is out."""
        worker = message.worker
        if worker not in self.view.workers or self._processes.get(worker, 0) != message.process:
            if message.patient:
                self.waiting[worker] = message.process
                self._turn_away()
                return
            self._let_in({worker: message.process})
        self._heard[sender] = now
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
            self._heard.pop(sender, None)
            workers = [worker for worker in self.view.workers if worker != message.worker]
            self._change(workers, Changed(self.view, left=(message.worker,)))
        self._out.send(sender, Viewed(self.view))

    # Meetings.

    def _meet(self, message: Meet, row: Payload) -> None:
        if self.view.life(message.worker) != message.life:
            self._out.send(worker_name(message.worker), Gone(self.view.epoch))
            return
        meeting = self._meetings.setdefault(message.what, _Meeting())
        new = not meeting.over and message.worker not in meeting.values
        if new and message.kind and not row.nbytes:
            self._out.send(worker_name(message.worker), Bring(life=message.life, number=message.number))
            return
        if not (new or meeting.over):
            missing = tuple(worker for worker in self.view.workers if worker not in meeting.values)
            self._out.send(
                worker_name(message.worker), Awaiting(life=message.life, number=message.number, workers=missing)
            )
        meeting.waiting[message.worker] = message
        if not meeting.over:
            meeting.values[message.worker] = message.values
            meeting.colour = max(meeting.colour, message.colour)
        if new and row.nbytes:
            meeting.summed = True
            self._out.start(Add(message.what, message.kind, row))
        self._conclude(message.what)

    def _conclude(self, what: str) -> None:
        """Once all who live have come, tell those who wait; one who comes later hears what was met on."""
        meeting = self._meetings[what]
        if meeting.over:
            self._answer(what, meeting)
        elif all(worker in meeting.values for worker in self.view.workers):
            meeting.over, meeting.joining = True, tuple(sorted(self.waiting))
            self._forget_totals()
            if meeting.summed:
                self._out.start(Total(what), ("total", what))
            else:
                self._summed(what, NOTHING)

    def _forget_totals(self) -> None:
        """Who has come to a meeting has heard of all before it: their sums are not asked for again."""
        for meeting in self._meetings.values():
            meeting.total = None

    def _summed(self, what: str, total: Payload) -> None:
        meeting = self._meetings.get(what)
        if meeting is not None:
            meeting.total = total
            self._answer(what, meeting)

    def _answer(self, what: str, meeting: _Meeting) -> None:
        """Tell those who wait, if there is all to tell."""
        total = NOTHING if meeting.total is None and not meeting.summed else meeting.total
        if total is None:
            return
        ranks = tuple(sorted(meeting.values))
        values = tuple(meeting.values[rank] for rank in ranks)
        answered, meeting.waiting = meeting.waiting, {}
        for worker, asked in answered.items():
            met = Met(
                life=asked.life,
                number=asked.number,
                what=what,
                ranks=ranks,
                values=values,
                waiting=meeting.joining,
                colour=meeting.colour,
            )
            self._out.send(worker_name(worker), met, total)
        if any(asked.admits for asked in answered.values()):
            self._admit(values[0])
        over = [name for name, meeting in self._meetings.items() if meeting.over]
        for name in over[: max(0, len(over) - REMEMBERED)]:
            self._meetings.pop(name, None)
