"""Who held the others up, how much they lost by it, and what a step would take without it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, structs

from offbeat.monitor.judging import SEND, call_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.critical import arrivals, without_lateness
from offbeat.protocols.causality.histories import Computation, Event, Kind, computation
from offbeat.runtime.stamps import Mark, Stamp

LATEST: Final = 8192
"""How many of each worker's events are looked at: the last ones."""
OFTEN: Final = 0.75
"""A straggler is last in at least this share of all collectives …"""
MUCH: Final = 0.2
"""… and costs at least this share of the time …"""
ENOUGH: Final = 10
"""… in at least as many collectives."""


class Blame(Struct, frozen=True):
    """What a worker has cost the others."""

    worker: str
    last: int
    """How many collectives it was the last to enter."""
    collectives: int
    """Of how many."""
    lost: float
    """Seconds that the others together have waited for it."""
    seconds: float
    """How long a step took; of a run without steps, the whole."""
    without: float
    """And would have taken, had this worker never been later than the others are on average."""

    @property
    def straggler(self) -> bool:
        """Whether the run would be notably faster without its lateness."""
        often = self.collectives >= ENOUGH and self.last >= OFTEN * self.collectives
        return often and self.without <= (1 - MUCH) * self.seconds

    def __str__(self) -> str:
        """In words."""
        return (
            f"{self.worker} was last in {self.last:,} of {self.collectives:,} collectives; the others lost "
            f"{self.lost:.3g} s to it. Without that a step would take {self.without:.3g} s instead of "
            f"{self.seconds:.3g} s."
        )

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {**structs.asdict(self), "straggler": self.straggler}


def blame(stamps: Mapping[int, Sequence[Stamp]]) -> list[Blame]:
    """What each worker has cost the others, the most costly first; nothing if they have met nowhere."""
    recent = {rank: _stepping(some[-LATEST:]) for rank, some in stamps.items()}
    history = history_of(recent)
    late = arrivals(history)
    if not late:
        return []
    steps = max(1, max(sum(stamp.mark is Mark.STEP for stamp in some) for some in recent.values()))
    found: list[Blame] = []
    for name in history.processes:
        own = [arrival for arrival in late if arrival.last == name]
        forecast = without_lateness(history, name, late)
        lost = sum(arrival.lost for arrival in own)
        found.append(Blame(name, len(own), len(late), lost, forecast.seconds / steps, forecast.without / steps))
    return sorted(found, key=lambda one: -one.lost)


def _stepping(stamps: Sequence[Stamp]) -> Sequence[Stamp]:
    """From the first step on: that one worker was ready before another is nobody's fault."""
    first = next((number for number, stamp in enumerate(stamps) if stamp.mark is Mark.STEP), 0)
    return stamps[first:]


def history_of(stamps: Mapping[int, Sequence[Stamp]]) -> Computation:
    """The events as the protocols know them: collectives joined by group and number, messages by their channel."""
    sent = {
        _message(rank, stamp)
        for rank, some in stamps.items()
        for stamp in some
        if stamp.mark is Mark.START and stamp.about is not None and stamp.about.operation == SEND
    }
    return computation({worker_name(rank): list(_events(rank, some, sent)) for rank, some in stamps.items()})


def _events(rank: int, stamps: Sequence[Stamp], sent: set[Hashable]) -> Iterator[Event]:
    for stamp in stamps:
        about = stamp.about
        if stamp.mark in (Mark.WAIT, Mark.FAIL):
            continue
        if about is None:
            yield Event(Kind.LOCAL, stamp.mark.name.lower(), stamp.time)
        elif about.peer is None:
            kind = Kind.EXIT if stamp.mark is Mark.EXIT else Kind.ENTER
            yield Event(kind, about.operation, stamp.time, call=call_of(about, stamp.sequence))
        elif about.operation == SEND and stamp.mark is Mark.START:
            yield Event(Kind.SEND, time=stamp.time, message=_message(rank, stamp))
        elif about.operation != SEND and stamp.mark is Mark.EXIT and (message := _message(rank, stamp)) in sent:
            yield Event(Kind.RECEIVE, time=stamp.time, message=message)


def _message(rank: int, stamp: Stamp) -> Hashable:
    """The same for the sending of a message and its receipt."""
    about = stamp.about
    if about is None or about.peer is None:
        return None
    ways = (rank, about.peer) if about.operation == SEND else (about.peer, rank)
    return (about.group, *ways, about.tag, stamp.sequence)
