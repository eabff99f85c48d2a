"""Membership: hears heartbeats, declares silent processes dead, lets backups take over, and holds meetings.

There is one coordinator, in the process that started all others; if it ends, the run does. So views need no vote: it
alone makes and numbers them. A view is sent to everyone when it changes, and again to any process whose heartbeat
shows an older epoch. The coordinator also holds meetings of all live workers and takes `snapshots`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from offbeat.protocols.machine import NOTHING, Done, Effect, Effects, Ended, Event, Name, Payload, Received, Timer
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.messages import COORDINATOR, ClusterView, Timeouts, Viewed, worker_name
from offbeat.protocols.servers.snapshots import Snapshots

TICK = "tick"
REMEMBERED = 256  # Meetings whose outcome is kept, for workers that have not heard it.


class Changed(Struct, frozen=True):
    """There is a new view; work of the coordinator, so that the run knows."""

    view: ClusterView
    died: tuple[Name, ...] = ()
    joined: tuple[int, ...] = ()
    copied: tuple[Name, ...] = ()  # Servers that now hold a copy of their shard, in place of dead ones.
    left: tuple[int, ...] = ()


class Liveness:
    """When each process was last heard from, and which have been silent for too long."""

    def __init__(self, timing: Timeouts) -> None:
        self.heartbeat = timing.heartbeat  # Seconds between two checks.
        self._timing = timing
        self._heard: dict[Name, float] = {}
        self._burden = 0
        self._begun = self._looked = 0.0

    def begin(self, now: float) -> None:
        """Start listening."""
        self._begun = self._looked = now

    def hear(self, name: Name, now: float, burden: int = 0) -> None:
        """A process is alive, and may have payloads of up to `burden` bytes to handle."""
        self._heard[name] = now
        self._burden = max(self._burden, burden)

    def forget(self, name: Name) -> None:
        """A process is no longer a member."""
        self._heard.pop(name, None)

    def knows(self, name: Name) -> bool:
        """Whether a process was ever heard from."""
        return name in self._heard

    def silent(self, names: Iterable[Name], now: float) -> list[Name]:
        """The silent ones of these. Time for which the coordinator itself was stopped counts against nobody."""
        asleep = max(0.0, now - self._looked - 2 * self.heartbeat)
        self._looked = now
        self._begun += asleep
        self._heard = {name: heard + asleep for name, heard in self._heard.items()}
        longest = self._timing.longest_silence(self._burden)
        return [
            name
            for name in names
            if (now - self._heard[name] > longest if name in self._heard else now - self._begun > self._timing.startup)
        ]


class Add(Struct, frozen=True):
    """Work: add this row to the sum of a meeting; it must be read now."""

    what: str
    kind: str
    row: Payload


class Total(Struct, frozen=True):
    """Work: the final sum of a meeting, as a payload."""

    what: str


class _Meeting(Struct):
    values: dict[int, tuple[float, ...]] = {}
    waiting: dict[int, msg.MeetingArrival] = {}  # Arrivals to answer.
    over: bool = False
    summed: bool = False  # Whether any worker has brought a row.
    total: Payload | None = None  # Of the rows, if any; None before it is known, and again when all have it.
    colour: int = 0  # The newest colour of those that have come.
    joining: tuple[int, ...] = ()  # Workers that waited to join when all had come.


class Meetings:
    """The meetings of a run, by what they are for: every worker hears the same outcome, whoever dies meanwhile.

    Rows of numbers are added as they come (`Add`), so that only one sum is kept.
    """

    def __init__(self) -> None:
        self._meetings: dict[str, _Meeting] = {}

    @property
    def open(self) -> bool:
        """Whether any worker waits at a meeting for others."""
        return any(meeting.waiting for meeting in self._meetings.values() if not meeting.over)

    def come(self, message: msg.MeetingArrival, row: Payload, workers: Sequence[int], out: Effects) -> None:
        """A worker has come, perhaps not for the first time; all `workers` are expected."""
        meeting = self._meetings.setdefault(message.what, _Meeting())
        sender, header = worker_name(message.worker), {"life": message.life, "number": message.number}
        new = not meeting.over and message.worker not in meeting.values
        if new and message.kind and not row.nbytes:
            out.send(sender, msg.Bring(**header))
            return
        if not (new or meeting.over):
            missing = tuple(worker for worker in workers if worker not in meeting.values)
            out.send(sender, msg.Awaiting(**header, workers=missing))
        meeting.waiting[message.worker] = message
        if not meeting.over:
            meeting.values[message.worker] = message.values
            meeting.colour = max(meeting.colour, message.colour)
        if new and row.nbytes:
            meeting.summed = True
            out.start(Add(message.what, message.kind, row))

    def conclude(self, workers: Sequence[int], joining: Iterable[int], out: Effects) -> None:
        """End the meetings to which all these workers have come; later arrivals hear the outcome."""
        for what, meeting in self._meetings.items():
            if not meeting.over and all(worker in meeting.values for worker in workers):
                meeting.over, meeting.joining = True, tuple(sorted(joining))
                for other in self._meetings.values():
                    other.total = None  # A worker that comes to a meeting has heard of all before it.
                if meeting.summed:
                    out.start(Total(what), ("total", what))
                else:
                    meeting.total = NOTHING

    def summed(self, what: str, total: Payload) -> None:
        """The sum of the rows that were brought to a meeting."""
        if (meeting := self._meetings.get(what)) is not None:
            meeting.total = total

    def answer(self, out: Effects) -> tuple[float, ...] | None:
        """Answer the waiting workers of concluded meetings; returns the values for newly admitted workers, if any."""
        admitted: tuple[float, ...] | None = None
        for what, meeting in self._meetings.items():
            total = NOTHING if meeting.total is None and not meeting.summed else meeting.total
            if not meeting.over or not meeting.waiting or total is None:
                continue
            ranks = tuple(sorted(meeting.values))
            values = tuple(meeting.values[rank] for rank in ranks)
            waiting, meeting.waiting = meeting.waiting, {}
            for worker, arrival in waiting.items():
                header = {"life": arrival.life, "number": arrival.number, "colour": meeting.colour}
                met = msg.Met(**header, what=what, ranks=ranks, values=values, waiting=meeting.joining)
                out.send(worker_name(worker), met, total)
                admitted = values[0] if arrival.admits else admitted
        over = [what for what, meeting in self._meetings.items() if meeting.over]
        for what in over[: max(0, len(over) - REMEMBERED)]:
            del self._meetings[what]
        return admitted


class CoordinatorMachine:
    """Makes the views."""

    def __init__(self, view: ClusterView, *, timing: Timeouts | None = None) -> None:
        self.name = COORDINATOR
        self.view = view
        self.lost: tuple[int, ...] = ()  # Shards with no replica left.
        self.waiting: dict[int, int] = {}  # Workers that wait to join, and their processes.
        self.snapshots = Snapshots()  # Snapshots of the run as it goes on.
        self.meetings = Meetings()
        self._liveness = Liveness(timing or Timeouts())
        self._told: dict[int, tuple[float, ...]] = {}
        self._copies = [1 + len(backups) for backups in view.backups]
        self._buried: set[Name] = set()
        self._lives = view.members
        self._processes: dict[int, int] = {}
        self._out = Effects()

    def begin(self, now: float) -> Sequence[Effect]:
        """Start listening."""
        self._out = Effects()
        self._liveness.begin(now)
        self._out.timer(self._liveness.heartbeat, TICK)
        return self._out.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle a message, a timer, or the news that a process has ended."""
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
            case msg.Heartbeat():
                self._alive(sender, message, now)
            case msg.JoinRequest() if sender == worker_name(message.worker):
                self._hello(sender, message, now)
            case msg.Leave() if sender == worker_name(message.worker):
                self._leave(sender, message)
            case msg.Volunteer():
                self._volunteer(sender, message.shard, now)
            case msg.BackupReady():
                self._promote(sender, message)
            case msg.MeetingArrival() if sender == worker_name(message.worker):
                self._meet(message, event.payload)
            case msg.Want():
                self.snapshots.want()
                self.snapshots.look(self.view, self.meetings.open, now, self._out)
            case msg.SnapshotWritten() if sender == worker_name(message.worker):
                self._out.send(sender, msg.Acknowledged(life=message.life, number=message.number))
                self.snapshots.recorded(message, self.view, self._out)
            case msg.ShardRecorded():
                self._out.send(sender, msg.Acknowledged(number=message.colour))
                self.snapshots.recorded_shard(sender, message, self.view, self._out)
            case _:
                pass

    # Heartbeats.

    def _alive(self, sender: Name, message: msg.Heartbeat, now: float) -> None:
        if sender not in self.view.names:
            self._out.send(sender, msg.Gone(self.view.epoch))
            return
        self._liveness.hear(sender, now, message.burden)
        if message.epoch < self.view.epoch:
            self._out.send(sender, Viewed(self.view))

    def _tick(self, now: float) -> None:
        """Declare silent processes dead."""
        self._out.timer(self._liveness.heartbeat, TICK)
        silent = self._liveness.silent(self.view.names, now)
        if all(worker_name(worker) in silent for worker in self.view.workers):
            # Nothing could go on without them; they may have been stopped together, and come back.
            silent = [name for name in silent if name in self.view.servers]
        self._bury([name for name in silent if name not in self._last_copies(silent)])
        self.snapshots.look(self.view, self.meetings.open, now, self._out)

    def _last_copies(self, silent: Sequence[Name]) -> set[Name]:
        """All copies of a shard, if they fell silent together.

        Declaring them dead would lose the shard, and they may come back; ended processes are reported separately.
        """
        copies = [(first, *rest) for first, rest in zip(self.view.primaries, self.view.backups, strict=True)]
        still = [names for names in copies if all(name in silent and self._liveness.knows(name) for name in names)]
        return {name for names in still for name in names}

    # Views.

    def _bury(self, names: Sequence[Name]) -> None:
        """Remove dead processes from the view; their backups take over."""
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
        self.lost += tuple(lost)
        for shard in lost:
            self._out.start(msg.Lost(shard))
            for worker in self.view.workers:
                self._out.send(worker_name(worker), msg.Lost(shard))

    def _change(self, workers: Sequence[int], news: Changed) -> None:
        """Make the next view, send it to everyone (servers first, so that they are ready), and conclude meetings."""
        lives = tuple(self._lives[worker] for worker in workers)
        self.view = structs.replace(self.view, epoch=self.view.epoch + 1, workers=tuple(workers), lives=lives)
        for name in (*self.view.servers, *map(worker_name, workers)):
            self._out.send(name, Viewed(self.view))
        self._out.start(Changed(self.view, news.died, news.joined, news.copied, news.left))
        self._turn_away()
        self._hold_meetings()

    def _volunteer(self, sender: Name, shard: int, now: float) -> None:
        """Make a new process the novice, if its shard lacks a copy and has no novice; else it asks again."""
        if sender in self.view.names:
            self._liveness.hear(sender, now)
            self._out.send(sender, Viewed(self.view))
            return
        there = self.view.replicas(shard) if 0 <= shard < len(self.view.primaries) else ()
        if not there or sender in self._buried or len(there) >= self._copies[shard]:
            self._out.send(sender, msg.Gone(self.view.epoch))
        elif not self.view.novice(shard):
            self._liveness.hear(sender, now)
            self.view = self.view.with_novice(shard, sender)
            self._change(self.view.workers, Changed(self.view))

    def _promote(self, sender: Name, message: msg.BackupReady) -> None:
        """A novice holds everything that its primary has answered, and will: it can take over."""
        known = 0 <= message.shard < len(self.view.primaries) and sender == self.view.primaries[message.shard]
        if not known or self.view.novice(message.shard) != message.name:
            return
        backups = list(self.view.backups)
        backups[message.shard] += (message.name,)
        self.view = structs.replace(self.view.with_novice(message.shard, ""), backups=tuple(backups))
        self._change(self.view.workers, Changed(self.view, copied=(message.name,)))

    def _hello(self, sender: Name, message: msg.JoinRequest, now: float) -> None:
        """Admit a worker, in a new life unless it is a member; a previous process under its number is out."""
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
        """No worker is left to admit others: dismiss those that wait."""
        if not self.view.workers:
            for worker in self.waiting:
                self._out.send(worker_name(worker), msg.Gone(self.view.epoch))
            self.waiting.clear()

    def _admit(self, values: tuple[float, ...]) -> None:
        """Admit all waiting workers. One that does not hear of it asks again."""
        processes, self.waiting = self.waiting, {}
        if processes:
            self._told |= dict.fromkeys(processes, values)
            self._let_in(processes)
            for worker, process in processes.items():
                self._out.send(worker_name(worker), Viewed(self.view, process, values))

    def _leave(self, sender: Name, message: msg.Leave) -> None:
        if self.view.life(message.worker) == message.life:
            self._liveness.forget(sender)
            workers = [worker for worker in self.view.workers if worker != message.worker]
            self._change(workers, Changed(self.view, left=(message.worker,)))
        self._out.send(sender, Viewed(self.view))

    # Meetings.

    def _meet(self, message: msg.MeetingArrival, row: Payload) -> None:
        if self.view.life(message.worker) != message.life:
            self._out.send(worker_name(message.worker), msg.Gone(self.view.epoch))
            return
        self.meetings.come(message, row, self.view.workers, self._out)
        self._hold_meetings()

    def _hold_meetings(self) -> None:
        """Conclude the meetings to which all live workers have come, answer them, and admit new workers."""
        self.meetings.conclude(self.view.workers, self.waiting, self._out)
        values = self.meetings.answer(self._out)
        if values is not None:
            self._admit(values)
