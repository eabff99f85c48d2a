"""The events of a run as the protocols know them: histories of workers and servers, joined by what passed between them.

Collectives and meetings are joined by group and number, messages by their channel, pushes and pulls by the numbers that
servers know them by. Under a rule that waits for everybody a step is a collective, too: entered by its push, left when
its values have come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from offbeat.monitor.calls import SEND, call_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.cuts import Cut
from offbeat.protocols.causality.histories import Call, Computation, Event, EventKind, computation
from offbeat.runtime.events.recorder import KINDS, OTHER, About, Mark, Stamp
from offbeat.runtime.events.servers import GROUP as SERVERS
from offbeat.runtime.events.servers import PULL, PUSH

STEPS: Final = "steps"
"""The group of the steps that servers complete."""
LOCAL: Final = frozenset({Mark.STEP, Mark.CHECKPOINT, Mark.FAULT, Mark.NAN, Mark.END, Mark.LEAVE})
_USED: Final = frozenset({Mark.APPLIED, Mark.REFUSED, Mark.LATE})


def history_of(
    stamps: Mapping[int, Sequence[Stamp]], servers: Mapping[str, Sequence[Stamp]] | None = None
) -> Computation:
    """The run as a computation, of its workers and then its servers."""
    made = _events(stamps, servers or {})
    return computation({name: [event for _, events in some for event in events] for name, some in made.items()})


class FullHistory(NamedTuple):
    """A run in which everything that was written down is an event, also what others cannot have been affected by."""

    run: Computation
    stamps: tuple[tuple[Stamp | None, ...], ...]
    """What was written down for each event of each process; None: the event before tells it."""
    counts: tuple[tuple[int, ...], ...]
    """How many of the first 0, 1, 2 … events of each process `history_of` has, too."""

    def told(self, cut: Cut) -> str:
        """A cut in words: where each process is, by the numbers of `history_of`."""
        return "; ".join(
            f"{name}:{counts[number]}{f' ({_words(self.run.histories[i][number - 1])})' if number else ''}"
            for i, (name, counts, number) in enumerate(zip(self.run.processes, self.counts, cut, strict=True))
        )


def trace_of(
    stamps: Mapping[int, Sequence[Stamp]], servers: Mapping[str, Sequence[Stamp]] | None = None
) -> FullHistory:
    """The same run, event by event as it was written down."""
    histories: dict[str, list[Event]] = {}
    origins: list[tuple[Stamp | None, ...]] = []
    counts: list[tuple[int, ...]] = []
    for name, some in _events(stamps, servers or {}).items():
        full = [(stamp, events or [Event(what=stamp.mark.name.lower(), time=stamp.time)]) for stamp, events in some]
        histories[name] = [event for _, events in full for event in events]
        origins.append(tuple(one for stamp, events in full for one in (stamp, *[None] * (len(events) - 1))))
        known = [bool(events) for (_, events), (_, all_of_it) in zip(some, full, strict=True) for _ in all_of_it]
        counts.append((0, *accumulate(map(int, known))))
    return FullHistory(computation(histories), tuple(origins), tuple(counts))


def _events(
    stamps: Mapping[int, Sequence[Stamp]], servers: Mapping[str, Sequence[Stamp]]
) -> dict[str, list[tuple[Stamp, list[Event]]]]:
    """Of each process, what was written down and the events that it stands for: none, one, or a push and its entry."""
    sent = _sent(stamps, servers)
    made = {worker_name(rank): list(_Worker(rank, sent).events(some)) for rank, some in stamps.items()}
    return made | {name: [(stamp, list(_of_server(stamp, sent))) for stamp in some] for name, some in servers.items()}


def _words(event: Event) -> str:
    return " ".join(
        filter(None, [str(event.kind) if event.kind is not EventKind.LOCAL else "", str(event.call or event.what)])
    )


def _sent(stamps: Mapping[int, Sequence[Stamp]], servers: Mapping[str, Sequence[Stamp]]) -> dict[Hashable, Stamp]:
    """Every message that was sent, and its first sending: one that is repeated stays the same."""
    sent: dict[Hashable, Stamp] = {}
    for rank, some in stamps.items():
        for stamp in some:
            if stamp.about is not None and (key := _sending(rank, stamp, stamp.about)) is not None:
                sent.setdefault(key, stamp)
    for some in servers.values():
        for stamp in some:
            if stamp.mark is Mark.ANSWERED and stamp.about is not None:
                sent.setdefault(_answer(stamp, stamp.about, stamp.about.peer), stamp)
    return sent


def _sending(rank: int, stamp: Stamp, about: About) -> Hashable:
    """The message that a worker sends by this, if any."""
    if stamp.mark is Mark.SENT:
        return (about.group, rank, about.peer, about.tag, stamp.sequence)
    if stamp.mark is not Mark.START:
        return None
    if about.group == SERVERS:
        return (PUSH, rank, stamp.sequence) if about.operation == PUSH else None
    return (about.group, rank, about.peer, about.tag, stamp.sequence) if about.operation == SEND else None


def _answer(stamp: Stamp, about: About, worker: int | None) -> Hashable:
    return (PULL, about.shard, worker, stamp.sequence)


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
        key = _answer(stamp, about, about.peer)
        if sent.get(key) is stamp:
            yield Event(EventKind.SEND, about.operation, stamp.time, message=key)
    elif stamp.mark is Mark.VIEW:
        yield Event(EventKind.LOCAL, f"view {stamp.sequence}", stamp.time)


class _Worker:
    """Makes the events of one worker, and books between them what its time was spent on."""

    def __init__(self, rank: int, sent: Mapping[Hashable, Stamp]) -> None:
        self._rank, self._sent = rank, sent
        self._kind, self._since = KINDS[0], 0.0
        self._spent = defaultdict[str, float](float)
        self._received = defaultdict[Hashable, int](int)
        self._members: tuple[str, ...] = ()
        self._open: set[int] = set()

    def events(self, stamps: Sequence[Stamp]) -> Iterator[tuple[Stamp, list[Event]]]:
        """All of them, in order, each with what it was made of."""
        self._since = stamps[0].time if stamps else 0.0
        self._members = _in_lockstep(stamps)
        for stamp in stamps:
            self._book(stamp.time)
            yield stamp, list(self._of(stamp))

    def _of(self, stamp: Stamp) -> Iterator[Event]:
        if stamp.mark is Mark.TURN:
            self._kind = KINDS[stamp.sequence] if stamp.sequence < len(KINDS) else KINDS[OTHER]
        elif stamp.mark in LOCAL:
            yield Event(EventKind.LOCAL, stamp.mark.name.lower(), stamp.time, self._taken())
        elif stamp.about is not None:
            yield from self._about(stamp, stamp.about)

    def _book(self, now: float) -> None:
        self._spent[self._kind] += now - self._since
        self._since = now

    def _taken(self) -> Mapping[str, float]:
        """What time was spent on since the event before."""
        spent, self._spent = self._spent, defaultdict[str, float](float)
        return dict(spent)

    def _about(self, stamp: Stamp, about: About) -> Iterator[Event]:
        if stamp.mark in (Mark.SENT, Mark.RECEIVED):
            yield from self._message(stamp, about, stamp.mark is Mark.SENT)
        elif about.group == SERVERS:
            yield from self._at_servers(stamp, about)
        elif stamp.mark in (Mark.WAIT, Mark.FAIL, Mark.READ):
            return
        elif about.peer is None:
            call = call_of(about, stamp.sequence)
            yield self._left(call, stamp) if stamp.mark is Mark.EXIT else self._entered(call, stamp)
        elif about.operation == SEND and stamp.mark is Mark.START:
            yield from self._message(stamp, about, True)
        elif about.operation != SEND and stamp.mark is Mark.EXIT:
            yield from self._message(stamp, about, False)

    def _entered(self, call: Call, stamp: Stamp) -> Event:
        return Event(EventKind.ENTER, call.operation, stamp.time, self._taken(), call=call)

    def _left(self, call: Call, stamp: Stamp) -> Event:
        self._taken()
        return Event(EventKind.EXIT, call.operation, stamp.time, call=call)

    def _message(self, stamp: Stamp, about: About, sends: bool) -> Iterator[Event]:
        if sends:
            key = (about.group, self._rank, about.peer, about.tag, stamp.sequence)
            if self._sent.get(key) is stamp:
                yield Event(EventKind.SEND, time=stamp.time, spent=self._taken(), message=key)
            return
        peer = stamp.value - 1 if about.peer is not None and about.peer < 0 else about.peer
        channel = (about.group, peer, self._rank, about.tag)
        self._received[channel] += 1
        number = stamp.sequence if stamp.mark is Mark.RECEIVED else self._received[channel]
        # The n-th that was sent is the n-th to come; if earlier events were written over, its own number is as good.
        key = (*channel, number)
        if key in self._sent and self._sent[key].time <= stamp.time:
            self._taken()
            yield Event(EventKind.RECEIVE, time=stamp.time, message=key)

    def _at_servers(self, stamp: Stamp, about: About) -> Iterator[Event]:
        if stamp.mark is Mark.READ:
            key = (PULL, about.shard, self._rank, stamp.sequence)
            if key in self._sent:
                self._taken()
                yield Event(EventKind.RECEIVE, "read", stamp.time, message=key)
        elif stamp.mark is Mark.START and about.operation == PUSH:
            key = (PUSH, self._rank, stamp.sequence)
            yield Event(EventKind.SEND, PUSH, stamp.time, self._taken(), message=key)
            if self._members and stamp.value:
                self._open.add(stamp.step + 1)
                yield self._entered(Call(STEPS, stamp.step + 1, self._members, "step"), stamp)
        elif stamp.mark is Mark.EXIT and about.operation == PULL and stamp.step in self._open:
            self._open.discard(stamp.step)
            yield self._left(Call(STEPS, stamp.step, self._members, "step"), stamp)


def _in_lockstep(stamps: Sequence[Stamp]) -> tuple[str, ...]:
    """All workers, if servers let nobody start a step before everybody has finished the one before."""
    pulls = (one.about for one in stamps if one.about is not None and one.about.operation == PULL)
    about = next(pulls, None)
    if about is None or about.bound != 0 or about.spare or not isinstance(about.members, int):
        return ()
    return tuple(map(worker_name, range(about.members)))
