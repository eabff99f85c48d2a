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
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.errors import UsageError
from offbeat.protocols.causality.histories import Computation, Event, EventKind, EventPosition
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
    entry: EventPosition
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


class Forecast(Struct, frozen=True):
    """What a run took, and what it would have taken without a process's lateness."""

    process: Name
    seconds: float
    without: float
    removed: Mapping[str, float]
    """Lateness that was taken out, by kind."""


def arrivals(computation: Computation) -> list[Arrival]:
    """The last to arrive in each collective that at least two have entered, in an order that the run may have had."""
    entries = defaultdict[tuple[str, int], list[EventPosition]](list)
    for place in computation.order:
        event = computation.event(place)
        if event.kind is EventKind.ENTER and event.call is not None:
            entries[event.call.group, event.call.sequence].append(place)
    exits = [_last_exits(history) for history in computation.histories]
    causes = _Causes(computation)
    return [_arrival(computation, causes, exits, *key, places) for key, places in entries.items() if len(places) > 1]


class _Causes:
    """What each event waited for: the one before it in its process, and the latest of the causes in each join."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        self._latest: dict[int, EventPosition] = {}

    def of(self, place: EventPosition) -> list[EventPosition]:
        """What an event waited for."""
        before = [EventPosition(place.process, place.number - 1)] if place.number > 1 else []
        return before + self.elsewhere(place)

    def elsewhere(self, place: EventPosition) -> list[EventPosition]:
        """What it waited for in other processes."""
        found: list[EventPosition] = []
        for join in self._computation.joins_to.get(place, ()):
            if id(join) not in self._latest:
                self._latest[id(join)] = max(
                    join.causes, key=lambda cause: (self._computation.event(cause).time, cause)
                )
            if self._latest[id(join)].process != place.process:
                found.append(self._latest[id(join)])
        return found


def _replayed(
    computation: Computation, took: Mapping[EventPosition, float], saved: Sequence[Mapping[EventPosition, float]]
) -> list[FloatArray]:
    """Times of events if so many seconds had been saved just before some of them, for several sets of savings at once.

    For each process a row for each event, a column for each set.
    """
    less = defaultdict[EventPosition, list[tuple[int, float]]](list)
    for column, some in enumerate(saved):
        for place, seconds in some.items():
            less[place].append((column, seconds))
    times = [np.zeros((length, len(saved))) for length in computation.lengths]
    joined: dict[int, FloatArray] = {}
    nothing = np.zeros(len(saved))
    for place in computation.order:
        rows, number = times[place.process], place.number
        start = rows[number - 2] if number > 1 else None
        for join in computation.joins_to.get(place, ()):
            if id(join) not in joined:
                joined[id(join)] = np.max([times[i][k - 1] for i, k in join.causes], axis=0)
            start = joined[id(join)] if start is None else np.maximum(start, joined[id(join)])
        np.add(nothing if start is None else start, took[place], out=rows[number - 1])
        for column, seconds in less.get(place, ()):
            rows[number - 1, column] -= seconds
    return times


def forecasts(
    computation: Computation, processes: Sequence[Name], late: Sequence[Arrival] | None = None
) -> list[Forecast]:
    """What the run would have taken if each of these, by itself, had never been later than the others on average."""
    causes = _Causes(computation)
    took = _durations(computation, causes)
    known = arrivals(computation) if late is None else late
    savings = [_savings(computation, took, name, known) for name in processes]
    seconds = _duration(_times(computation))
    without = _duration(_replayed(computation, took, [saved for saved, _ in savings]))
    return [
        Forecast(name, float(seconds), float(least), removed)
        for name, (_, removed), least in zip(processes, savings, without, strict=True)
    ]


def _savings(
    computation: Computation, took: Mapping[EventPosition, float], process: Name, late: Sequence[Arrival]
) -> tuple[dict[EventPosition, float], dict[str, float]]:
    """What a process would have to save before which event to be never late, and on what."""
    index = computation.index(process)
    saved: dict[EventPosition, float] = {}
    removed = defaultdict[str, float](float)
    for arrival in late:
        if arrival.last != process:
            continue
        window = [EventPosition(index, number) for number in range(max(arrival.since, 1), arrival.entry.number + 1)]
        excess = arrival.lateness - sum(saved.get(place, 0.0) for place in window)
        if excess > 0:
            _save(computation, took, window, excess, saved)
            positive = {kind: seconds for kind, seconds in arrival.by_kind.items() if seconds > 0}
            for kind, seconds in positive.items():
                removed[kind] += excess * seconds / sum(positive.values())
    return saved, dict(removed)


def _arrival(
    computation: Computation,
    causes: _Causes,
    exits: Sequence[Sequence[int]],
    group: str,
    sequence: int,
    places: Sequence[EventPosition],
) -> Arrival:
    last = max(places, key=lambda place: (computation.event(place).time, place))
    others = [place for place in places if place != last]
    time = computation.event(last).time
    since = {place: exits[place.process][place.number] for place in places}
    began = NETWORK if all(since.values()) else START
    spent, *usual = (_spent(computation, causes, place, since[place], began) for place in (last, *others))
    kinds = dict.fromkeys(kind for one in (spent, *usual) for kind in one)
    return Arrival(
        group,
        sequence,
        computation.processes[last.process],
        last,
        since[last],
        time - fmean(computation.event(place).time for place in others),
        {kind: spent.get(kind, 0.0) - fmean(one.get(kind, 0.0) for one in usual) for kind in kinds},
        sum(time - computation.event(place).time for place in others),
    )


def _last_exits(history: Sequence[Event]) -> list[int]:
    """For each event, the number of the last exit up to it, or 0; entry 0 is for before all of them."""
    exits = [0]
    for number, event in enumerate(history, 1):
        exits.append(number if event.kind is EventKind.EXIT else exits[-1])
    return exits


def _spent(
    computation: Computation, causes: _Causes, entry: EventPosition, since: int, began: str
) -> Mapping[str, float]:
    """What the time of an entry is made of: when the collective before was left, and what was done since, by kind."""
    since = max(since, 1)
    total = defaultdict[str, float](float, {began: computation.event(EventPosition(entry.process, since)).time})
    for number in range(since + 1, entry.number + 1):
        before, place = EventPosition(entry.process, number - 1), EventPosition(entry.process, number)
        for kind, seconds in _kinds(computation, causes, before, place).items():
            total[kind] += seconds
    return total


def _kinds(
    computation: Computation, causes: _Causes, cause: EventPosition, effect: EventPosition
) -> Mapping[str, float]:
    """What the time between two events was spent on."""
    event = computation.event(effect)
    seconds = event.time - computation.event(cause).time
    if cause.process != effect.process:
        return {NETWORK: seconds}
    sent = [computation.event(other).time for other in causes.elsewhere(effect)]
    waited = 0.0 if event.spent or not sent else max(0.0, min(max(sent), event.time) - computation.event(cause).time)
    rest = seconds - waited - sum(event.spent.values())
    kinds = {**event.spent, **({WAIT: waited} if waited else {})}
    left = NETWORK if event.kind in (EventKind.EXIT, EventKind.RECEIVE) else OTHER
    return {**kinds, left: kinds.get(left, 0.0) + rest}


def _durations(computation: Computation, causes: _Causes) -> dict[EventPosition, float]:
    """How long after the last of what it waited for each event came."""
    found: dict[EventPosition, float] = {}
    for place in computation.order:
        latest = max((computation.event(cause).time for cause in causes.of(place)), default=0.0)
        found[place] = computation.event(place).time - latest
    return found


def _save(
    computation: Computation,
    took: Mapping[EventPosition, float],
    window: Iterable[EventPosition],
    excess: float,
    saved: dict[EventPosition, float],
) -> None:
    """Take so many seconds off some events, the longest first, none below 0; nothing off one that waited for none."""
    durations = {
        place: took[place] - saved.get(place, 0.0) if place.number > 1 or place in computation.joins_to else 0.0
        for place in window
    }
    for place in sorted(durations, key=lambda place: -durations[place]):
        taken = min(max(durations[place], 0.0), excess)
        saved[place] = saved.get(place, 0.0) + taken
        excess -= taken


def _times(computation: Computation) -> tuple[FloatArray, ...]:
    return tuple(np.array([event.time for event in history]) for history in computation.histories)


def _duration(times: Sequence[FloatArray]) -> FloatArray:
    """From the first event of all to the last; of each column, where times have several."""
    some = [one for one in times if one.size]
    if not some:
        raise UsageError("without events there is no time to forecast: give the histories of a run.")
    return np.max([one.max(axis=0) for one in some], axis=0) - np.min([one.min(axis=0) for one in some], axis=0)
