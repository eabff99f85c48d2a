"""The recorded events of a run, read from its folder, and the histories of workers and servers that they form.

Histories are joined by what passed between processes: collectives and meetings by group and number, messages by their
channel, pushes and pulls by the numbers that servers know them by. Under a rule that waits for all workers a step is a
collective, too: entered by its push, left when its values have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.monitor.calls import SEND, call_of
from offbeat.monitor.cpu_wait import Queues, read_queues
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.cuts import Cut
from offbeat.protocols.causality.histories import Call, Computation, Event, EventKind, computation
from offbeat.runtime.events.machines import MachineRecord, machines_of
from offbeat.runtime.events.recorder import FOLDER, KINDS, OTHER, WAITING, About, Mark, Reader, Stamp, events_file
from offbeat.runtime.events.servers import GROUP as SERVERS
from offbeat.runtime.events.servers import PULL, PUSH

STEPS: Final = "steps"  # The group of the steps that servers complete.
LOCAL: Final = frozenset({Mark.STEP, Mark.CHECKPOINT, Mark.FAULT, Mark.NAN, Mark.END, Mark.LEAVE})
_USED: Final = frozenset({Mark.APPLIED, Mark.REFUSED, Mark.LATE})

Stamps = Mapping[int, Sequence[Stamp]]  # Events of each worker, by rank.
ServerStamps = Mapping[str, Sequence[Stamp]]  # Events of each server, by name.


class RecordedRun(Struct, frozen=True):
    """The events in a run's folder."""

    stamps: Stamps
    dropped: int  # Number of older events that were overwritten.
    servers: ServerStamps = {}
    queues: Queues = {}  # How long each worker had waited for a core, as far as recorded.
    machines: tuple[MachineRecord, ...] = ()  # The machines whose events came over links.


def has_events(folder: Path) -> bool:
    """Whether a run was recorded."""
    return any((folder / FOLDER).glob("worker-*.events"))


def recorded(folder: Path) -> RecordedRun:
    """Read the events of a run; a run without events is refused, with the way to record them."""
    files = sorted((folder / FOLDER).glob("worker-*.events"))
    if not files:
        raise UsageError(
            f"{folder} has no events, so nothing can be said about who waited for whom. Run it again with "
            f"`offbeat run --monitor`, which records them."
        )
    workers = {file: Reader(file, kept=True) for file in files}
    for file, reader in workers.items():
        if file != events_file(folder, reader.rank):
            raise UsageError(f"{file} is damaged: it says that its events are of {worker_name(reader.rank)}.")
    stamps = {reader.rank: reader.new() for reader in workers.values()}
    servers = {file: Reader(file, kept=True) for file in sorted((folder / FOLDER).glob("server-*.events"))}
    server_stamps = {file.stem.replace("-", " "): reader.new() for file, reader in servers.items()}
    dropped = sum(reader.dropped for reader in (*workers.values(), *servers.values()))
    from offbeat.monitor.intake.clocks import aligned  # It joins histories, as this module does.

    own, of_servers, machines = aligned(dict(sorted(stamps.items())), server_stamps, machines_of(folder))
    return RecordedRun(own, dropped, of_servers, read_queues(folder), tuple(machines))


def history_of(stamps: Stamps, servers: ServerStamps | None = None, tolerance: float = 0.0) -> Computation:
    """The run as a computation of its workers, then its servers; clocks may be that many seconds apart."""
    processes = _events(stamps, servers or {}, tolerance)
    return computation({name: [event for _, events in own for event in events] for name, own in processes.items()})


class FullHistory(NamedTuple):
    """A run in which every record is an event, even those that cannot have affected other processes."""

    run: Computation
    stamps: tuple[tuple[Stamp | None, ...], ...]  # Of each event its record; None if it shares the previous one's.
    counts: tuple[tuple[int, ...], ...]  # How many of the first 0, 1, 2 … events `history_of` has, too.

    def describe(self, cut: Cut) -> str:
        """A cut in words: the position of each process, by the numbers of `history_of`."""
        return "; ".join(
            f"{name}:{counts[number]}{f' ({_words(self.run.histories[i][number - 1])})' if number else ''}"
            for i, (name, counts, number) in enumerate(zip(self.run.processes, self.counts, cut, strict=True))
        )


def trace_of(stamps: Stamps, servers: ServerStamps | None = None) -> FullHistory:
    """The same run, event by event as recorded."""
    histories: dict[str, list[Event]] = {}
    origins: list[tuple[Stamp | None, ...]] = []
    counts: list[tuple[int, ...]] = []
    for name, own in _events(stamps, servers or {}).items():
        full = [(stamp, events or [Event(what=stamp.mark.name.lower(), time=stamp.time)]) for stamp, events in own]
        histories[name] = [event for _, events in full for event in events]
        origins.append(tuple(origin for stamp, events in full for origin in (stamp, *[None] * (len(events) - 1))))
        known = [bool(events) for (_, events), (_, all_of_it) in zip(own, full, strict=True) for _ in all_of_it]
        counts.append((0, *accumulate(map(int, known))))
    return FullHistory(computation(histories), tuple(origins), tuple(counts))


def _events(
    stamps: Stamps, servers: ServerStamps, tolerance: float = 0.0
) -> dict[str, list[tuple[Stamp, list[Event]]]]:
    """Of each process, its records and the events that each stands for: none, one, or a push and its entry."""
    sent = _sent(stamps, servers)
    workers = {worker_name(rank): list(_WorkerEvents(rank, sent, tolerance).all(own)) for rank, own in stamps.items()}
    return workers | {name: [(stamp, list(_of_server(stamp, sent))) for stamp in own] for name, own in servers.items()}


def _words(event: Event) -> str:
    kind = str(event.kind) if event.kind is not EventKind.LOCAL else ""
    return " ".join(filter(None, [kind, str(event.call or event.what)]))


def _sent(stamps: Stamps, servers: ServerStamps) -> dict[Hashable, Stamp]:
    """Every message and the record of its first send: a repeated message is the same one."""
    sent: dict[Hashable, Stamp] = {}
    for rank, own in stamps.items():
        for stamp in own:
            if stamp.about is not None and (key := _sending(rank, stamp, stamp.about)) is not None:
                sent.setdefault(key, stamp)
    for own in servers.values():
        for stamp in own:
            if stamp.mark is Mark.ANSWERED and stamp.about is not None:
                sent.setdefault((PULL, stamp.about.shard, stamp.about.peer, stamp.sequence), stamp)
    return sent


def _sending(rank: int, stamp: Stamp, about: About) -> Hashable:
    """The message that a worker sends here, if any."""
    if stamp.mark is Mark.START and about.group == SERVERS:
        return (PUSH, rank, stamp.sequence) if about.operation == PUSH else None
    sends = stamp.mark is Mark.SENT or (stamp.mark is Mark.START and about.operation == SEND)
    return (about.group, rank, about.peer, about.tag, stamp.sequence) if sends else None


def _of_server(stamp: Stamp, sent: Mapping[Hashable, Stamp]) -> Iterator[Event]:
    about = stamp.about
    if about is None:
        return
    if stamp.mark in _USED:
        key = (PUSH, about.peer, stamp.sequence)
        if key in sent:
            what = f"{about.operation}{f': {about.words}' if about.words else ''}"
            yield Event(EventKind.RECEIVE, what, stamp.time, message=key)
    elif stamp.mark is Mark.ANSWERED:
        key = (PULL, about.shard, about.peer, stamp.sequence)
        if sent.get(key) is stamp:
            yield Event(EventKind.SEND, about.operation, stamp.time, message=key)
    elif stamp.mark is Mark.VIEW:
        yield Event(EventKind.LOCAL, f"view {stamp.sequence}", stamp.time)


class _WorkerEvents:
    """Makes the events of one worker, and accounts for its time between them."""

    def __init__(self, rank: int, sent: Mapping[Hashable, Stamp], tolerance: float = 0.0) -> None:
        self._rank, self._sent, self._tolerance = rank, sent, tolerance
        self._kind = KINDS[0]
        self._spent = defaultdict[str, float](float)
        self._received = defaultdict[Hashable, int](int)
        self._members: tuple[str, ...] = ()
        self._open: set[int] = set()

    def all(self, stamps: Sequence[Stamp]) -> Iterator[tuple[Stamp, list[Event]]]:
        since = stamps[0].time if stamps else 0.0
        self._members = _in_lockstep(stamps)
        for stamp in stamps:
            self._spent[self._kind] += stamp.time - since
            since = stamp.time
            yield stamp, list(self._of(stamp))

    def _of(self, stamp: Stamp) -> Iterator[Event]:
        if stamp.mark is Mark.TURN:
            self._kind = KINDS[stamp.sequence] if stamp.sequence < len(KINDS) else KINDS[OTHER]
        elif stamp.mark in LOCAL:
            yield Event(EventKind.LOCAL, stamp.mark.name.lower(), stamp.time, self._time_spent())
        elif stamp.about is not None:
            yield from self._about(stamp, stamp.about)

    def _time_spent(self) -> Mapping[str, float]:
        """Time by kind since the previous event."""
        spent, self._spent = self._spent, defaultdict[str, float](float)
        return dict(spent)

    def _about(self, stamp: Stamp, about: About) -> Iterator[Event]:
        if stamp.mark in (Mark.SENT, Mark.RECEIVED):
            yield from self._message(stamp, about, stamp.mark is Mark.SENT)
        elif about.group == SERVERS:
            yield from self._at_servers(stamp, about)
        elif stamp.mark in (Mark.WAIT, Mark.FAIL, Mark.READ, Mark.COMPUTED):
            return
        elif about.peer is None:
            call = call_of(about, stamp.sequence)
            yield self._left(call, stamp) if stamp.mark is Mark.EXIT else self._entered(call, stamp)
        elif stamp.mark is (Mark.START if about.operation == SEND else Mark.EXIT):
            yield from self._message(stamp, about, about.operation == SEND)

    def _entered(self, call: Call, stamp: Stamp) -> Event:
        return Event(EventKind.ENTER, call.operation, stamp.time, self._time_spent(), call=call)

    def _left(self, call: Call, stamp: Stamp) -> Event:
        self._time_spent()
        return Event(EventKind.EXIT, call.operation, stamp.time, call=call)

    def _message(self, stamp: Stamp, about: About, sends: bool) -> Iterator[Event]:
        if sends:
            key = (about.group, self._rank, about.peer, about.tag, stamp.sequence)
            if self._sent.get(key) is stamp:
                yield Event(EventKind.SEND, about.words or "", stamp.time, self._time_spent(), message=key)
            return
        peer = stamp.value - 1 if about.peer is not None and about.peer < 0 else about.peer
        channel = (about.group, peer, self._rank, about.tag)
        self._received[channel] += 1
        number = stamp.sequence if stamp.mark is Mark.RECEIVED else self._received[channel]
        # The n-th message sent is the n-th received; if earlier events were overwritten, its own number is as good.
        key = (*channel, number)
        if key in self._sent and self._sent[key].time <= stamp.time + self._tolerance:
            spent = self._time_spent()
            # A stage of a pipeline knows how much of it was a wait; of anything else it is not known.
            spent = spent if KINDS[WAITING] in spent else {}
            yield Event(EventKind.RECEIVE, about.words or "", stamp.time, spent, message=key)

    def _at_servers(self, stamp: Stamp, about: About) -> Iterator[Event]:
        if stamp.mark is Mark.READ:
            key = (PULL, about.shard, self._rank, stamp.sequence)
            if key in self._sent:
                self._time_spent()
                yield Event(EventKind.RECEIVE, "read", stamp.time, message=key)
        elif stamp.mark is Mark.START and about.operation == PUSH:
            key = (PUSH, self._rank, stamp.sequence)
            yield Event(EventKind.SEND, PUSH, stamp.time, self._time_spent(), message=key)
            if self._members and stamp.value:
                self._open.add(stamp.step + 1)
                yield self._entered(Call(STEPS, stamp.step + 1, self._members, "step"), stamp)
        elif stamp.mark is Mark.EXIT and about.operation == PULL and stamp.step in self._open:
            self._open.discard(stamp.step)
            yield self._left(Call(STEPS, stamp.step, self._members, "step"), stamp)


def _in_lockstep(stamps: Sequence[Stamp]) -> tuple[str, ...]:
    """All workers, if servers let none start a step before all have finished the previous one."""
    pulls = (stamp.about for stamp in stamps if stamp.about is not None and stamp.about.operation == PULL)
    about = next(pulls, None)
    if about is None or about.bound != 0 or about.spare or not isinstance(about.members, int):
        return ()
    return tuple(map(worker_name, range(about.members)))
