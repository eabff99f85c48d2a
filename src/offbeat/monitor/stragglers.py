"""Who held the others up, by what, how much they lost by it, and what a step would take without it.

A long run is looked at in stretches of some steps, each by itself; a very long one, in some that lie evenly in it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct, structs

from offbeat.monitor.cpu_wait import Queues, queued
from offbeat.monitor.history import history_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.critical import Arrival, Forecast, arrivals, forecasts
from offbeat.protocols.causality.histories import Computation, Event
from offbeat.runtime.events.recorder import KINDS, UNKNOWN, Mark, Stamp
from offbeat.runtime.events.servers import WARM_START, meeting

LATEST: Final = 8192
"""How many of each worker's events are looked at, the last ones, of a run without steps."""
STRETCH: Final = 2048
"""At most about as many events of each worker are in a stretch."""
STRETCHES: Final = 24
"""So many stretches are looked at; of a longer run, as many that lie evenly in it."""
LOOKED: Final = 4 * STRETCH * STRETCHES
"""About as many events are looked at in all: of many workers, fewer in a stretch."""
OFTEN: Final = 0.75
"""A lateness has one cause if that makes up at least this share of it, in at least this share of all steps."""
MUCH: Final = 0.1
"""A straggler costs the run at least this share of its time, beyond what the others and the lack of a core cost it …"""
NOTICEABLE: Final = 0.1
"""… and at least so many seconds: less than that is how a busy machine happened to schedule a short run …"""
ENOUGH: Final = 10
"""… over at least so many steps …"""
BLOCKS: Final = 16
"""… of which this many parts are compared, or as many as there are steps: …"""
SURE: Final = 2.5
"""… so many standard deviations more than what chance would make of it, if everybody were late alike."""
_LITTLE: Final = 0.05
"""Kinds that make up less of a lateness than this are not told."""

Stamps = Mapping[int, Sequence[Stamp]]
ServerStamps = Mapping[str, Sequence[Stamp]]


class LateWorker(NamedTuple):
    """Who was late in one step, and by what."""

    step: int
    worker: str
    lateness: float
    by_kind: Mapping[str, float]

    @property
    def kind(self) -> str:
        """What made it late, mostly."""
        return max(self.by_kind, key=self.by_kind.__getitem__)


class Blame(Struct, frozen=True):
    """What a worker has cost the others."""

    worker: str
    last: int
    """In how many steps it was later than anybody else; of a run without steps, collectives."""
    steps: int
    """Of how many."""
    unit: str
    """What is counted: `steps`, or `collectives` of a run that makes none."""
    late: float
    """By how many seconds, in the mean over those."""
    by_kind: Mapping[str, float]
    """What these seconds are made of."""
    steady: float
    """In which share of all steps it was late by at least half of that."""
    collectives: int
    """How many collectives there were."""
    run_seconds_lost: float
    """By how much shorter the run would have been, had this worker never been later than the others are on average."""
    worker_seconds_lost: float
    """Seconds that the others together have waited for it: two who wait for a second are two worker-seconds."""
    wall_seconds: float
    """How long what was looked at took."""
    usual_seconds_lost: float
    """What the run lost to each of the others, on average."""
    queued_seconds: float | None
    """How much longer than the others it waited for a core, which other programs may have had; None: nobody knows."""
    deviations: float
    """How far it is from being late as often as the others are: standard deviations, over parts of the run."""
    seconds: float
    """How long a step took; of a run without steps, the whole."""
    without: float
    """And would have taken, had this worker never been later than the others are on average."""

    @property
    def straggler(self) -> bool:
        """Whether it has cost the run a notable part of its time, more than chance and a busy machine explain.

        If nobody knows whether it had a core, only a single cause, step by step, tells it from a busy machine.
        """
        lost = self.run_seconds_lost - self.usual_seconds_lost - (self.queued_seconds or 0.0)
        told_apart = self.cause is not None or (self.queued_seconds is not None and self.steps >= BLOCKS)
        enough = self.steps >= ENOUGH and lost >= max(MUCH * self.wall_seconds, NOTICEABLE)
        return enough and told_apart and self.deviations >= SURE

    @property
    def cause(self) -> str | None:
        """What makes it late, if it is one thing and step by step.

        Whoever has too little of a busy machine is late in everything, and now more, now less.
        """
        kind = max(self.by_kind, key=self.by_kind.__getitem__, default=None)
        if kind is None or self.steady < OFTEN:
            return None
        return kind if self.by_kind[kind] >= OFTEN * self.late > 0 else None

    def __str__(self) -> str:
        """In words."""
        whole = "a step" if self.unit == "steps" else "the run"
        return (
            f"{self.worker} was last in {self.last:,} of {self.steps:,} {self.unit}, by {_time(self.late)} in the "
            f"mean: {in_kinds(self.late, self.by_kind)}; {self.losses}; without it {whole} "
            f"would take {_time(self.without)} instead of {_time(self.seconds)}"
        )

    @property
    def losses(self) -> str:
        """What it has cost, in words: the run's time, and that of the workers."""
        share = 100 * self.run_seconds_lost / (self.wall_seconds or 1.0)
        return (
            f"the run lost {_time(self.run_seconds_lost)} of {_time(self.wall_seconds)} to it ({share:.0f} %), and the "
            f"others together waited {self.worker_seconds_lost:.3g} worker-seconds"
        )

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {**structs.asdict(self), "straggler": self.straggler, "cause": self.cause, "words": str(self)}


def in_kinds(seconds: float, by_kind: Mapping[str, float]) -> str:
    """What some seconds are made of, in words, the most first."""
    told = sorted(((spent, kind) for kind, spent in by_kind.items() if spent > _LITTLE * seconds), reverse=True)
    names = {KINDS[UNKNOWN]: "unknown (no DataLoader was seen)"}
    return ", ".join(f"{_time(spent)} {names.get(kind, kind)}" for spent, kind in told) or "a little of everything"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def blame(stamps: Stamps, servers: ServerStamps | None = None, queues: Queues | None = None) -> list[Blame]:
    """What each worker has cost the others, the most costly first; nothing if they have met nowhere."""
    ranks = {worker_name(rank): rank for rank in stamps}
    totals = defaultdict[str, _Total](_Total)
    steps = collectives = 0
    for some, served in stretches(stamps, servers or {}):
        history = history_of(some, served)
        late = [one for one in arrivals(history) if not _by_design(history.event(one.entry))]
        if not late:
            continue
        judged = _by_step(history, late, _steps_of(some))
        steps += len(judged)
        collectives += len(late)
        times = [stamp.time for one in some.values() for stamp in one]
        for forecast in forecasts(history, history.processes[: len(some)], late):
            waited = queued(queues or {}, ranks[forecast.process], min(times), max(times))
            totals[forecast.process].add(forecast, late, judged, waited)
    found = [
        one.told(name, steps, collectives, [other for key, other in totals.items() if key != name])
        for name, one in totals.items()
    ]
    return sorted(found, key=lambda one: (-one.run_seconds_lost, one.worker))


def _by_design(entry: Event) -> bool:
    """Whether the others wait there because the strategy wants it: their waiting is nobody's fault."""
    return entry.call is not None and entry.call.operation == meeting(WARM_START)


def late_steps(stamps: Stamps, servers: ServerStamps | None = None) -> list[LateWorker]:
    """Who was later than anybody else in each step, and by what."""
    found: list[LateWorker] = []
    for some, served in stretches(stamps, servers or {}):
        history = history_of(some, served)
        found += _by_step(history, arrivals(history), _steps_of(some))
    return found


class _Total:
    """What is known of one worker over several stretches."""

    def __init__(self) -> None:
        self._late: list[LateWorker] = []
        self._all: list[LateWorker] = []
        self._lost = self._took = self._without = 0.0
        self.queued: float | None = 0.0
        self._steps = 0

    def add(
        self, forecast: Forecast, late: Sequence[Arrival], judged: Sequence[LateWorker], waited: float | None
    ) -> None:
        self._late += [one for one in judged if one.worker == forecast.process]
        self._all += judged
        self.queued = None if self.queued is None or waited is None else self.queued + waited
        self._lost += sum(arrival.lost for arrival in late if arrival.last == forecast.process)
        self._took += forecast.seconds
        self._without += forecast.without
        self._steps += len({one.step for one in judged if one.step >= 0})

    @property
    def saved(self) -> float:
        """By how much shorter the run would have been without its lateness."""
        return max(0.0, self._took - self._without)

    def _queued_more(self, others: Sequence[_Total]) -> float | None:
        """How much longer than the others it waited for a core."""
        usual = [one.queued for one in others if one.queued is not None]
        return None if self.queued is None or not usual else max(0.0, self.queued - fmean(usual))

    def told(self, name: str, steps: int, collectives: int, others: Sequence[_Total]) -> Blame:
        count = max(1, len(self._late))
        late = sum(one.lateness for one in self._late) / count
        kinds = {kind for one in self._late for kind in one.by_kind}
        return Blame(
            name,
            len(self._late),
            steps,
            "steps" if self._steps else "collectives",
            late,
            {kind: sum(one.by_kind.get(kind, 0.0) for one in self._late) / count for kind in sorted(kinds)},
            sum(one.lateness >= late / 2 for one in self._late) / max(1, steps),
            collectives,
            self.saved,
            self._lost,
            self._took,
            fmean(one.saved for one in others) if others else 0.0,
            self._queued_more(others),
            _deviations(name, self._all, 1 + len(others)),
            self._took / max(1, self._steps),
            self._without / max(1, self._steps),
        )


def _deviations(worker: str, steps: Sequence[LateWorker], workers: int) -> float:
    """How far a worker's lateness is from what chance makes of it if all are late alike, in standard deviations.

    The steps are put into some parts, one after the other, so that a spell of bad luck counts once however many steps
    it lasts. In each part the lateness of the others, on average, is taken off: who is late as much as they are comes
    to nothing, and so does one who was late in a single part only.
    """
    parts = np.zeros(min(BLOCKS, len(steps)))
    for number, one in enumerate(steps):
        own = 1.0 if one.worker == worker else -1.0 / max(1, workers - 1)
        parts[number * len(parts) // len(steps)] += own * max(0.0, one.lateness)
    spread = float(np.sqrt((parts**2).sum()))
    return float(parts.sum()) / spread if spread else 0.0


def _by_step(
    history: Computation, late: Sequence[Arrival], steps: Mapping[str, Sequence[tuple[float, int]]]
) -> list[LateWorker]:
    """The latest of each step; of a run without steps, of each collective, under negative numbers."""
    found = defaultdict[int, list[Arrival]](list)
    for number, arrival in enumerate(late):
        mine = steps.get(arrival.last, ())
        entered = history.event(arrival.entry).time
        found[_step_at(mine, entered) if mine else -1 - number].append(arrival)
    return [_latest(step, some) for step, some in sorted(found.items())]


def _latest(step: int, late: Sequence[Arrival]) -> LateWorker:
    lateness = defaultdict[str, float](float)
    kinds = defaultdict[str, defaultdict[str, float]](lambda: defaultdict[str, float](float))
    for arrival in late:
        lateness[arrival.last] += arrival.lateness
        for kind, seconds in arrival.by_kind.items():
            kinds[arrival.last][kind] += seconds
    worst = max(lateness, key=lateness.__getitem__)
    return LateWorker(step, worst, lateness[worst], dict(kinds[worst]))


def _step_at(steps: Sequence[tuple[float, int]], now: float) -> int:
    """The number of the last step that was made before a time."""
    at = bisect_right(steps, now, key=lambda one: one[0])
    return steps[max(0, at - 1)][1]


def _steps_of(stamps: Stamps) -> dict[str, list[tuple[float, int]]]:
    """When each worker made which step."""
    return {
        worker_name(rank): [(stamp.time, stamp.sequence) for stamp in some if stamp.mark is Mark.STEP]
        for rank, some in stamps.items()
    }


def stretches(stamps: Stamps, servers: ServerStamps) -> Iterator[tuple[Stamps, ServerStamps]]:
    """The run, cut between steps into pieces that can be looked at by themselves.

    From the first step on: that one worker was ready before another is nobody's fault.
    """
    steps = {rank: [at for at, one in enumerate(some) if one.mark is Mark.STEP] for rank, some in stamps.items()}
    numbers = {rank: [stamps[rank][at].sequence for at in some] for rank, some in steps.items() if some}
    if not numbers:
        yield {rank: some[-LATEST:] for rank, some in stamps.items()}, servers
        return
    first, last = max(some[0] for some in numbers.values()), max(some[-1] for some in numbers.values())
    events = max(len(some) for some in stamps.values())
    pieces = max(1, events // min(STRETCH, LOOKED // (STRETCHES * len(stamps))))
    length = max(ENOUGH, -(-(last - first) // pieces))
    starts = list(range(first, max(last, first + 1), length))
    for start in starts if len(starts) <= STRETCHES else starts[:: -(-len(starts) // STRETCHES)]:
        some = {
            rank: _between(stamps[rank], steps[rank], numbers.get(rank, ()), start, start + length) for rank in stamps
        }
        times = [stamp.time for one in some.values() for stamp in one]
        if times:
            first, last = min(times), max(times)
            yield some, {name: [stamp for stamp in one if first <= stamp.time <= last] for name, one in servers.items()}


def _between(
    stamps: Sequence[Stamp], steps: Sequence[int], numbers: Sequence[int], start: int, stop: int
) -> Sequence[Stamp]:
    """Events from one step on, up to and with another."""
    begin, end = bisect_left(numbers, start), bisect_right(numbers, stop)
    if begin == end:
        return ()
    first, closed = steps[begin], numbers[end - 1] == stop
    turns = (stamps[at] for at in range(first - 1, max(0, first - LATEST) - 1, -1) if stamps[at].mark is Mark.TURN)
    before = [structs.replace(one, time=stamps[first].time) for one in itertools.islice(turns, 1)]
    return [*before, *stamps[first : steps[end - 1] + 1 if closed else len(stamps)]]
