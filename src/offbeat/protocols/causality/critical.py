"""Which process was late, why, and what a run would take without it: times along the order of cause and effect.

A collective makes all members equally slow, so durations blame nobody. Arrivals do: the last to enter has held the
others up. How late it was is exact arithmetic, not a guess: each entry comes at the time of leaving the previous
collective, plus the time spent since. So its lateness is the sum over kinds of what it spent more on each than the
others did on average, where having left the previous collective later is of the kind `network`.

To see what a run would take, times are recomputed with some delays shortened: each event comes some time after the
latest event that it had to wait for. If another process is last then, that one is waited for instead.
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
WAIT: Final = "wait"  # For another process's message that had not been sent yet.
START: Final = "start"  # Having begun later than the others, with no collective before.
OTHER: Final = "other"  # Time that no event accounts for.


class Arrival(Struct, frozen=True):
    """The last process to arrive in a collective, and what it cost the others."""

    group: str
    sequence: int
    last: Name
    entry: EventPosition  # Its event.
    since: int  # The number of its event where the comparison begins: its last exit; 0: its start.
    lateness: float  # Seconds after the others, on average.
    by_kind: Mapping[str, float]  # The kinds of time that add up to these seconds. Below 0: it was faster in this.
    lost: float  # Seconds that all the others together waited for it.

    @property
    def kind(self) -> str:
        """The main cause of the lateness."""
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
    removed: Mapping[str, float]  # Lateness that was removed, by kind.


def arrivals(computation: Computation) -> list[Arrival]:
    """The last to arrive in each collective that at least two have entered, in an order that the run may have had."""
    entries = defaultdict[tuple[str, int], list[EventPosition]](list)
    for place in computation.order:
        event = computation.event(place)
        if event.kind is EventKind.ENTER and event.call is not None:
            entries[event.call.group, event.call.sequence].append(place)
    timing = _Timing(computation)
    return [timing.arrival(*key, places) for key, places in entries.items() if len(places) > 1]


def forecasts(
    computation: Computation, processes: Sequence[Name], late: Sequence[Arrival] | None = None
) -> list[Forecast]:
    """What the run would have taken if each of these, by itself, had never been later than the others on average."""
    durations = _durations(computation)
    known = arrivals(computation) if late is None else late
    savings = [_savings(computation, durations, name, known) for name in processes]
    seconds = _extent([np.array([event.time for event in history]) for history in computation.histories])
    without = _extent(_replayed(computation, durations, [saved for saved, _ in savings]))
    return [
        Forecast(name, float(seconds), float(least), removed)
        for name, (_, removed), least in zip(processes, savings, without, strict=True)
    ]


class _Timing:
    """What time was spent on between events."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        self._exits = [_last_exits(history) for history in computation.histories]

    def _time(self, place: EventPosition) -> float:
        return self._computation.event(place).time

    def arrival(self, group: str, sequence: int, places: Sequence[EventPosition]) -> Arrival:
        last = max(places, key=lambda place: (self._time(place), place))
        others = [place for place in places if place != last]
        time = self._time(last)
        since = {place: self._exits[place.process][place.number] for place in places}
        began = NETWORK if all(since.values()) else START
        spent, *usual = (self._spent(place, since[place], began) for place in (last, *others))
        kinds = dict.fromkeys(kind for times in (spent, *usual) for kind in times)
        return Arrival(
            group,
            sequence,
            self._computation.processes[last.process],
            last,
            since[last],
            time - fmean(map(self._time, others)),
            {kind: spent.get(kind, 0.0) - fmean(times.get(kind, 0.0) for times in usual) for kind in kinds},
            sum(time - self._time(place) for place in others),
        )

    def _spent(self, entry: EventPosition, since: int, began: str) -> Mapping[str, float]:
        """The parts of an entry's time: when the previous collective was left, and the time spent since, by kind."""
        since = max(since, 1)
        total = defaultdict[str, float](float, {began: self._time(EventPosition(entry.process, since))})
        for number in range(since + 1, entry.number + 1):
            for kind, seconds in self._kinds(EventPosition(entry.process, number)).items():
                total[kind] += seconds
        return total

    def _kinds(self, effect: EventPosition) -> Mapping[str, float]:
        """What the time since the previous event of the process was spent on."""
        event, before = self._computation.event(effect), self._time(EventPosition(effect.process, effect.number - 1))
        sent = max(map(self._time, self._computation.causes(effect)), default=before)
        waited = 0.0 if event.spent else max(0.0, min(sent, event.time) - before)
        rest = event.time - before - waited - sum(event.spent.values())
        kinds = {**event.spent, **({WAIT: waited} if waited else {})}
        left = NETWORK if event.kind is EventKind.RECEIVE else OTHER
        return {**kinds, left: kinds.get(left, 0.0) + rest}


def _durations(computation: Computation) -> dict[EventPosition, float]:
    """How long after the last of what it waited for each event came."""
    durations: dict[EventPosition, float] = {}

    def since(place: EventPosition, row: FloatArray) -> None:
        time = computation.event(place).time
        durations[place], row[0] = time - float(row[0]), time

    computation.fold(1, since, float)
    return durations


def _last_exits(history: Sequence[Event]) -> list[int]:
    """For each event, the number of the last exit up to it, or 0; entry 0 is for before all of them."""
    exits = [0]
    for number, event in enumerate(history, 1):
        exits.append(number if event.kind is EventKind.EXIT else exits[-1])
    return exits


def _replayed(
    computation: Computation, durations: Mapping[EventPosition, float], saved: Sequence[Mapping[EventPosition, float]]
) -> list[FloatArray]:
    """Times of events if some seconds had been saved just before some of them, for several sets of savings at once.

    For each process a row for each event, a column for each set.
    """
    less = defaultdict[EventPosition, list[tuple[int, float]]](list)
    for column, savings in enumerate(saved):
        for place, seconds in savings.items():
            less[place].append((column, seconds))

    def delay(place: EventPosition, row: FloatArray) -> None:
        row += durations[place]
        for column, seconds in less.get(place, ()):
            row[column] -= seconds

    return [rows[1:] for rows in computation.fold(len(saved), delay, float)]


def _savings(
    computation: Computation, durations: Mapping[EventPosition, float], process: Name, late: Sequence[Arrival]
) -> tuple[dict[EventPosition, float], dict[str, float]]:
    """What a process would have to save before which event to be never late, and on what kinds of time."""
    index = computation.index(process)
    saved: dict[EventPosition, float] = {}
    removed = defaultdict[str, float](float)
    for arrival in late:
        if arrival.last != process:
            continue
        window = [EventPosition(index, number) for number in range(max(arrival.since, 1), arrival.entry.number + 1)]
        excess = arrival.lateness - sum(saved.get(place, 0.0) for place in window)
        if excess > 0:
            _save(computation, durations, window, excess, saved)
            positive = {kind: seconds for kind, seconds in arrival.by_kind.items() if seconds > 0}
            for kind, seconds in positive.items():
                removed[kind] += excess * seconds / sum(positive.values())
    return saved, dict(removed)


def _save(
    computation: Computation,
    durations: Mapping[EventPosition, float],
    window: Iterable[EventPosition],
    excess: float,
    saved: dict[EventPosition, float],
) -> None:
    """Take seconds off events, the longest first, none below 0; nothing off one that waited for none."""
    left = {
        place: durations[place] - saved.get(place, 0.0) if place.number > 1 or place in computation.joins_to else 0.0
        for place in window
    }
    for place in sorted(left, key=lambda place: -left[place]):
        taken = min(max(left[place], 0.0), excess)
        saved[place] = saved.get(place, 0.0) + taken
        excess -= taken


def _extent(times: Sequence[FloatArray]) -> FloatArray:
    """From the first event of all to the last; of each column, where times have several."""
    rows = [row for row in times if row.size]
    if not rows:
        raise UsageError("without events there is no time to forecast: give the histories of a run.")
    return np.max([row.max(axis=0) for row in rows], axis=0) - np.min([row.min(axis=0) for row in rows], axis=0)
