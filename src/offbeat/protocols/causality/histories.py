"""Histories and computations: what each process did, in order, what caused what, and their logical clocks.

Edges from causes to effects are kept as *joins*, from each of some causes to each of some effects: an all-reduce of p
members has p * (p - 1) edges, and is one join. docs/causality.md defines the order of events, and both clocks.

Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System" (1978); Mattern, "Virtual Time and Global
States of Distributed Systems" (1989).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.errors import UsageError, did_you_mean
from offbeat.protocols.machine import Name

IntArray = NDArray[np.int64]
Vector = tuple[int, ...]  # For each process, how many of its events are known.


def lamport(own: int, *received: int) -> int:
    """The Lamport clock of a process's next event, given those of the messages received in it."""
    return max(own, *received) + 1 if received else own + 1


def tick(own: Vector, process: int, *received: Vector) -> Vector:
    """The vector clock of a process's next event, given those of the messages received in it."""
    known = [max(entries) for entries in zip(own, *received, strict=True)]
    known[process] += 1
    return tuple(known)


class EventKind(StrEnum):
    """The kind of an event."""

    LOCAL = "local"
    SEND = "send"
    AWAIT = "await"  # From here on the process waits for a message.
    RECEIVE = "receive"
    ENTER = "enter"  # From here on the process waits in a collective.
    EXIT = "exit"


class Call(Struct, frozen=True, gc=False):
    """One collective, as one of its members calls it."""

    group: str  # Which group it is on; within one, calls are counted.
    sequence: int  # Which call on this group it is, counted by each member for itself.
    members: tuple[Name, ...]
    operation: str = "barrier"
    shape: tuple[int, ...] | None = None  # Of this member's input; None where members may differ.
    dtype: str | None = None
    reduce: str | None = None  # How values are combined: `sum`, `max` …
    root: Name | None = None  # The member that sends or gets everything, if any.
    caller: str | None = None  # Where in the program: `train.py:88`.

    def needs(self, member: Name) -> frozenset[Name]:
        """Which other members must have entered before this one can leave."""
        if self.root is None:
            return frozenset(self.members) - {member}
        if self.operation in ("broadcast", "scatter"):
            return frozenset({self.root} - {member})
        return frozenset(self.members) - {member} if member == self.root else frozenset()

    def __str__(self) -> str:
        """The call as a person says it: `all_reduce #57 (sum of float32 x 4 x 8) of group world, called at a.py:8`."""
        sizes = " x ".join(f"{size:,}" for size in self.shape or ())
        value = " x ".join(part for part in (self.dtype, sizes) if part)
        details = " of ".join(part for part in (self.reduce, value) if part)
        details += f"{', ' if details else ''}root {self.root}" if self.root else ""
        where = f", called at {self.caller}" if self.caller else ""
        return f"{self.operation} #{self.sequence}{f' ({details})' if details else ''} of group {self.group}{where}"


class Event(Struct, frozen=True, gc=False):
    """Something that a process did."""

    kind: EventKind = EventKind.LOCAL
    what: str = ""  # In words.
    time: float = 0.0  # In seconds, on a roughly shared clock. No order is concluded from it.
    spent: Mapping[str, float] = {}  # Seconds since the event before it, by kind; the rest is `other`.
    message: Hashable = None  # Which message was sent or received: the same on both sides, and unique.
    peer: Name | None = None  # The receiver of a message.
    tag: Hashable = None  # A message's tag; of a wait: only messages with this tag end it, None: any.
    sources: frozenset[Name] = frozenset()  # Senders that a wait is for; any one of them ends it.
    call: Call | None = None  # The collective that was entered or left.
    labels: Mapping[str, str] = {}  # Other details.


class EventPosition(NamedTuple):
    """The position of an event: which process, and which of its events, from 1."""

    process: int
    number: int


class Edge(NamedTuple):
    """A cause in one process and its effect in another."""

    cause: EventPosition
    effect: EventPosition


class Join(NamedTuple):
    """Causes and effects: each effect needed every cause."""

    causes: tuple[EventPosition, ...]
    effects: tuple[EventPosition, ...]


Step = Callable[[EventPosition, NDArray[Any]], object]
"""Makes an event's row of numbers, in place, from the maximum over what came before it."""


@dataclass(frozen=True)
class Computation:
    """Histories of some processes, and the causes of their events elsewhere."""

    processes: tuple[Name, ...]
    histories: tuple[tuple[Event, ...], ...]
    joins: tuple[Join, ...]

    def __post_init__(self) -> None:
        """Refuse joins outside the histories."""
        for end in (end for join in self.joins for ends in join for end in ends):
            if not 0 <= end.process < len(self.processes) or not 0 < end.number <= len(self.histories[end.process]):
                raise UsageError(f"there is no event {end}: give edges between events of the histories only.")

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.processes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of events of each process: the cut that holds everything."""
        return tuple(map(len, self.histories))

    def index(self, process: Name) -> int:
        """The index of a process."""
        if process not in self.processes:
            raise UsageError(f"no process {process!r} in this computation.{did_you_mean(process, self.processes)}")
        return self.processes.index(process)

    def event(self, place: EventPosition) -> Event:
        """The event at a position."""
        return self.histories[place.process][place.number - 1]

    def tell(self, place: EventPosition) -> str:
        """An event in words: `worker 1's event 3 (receive: gradients)`."""
        event = self.event(place)
        what = event.what or (str(event.call) if event.call else "")
        return f"{self.processes[place.process]}'s event {place.number} ({event.kind}{f': {what}' if what else ''})"

    @property
    def edges(self) -> Iterator[Edge]:
        """From each cause to each effect in another process. There may be very many: prefer the joins."""
        for join in self.joins:
            for cause, effect in product(*join):
                if cause.process != effect.process:
                    yield Edge(cause, effect)

    @cached_property
    def joins_to(self) -> Mapping[EventPosition, Sequence[Join]]:
        """The joins that each event is an effect in; events without any are omitted."""
        joins = defaultdict[EventPosition, list[Join]](list)
        for join in self.joins:
            for effect in join.effects:
                joins[effect].append(join)
        return dict(joins)

    def causes(self, place: EventPosition) -> list[EventPosition]:
        """The direct causes of an event in other processes."""
        causes = (cause for join in self.joins_to.get(place, ()) for cause in join.causes)
        return [cause for cause in causes if cause.process != place.process]

    @cached_property
    def order(self) -> tuple[EventPosition, ...]:
        """All events, causes before effects; refused if some event would have caused itself."""
        graph = TopologicalSorter[EventPosition | int]()
        for process, length in enumerate(self.lengths):
            for number in range(1, length + 1):
                before = [EventPosition(process, number - 1)] if number > 1 else []
                graph.add(EventPosition(process, number), *before)
        for number, join in enumerate(self.joins):
            graph.add(number, *join.causes)
            for effect in join.effects:
                graph.add(effect, number)
        try:
            return tuple(node for node in graph.static_order() if not isinstance(node, int))
        except CycleError as error:
            first = min(node for node in error.args[1] if not isinstance(node, int))
            raise UsageError(
                f"{self.tell(first)} would have to happen before itself, by way of its causes: no run of processes is "
                f"like that. Check which messages and collectives are taken to be the same."
            ) from None

    def fold(self, width: int, step: Step, kind: type = np.int64) -> list[NDArray[Any]]:
        """Of each process a row for each event, after one of zeros: the maximum over what came before, then `step`."""
        rows = [np.zeros((length + 1, width), kind) for length in self.lengths]
        joined: dict[int, NDArray[Any]] = {}
        for place in self.order:
            row = rows[place.process][place.number]
            row[:] = rows[place.process][place.number - 1]
            for join in self.joins_to.get(place, ()):
                if id(join) not in joined:
                    joined[id(join)] = np.max([rows[cause.process][cause.number] for cause in join.causes], axis=0)
                np.maximum(row, joined[id(join)], out=row)
            step(place, row)
        return rows

    @cached_property
    def clocks(self) -> tuple[IntArray, ...]:
        """For each process its vector clocks: row k is that of event k; row 0, of no event, is all zero."""
        return tuple(self.fold(self.size, lambda place, row: row.put(place.process, place.number)))

    @cached_property
    def lamports(self) -> tuple[IntArray, ...]:
        """For each process its Lamport clocks: entry k is that of event k; entry 0 is 0."""
        return tuple(rows[:, 0] for rows in self.fold(1, lambda _, row: np.add(row, 1, out=row)))

    def vector(self, place: EventPosition) -> tuple[int, ...]:
        """The vector clock of an event."""
        return tuple(self.clocks[place.process][place.number].tolist())

    def happened_before(self, one: EventPosition, other: EventPosition) -> bool:
        """Whether one event can have caused the other: by vector clocks, in constant time."""
        return one != other and bool(self.clocks[other.process][other.number, one.process] >= one.number)


def computation(histories: Mapping[Name, Sequence[Event]], edges: Iterable[Edge | Join] = ()) -> Computation:
    """Join histories by what their events say: messages by name, collectives by group and sequence.

    A receipt without its sending is refused, as the order is then unknown; a message still in flight is not. In a
    collective that not all members have entered, the exits that are there need only the entries that are there.
    """
    processes = tuple(histories)
    extra = (edge if isinstance(edge, Join) else Join((edge.cause,), (edge.effect,)) for edge in edges)
    joins = (*extra, *_messages(processes, histories), *_collectives(processes, histories))
    return Computation(processes, tuple(map(tuple, histories.values())), joins)


def _places(histories: Mapping[Name, Sequence[Event]], kind: EventKind) -> Iterator[tuple[EventPosition, Event]]:
    for process, history in enumerate(histories.values()):
        for number, event in enumerate(history, 1):
            if event.kind is kind:
                yield EventPosition(process, number), event


def _messages(processes: Sequence[Name], histories: Mapping[Name, Sequence[Event]]) -> Iterator[Join]:
    sent: dict[Hashable, EventPosition] = {}
    for place, event in _places(histories, EventKind.SEND):
        if event.message is not None and sent.setdefault(event.message, place) != place:
            raise UsageError(
                f"message {event.message!r} is sent twice, by {processes[sent[event.message].process]} and by "
                f"{processes[place.process]}: which of them is received cannot be told. Number messages."
            )
    for place, event in _places(histories, EventKind.RECEIVE):
        if event.message not in sent:
            raise UsageError(
                f"event {place.number} of {processes[place.process]} receives message {event.message!r}, which nobody "
                f"sent: the order is not known without it. Give the sender's history, too, or omit this event."
            )
        yield Join((sent[event.message],), (place,))


def _collectives(processes: Sequence[Name], histories: Mapping[Name, Sequence[Event]]) -> Iterator[Join]:
    entries = defaultdict[tuple[str, int], dict[Name, EventPosition]](dict)
    exits = defaultdict[tuple[str, int, frozenset[Name]], list[EventPosition]](list)
    for place, event in _places(histories, EventKind.ENTER):
        if event.call is not None:
            entries[event.call.group, event.call.sequence][processes[place.process]] = place
    for place, event in _places(histories, EventKind.EXIT):
        if event.call is not None:
            member = processes[place.process]
            # Where all need all others, its own entry is before it anyway: so all exits need the same.
            needed = event.call.needs(member) if event.call.root else frozenset(event.call.members)
            exits[event.call.group, event.call.sequence, needed].append(place)
    for (group, sequence, needed), places in exits.items():
        entered = entries.get((group, sequence), {})
        causes = tuple(sorted(entered[member] for member in needed & entered.keys()))
        if causes:
            yield Join(causes, tuple(places))


def json_lines(computation: Computation) -> Iterator[str]:
    """Each event as a line of JSON, causes before effects: what it was, its clocks and its direct causes."""
    for place in computation.order:
        known = msgspec.to_builtins(computation.event(place), enc_hook=str)
        entries = {
            "process": computation.processes[place.process],
            "number": place.number,
            **{key: value for key, value in known.items() if value not in (None, "", [], {})},
            "lamport": int(computation.lamports[place.process][place.number]),
            "vector": computation.vector(place),
            "causes": [[computation.processes[i], number] for i, number in computation.causes(place)],
        }
        yield msgspec.json.encode(entries).decode()
