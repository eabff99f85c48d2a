"""Who was late, why, and what a run would take without it: times along the order of cause and effect.

A collective makes everybody equally slow, so durations name nobody. Arrivals do: whoever enters last has held the
others up. How late it was is exact arithmetic, not a guess: entries come at the time of leaving the collective before,
plus what was spent since, so

    lateness = entry of the last - mean entry of the others
             = sum over kinds of (what the last spent on it - what the others spent, on average)

where having left the collective before later than the others is of the kind `network`.

**What if.** Each event comes a while after the latest of what it had to wait for: the event before it in its process,
and its causes. Times are recomputed with these whiles, some of them shortened. What others waited shrinks by itself,
and whoever is last then is waited for instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.errors import UsageError
from offbeat.protocols.causality.histories import Computation, Event, Kind, Place
from offbeat.protocols.machine import Name

FloatArray = NDArray[np.float64]

NETWORK: Final = "network"
WAIT: Final = "wait"
"""For somebody else's message that had not been sent yet."""
START: Final = "start"
"""Having begun later than the others, with no collective before."""
OTHER: Final = "other"
"""What no event says anything about."""


class Arrival(Struct, frozen=True):
    """Who was last in a collective, and what it cost the others."""

    group: str
    sequence: int
    last: Name
    entry: Place
    """Its event."""
    since: int
    """The number of its event where the comparison begins: where it left a collective before; 0: at its beginning."""
    lateness: float
    """Seconds after the others, on average."""
    by_kind: Mapping[str, float]
    """What these seconds are made of; they add up to it. Less than 0: it was faster in this."""
    lost: float
    """Seconds that all the others together waited for it."""

    @property
    def kind(self) -> str:
        """What made it late, mostly."""
        return max(self.by_kind, key=self.by_kind.__getitem__)

    def __str__(self) -> str:
        """In words: `worker 1 was last in #7 of group world, 0.2 s late, mostly input; the others lost 0.6 s`."""
        return (
            f"{self.last} was last in #{self.sequence} of group {self.group}, {self.lateness:.3g} s late, mostly "
            f"{self.kind}; the others lost {self.lost:.3g} s"
        )


class Piece(NamedTuple):
    """One stretch of a critical path: from what was waited for to what came of it."""

    cause: Place
    effect: Place
    by_kind: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return sum(self.by_kind.values())


class Forecast(Struct, frozen=True):
    """What a run took, and what it would have taken without a process's lateness."""

    process: Name
    seconds: float
    without: float
    removed: Mapping[str, float]
    """Lateness that was taken out, by kind."""


def arrivals(computation: Computation) -> list[Arrival]:
    """The last to arrive in each collective that at least two have entered, in an order that the run may have had."""
    entries = defaultdict[tuple[str, int], list[Place]](list)
    for place in computation.order:
        event = computation.event(place)
        if event.kind is Kind.ENTER and event.call is not None:
            entries[event.call.group, event.call.sequence].append(place)
    return [_arrival(computation, *key, places) for key, places in entries.items() if len(places) > 1]


def critical_path(computation: Computation, until: Place | None = None) -> list[Piece]:
    """What the time until an event was spent on, first things first: whatever is shortened here shortens the whole.

    Goes back from the event, by default the last of all, always to what it had to wait for longest.
    """
    if not computation.order:
        return []
    place = until or max(computation.order, key=lambda place: (computation.event(place).time, place))
    path: list[Piece] = []
    while before := _waited_for(computation, place):
        cause = max(before, key=lambda place: (computation.event(place).time, place))
        path.append(Piece(cause, place, _kinds(computation, cause, place)))
        place = cause
    return path[::-1]


def replayed(computation: Computation, saved: Mapping[Place, float]) -> tuple[FloatArray, ...]:
    """For each process the times of its events, if so many seconds had been saved just before some of them."""
    times = [np.zeros(length) for length in computation.lengths]
    for place in computation.order:
        event = computation.event(place)
        before = _waited_for(computation, place)
        took = event.time - max((computation.event(cause).time for cause in before), default=0.0)
        starts = max((float(times[i][k - 1]) for i, k in before), default=0.0)
        times[place.process][place.number - 1] = starts + took - saved.get(place, 0.0)
    return tuple(times)


def without_lateness(computation: Computation, process: Name, late: Sequence[Arrival] | None = None) -> Forecast:
    """What the run would have taken if a process had never been later than the others are on average."""
    index = computation.index(process)
    saved: dict[Place, float] = {}
    removed = defaultdict[str, float](float)
    for arrival in arrivals(computation) if late is None else late:
        window = [Place(index, number) for number in range(max(arrival.since, 1), arrival.entry.number + 1)]
        excess = arrival.lateness - sum(saved.get(place, 0.0) for place in window)
        if arrival.last == process and excess > 0:
            _save(computation, window, excess, saved)
            positive = {kind: seconds for kind, seconds in arrival.by_kind.items() if seconds > 0}
            for kind, seconds in positive.items():
                removed[kind] += excess * seconds / sum(positive.values())
    return Forecast(process, _duration(_times(computation)), _duration(replayed(computation, saved)), dict(removed))


def _arrival(computation: Computation, group: str, sequence: int, places: Sequence[Place]) -> Arrival:
    last = max(places, key=lambda place: (computation.event(place).time, place))
    others = [place for place in places if place != last]
    time = computation.event(last).time
    since = _last_exit(computation, last)
    began = NETWORK if all(_last_exit(computation, place) for place in places) else START
    spent, *usual = (_spent(computation, place, began) for place in (last, *others))
    kinds = dict.fromkeys(kind for one in (spent, *usual) for kind in one)
    return Arrival(
        group,
        sequence,
        computation.processes[last.process],
        last,
        since,
        time - fmean(computation.event(place).time for place in others),
        {kind: spent.get(kind, 0.0) - fmean(one.get(kind, 0.0) for one in usual) for kind in kinds},
        sum(time - computation.event(place).time for place in others),
    )


def _last_exit(computation: Computation, entry: Place) -> int:
    """The number of the last exit before this event in its process, or 0."""
    history = computation.histories[entry.process][: entry.number - 1]
    return next((k for k in range(len(history), 0, -1) if history[k - 1].kind is Kind.EXIT), 0)


def _spent(computation: Computation, entry: Place, began: str) -> Mapping[str, float]:
    """What the time of an entry is made of: when the collective before was left, and what was done since, by kind."""
    since = max(_last_exit(computation, entry), 1)
    total = defaultdict[str, float](float, {began: computation.event(Place(entry.process, since)).time})
    for number in range(since + 1, entry.number + 1):
        for kind, seconds in _kinds(
            computation, Place(entry.process, number - 1), Place(entry.process, number)
        ).items():
            total[kind] += seconds
    return total


def _kinds(computation: Computation, cause: Place, effect: Place) -> Mapping[str, float]:
    """What the time between two events was spent on."""
    event = computation.event(effect)
    seconds = event.time - computation.event(cause).time
    if cause.process != effect.process:
        return {NETWORK: seconds}
    waited = _waited(computation, effect, event, computation.event(cause).time)
    rest = seconds - waited - sum(event.spent.values())
    kinds = {**event.spent, **({WAIT: waited} if waited else {})}
    left = NETWORK if event.kind in (Kind.EXIT, Kind.RECEIVE) else OTHER
    return {**kinds, left: kinds.get(left, 0.0) + rest}


def _waited(computation: Computation, place: Place, event: Event, since: float) -> float:
    """How long somebody else had not yet sent what this event needed; nothing if the event itself says what it did."""
    if event.spent:
        return 0.0
    sent = max((computation.event(cause).time for cause in computation.causes.get(place, ())), default=since)
    return max(0.0, min(sent, event.time) - since)


def _waited_for(computation: Computation, place: Place) -> tuple[Place, ...]:
    before = (Place(place.process, place.number - 1),) if place.number > 1 else ()
    return (*before, *computation.causes.get(place, ()))


def _save(computation: Computation, window: Iterable[Place], excess: float, saved: dict[Place, float]) -> None:
    """Take so many seconds off some events, the longest first, none below 0."""
    durations: dict[Place, float] = {}
    for place in window:
        before = [computation.event(cause).time for cause in _waited_for(computation, place)]
        durations[place] = computation.event(place).time - max(before) - saved.get(place, 0.0) if before else 0.0
    for place in sorted(durations, key=lambda place: -durations[place]):
        taken = min(max(durations[place], 0.0), excess)
        saved[place] = saved.get(place, 0.0) + taken
        excess -= taken


def _times(computation: Computation) -> tuple[FloatArray, ...]:
    return tuple(np.array([event.time for event in history]) for history in computation.histories)


def _duration(times: Sequence[FloatArray]) -> float:
    """From the first event of all to the last."""
    some = [one for one in times if one.size]
    if not some:
        raise UsageError("without events there is no time to forecast: give the histories of a run.")
    return float(max(one.max() for one in some) - min(one.min() for one in some))
