"""Where processes were held up: each one's time in collectives, and the stretches in which it did nothing but wait."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.monitor.judging import SEND, call_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.histories import Call, Computation, Kind, Place
from offbeat.runtime.stamps import About, Mark, Stamp

Times = Sequence[NDArray[np.float64]]
"""For each process the times of its events."""
Key = tuple[str, int]
"""A collective: its group, and which call on that it is."""


class Stretch(NamedTuple):
    """A while in which a process did nothing but wait for something."""

    start: float
    stop: float
    """Infinite if it never ended."""
    ready: float
    """Since when everybody who was needed was there; infinite if that never was."""
    what: Call | str
    """What it was in."""


class Meeting(Struct):
    """A collective, and when each of its members was in it."""

    call: Call
    """As the first member called it."""
    entries: dict[int, float] = {}
    """When each process entered, by its number."""
    exits: dict[int, float] = {}
    lost: set[int] = set()
    """Processes that must have entered, since they have entered later ones, but whose entry was written over."""

    last: tuple[float, float] | None = None
    """When the last and the one before it entered, once all have; those that are lost are not counted."""

    def ready(self, call: Call, process: int, names: Sequence[str]) -> float:
        """When the last had entered of those that a process needs before it can leave."""
        if call.root is None and self.last is not None:
            return self.last[self.entries.get(process) == self.last[0]]
        entered = {names[one]: time for one, time in self.entries.items()}
        entered |= {names[one]: -math.inf for one in self.lost}
        return max((entered.get(name, math.inf) for name in call.needs(names[process])), default=-math.inf)


def meetings(run: Computation, times: Times) -> dict[Key, Meeting]:
    """The collectives of a run."""
    found: dict[Key, Meeting] = {}
    latest: dict[tuple[str, int], int] = {}
    for process, history in enumerate(run.histories):
        for event, time in zip(history, times[process].tolist(), strict=True):
            if event.call is None or event.kind not in (Kind.ENTER, Kind.EXIT):
                continue
            key = event.call.group, event.call.sequence
            if key not in found:
                found[key] = Meeting(event.call)
            met = found[key].entries if event.kind is Kind.ENTER else found[key].exits
            met[process] = time
            latest[key[0], process] = max(key[1], latest.get((key[0], process), 0))
    numbers = {name: number for number, name in enumerate(run.processes)}
    for (group, sequence), meeting in found.items():
        members = {numbers[name] for name in meeting.call.members if name in numbers}
        absent = members - meeting.entries.keys()
        later = {one for one in absent if latest.get((group, one), 0) > sequence}
        meeting.lost = later | (absent & meeting.exits.keys())
        if not absent - meeting.lost:
            entered = sorted([-math.inf, -math.inf, *meeting.entries.values()])
            meeting.last = entered[-1], entered[-2]
    return found


def held(run: Computation, times: Times, met: Mapping[Key, Meeting]) -> list[list[Stretch]]:
    """For each process when it was held up, by its events alone: in collectives, and until a message came."""
    return [_apart(_held(run, times, met, process)) for process in range(run.size)]


def _held(run: Computation, times: Times, met: Mapping[Key, Meeting], process: int) -> Iterator[Stretch]:
    since: dict[Key, float] = {}
    awaiting: tuple[float, str] | None = None
    for number, event in enumerate(run.histories[process], 1):
        time = float(times[process][number - 1])
        key = (event.call.group, event.call.sequence) if event.call else ("", 0)
        if event.kind is Kind.ENTER:
            since[key] = time
        elif event.kind is Kind.EXIT and event.call is not None and key in since:
            ready = met[key].ready(event.call, process, run.processes)
            yield Stretch(since.pop(key), time, ready, event.call)
        elif event.kind is Kind.AWAIT:
            awaiting = time, event.what or "a receipt"
        elif event.kind is Kind.RECEIVE and awaiting is not None:
            sent = [float(times[i][k - 1]) for i, k in run.causes(Place(process, number))]
            yield Stretch(awaiting[0], time, max(sent, default=-math.inf), awaiting[1])
            awaiting = None
    for key, start in since.items():
        yield Stretch(start, math.inf, met[key].ready(met[key].call, process, run.processes), met[key].call)
    if awaiting is not None:
        yield Stretch(awaiting[0], math.inf, math.inf, awaiting[1])


def held_in(
    stamps: Mapping[int, Sequence[Stamp]], run: Computation, origin: float, met: Mapping[Key, Meeting]
) -> list[list[Stretch] | None]:
    """For each worker when it was held up, by what it wrote down: not while an operation went on beside its work.

    None for other processes.
    """
    begun = _begun(stamps, origin)
    found: list[list[Stretch] | None] = [None] * run.size
    for rank, some in stamps.items():
        process = run.index(worker_name(rank))
        waits = _Waits(rank, process, run.processes, met, begun)
        found[process] = _apart(waits.read(some, origin))
    return found


_Way = tuple[str, int, int, int, int, bool]
"""A message: its group, from whom, to whom, its tag and number; and whether this is its sending."""


def _way(rank: int, about: About, sequence: int, answered: bool = False) -> _Way:
    peer = -1 if about.peer is None else about.peer
    sends = about.operation == SEND
    ways = (rank, peer) if sends else (peer, rank)
    return about.group, *ways, about.tag, sequence, sends != answered


def _begun(stamps: Mapping[int, Sequence[Stamp]], origin: float) -> dict[_Way, float]:
    """When each side of each message was begun."""
    found: dict[_Way, float] = {}
    for rank, some in stamps.items():
        for stamp in some:
            if stamp.about is not None and stamp.about.peer is not None and stamp.mark in (Mark.ENTER, Mark.START):
                found.setdefault(_way(rank, stamp.about, stamp.sequence), stamp.time - origin)
    return found


class _Waits:
    """Finds the waits of one worker."""

    def __init__(
        self, rank: int, process: int, names: Sequence[str], met: Mapping[Key, Meeting], begun: Mapping[_Way, float]
    ) -> None:
        self._rank = rank
        self._process = process
        self._names = names
        self._met = met
        self._begun = begun

    def read(self, stamps: Sequence[Stamp], origin: float) -> Iterator[Stretch]:
        """Each wait, from where nothing else was done until it ended or failed."""
        since: dict[tuple[About, int], float] = {}
        for stamp in stamps:
            if stamp.about is None:
                continue
            key, time = (stamp.about, stamp.sequence), stamp.time - origin
            if stamp.mark in (Mark.ENTER, Mark.WAIT):
                since.setdefault(key, time)
            elif stamp.mark in (Mark.EXIT, Mark.FAIL) and key in since:
                yield self._stretch(since.pop(key), time, *key)
        for key, start in since.items():
            yield self._stretch(start, math.inf, *key)

    def _stretch(self, start: float, stop: float, about: About, sequence: int) -> Stretch:
        if about.peer is None:
            call = call_of(about, sequence)
            meeting = self._met.get((about.group, sequence))
            ready = math.inf if meeting is None else meeting.ready(call, self._process, self._names)
            return Stretch(start, stop, ready, call)
        who = worker_name(about.peer) if about.peer >= 0 else "anybody"
        ready = stop if about.peer < 0 else self._begun.get(_way(self._rank, about, sequence, True), math.inf)
        return Stretch(start, stop, ready, f"{about.operation} {who} #{sequence} of group {about.group}")


def _apart(stretches: Iterator[Stretch]) -> list[Stretch]:
    """In order, and without overlaps: what began first holds."""
    found: list[Stretch] = []
    for one in sorted(stretches, key=lambda one: (one.start, one.stop)):
        start = max(one.start, found[-1].stop) if found else one.start
        if start < one.stop:
            found.append(one._replace(start=start))
    return found
