"""Stragglers: which worker held the others up, why, what it cost them, and what a step would take without it.

A long run is examined in stretches of some steps, each by itself; a very long one, in stretches spread evenly over it.
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
from offbeat.monitor.history import ServerStamps, Stamps, history_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.critical import Arrival, Forecast, arrivals, forecasts
from offbeat.protocols.causality.histories import Computation, Event
from offbeat.runtime.events.recorder import KINDS, UNKNOWN, Mark, Stamp
from offbeat.runtime.events.servers import WARM_START, meeting

LATEST: Final = 8192  # Number of each worker's latest events that are examined in a run without steps.
STRETCH: Final = 2048  # Approximate maximum number of each worker's events in a stretch.
STRETCHES: Final = 24  # Maximum number of stretches that are examined.
LOOKED: Final = 4 * STRETCH * STRETCHES  # Most events examined in all: with many workers, fewer in a stretch.
OFTEN: Final = 0.75  # A lateness has one cause if that is this share of it, in this share of all steps, or more.
MUCH: Final = 0.1  # A straggler costs this share of the run, beyond what the others and the lack of a core cost …
NOTICEABLE: Final = 0.1  # … and at least this many seconds: less is how a busy machine treats a short run …
ENOUGH: Final = 10  # … over at least this many steps …
BLOCKS: Final = 16  # … of which this many parts are compared, or as many as there are steps: …
SURE: Final = 2.5  # … this many standard deviations more than chance explains if all workers are equally late.
_LITTLE: Final = 0.05  # Kinds that make up less of a lateness than this are not mentioned.


class LateWorker(NamedTuple):
    """The latest worker of one step, and why it was late."""

    step: int
    worker: str
    lateness: float
    by_kind: Mapping[str, float]

    @property
    def kind(self) -> str:
        """The main cause."""
        return max(self.by_kind, key=self.by_kind.__getitem__)


class Blame(Struct, frozen=True):
    """What a worker has cost the others."""

    worker: str
    last: int  # Number of steps in which it was the latest; in a run without steps, collectives.
    steps: int  # Number of steps in all.
    unit: str  # What is counted: `steps`, or `collectives` in a run without steps.
    late: float  # Its mean lateness in those steps, in seconds.
    by_kind: Mapping[str, float]  # The lateness by kind of time.
    steady: float  # Share of all steps in which it was late by at least half of that.
    collectives: int  # Number of collectives.
    run_seconds_lost: float  # What the run would have saved, had it never been later than the others on average.
    worker_seconds_lost: float  # What the others waited for it: two that wait for a second are two worker-seconds.
    wall_seconds: float  # Duration of what was examined.
    usual_seconds_lost: float  # What the run lost to each of the others, on average.
    queued_seconds: float | None  # How much longer than the others it waited for a core; None: unknown.
    deviations: float  # How far from being late as often as the others: standard deviations, over parts of the run.
    seconds: float  # Duration of a step; in a run without steps, of the whole.
    without: float  # What that would have been, had this worker never been later than the others are on average.

    @property
    def straggler(self) -> bool:
        """Whether it has cost the run a notable part of its time, more than chance and a busy machine explain.

        If it is unknown whether it had a core, only a single steady cause tells it from a busy machine.
        """
        lost = self.run_seconds_lost - self.usual_seconds_lost - (self.queued_seconds or 0.0)
        explained = self.cause is not None or (self.queued_seconds is not None and self.steps >= BLOCKS)
        enough = self.steps >= ENOUGH and lost >= max(MUCH * self.wall_seconds, NOTICEABLE)
        return enough and explained and self.deviations >= SURE

    @property
    def cause(self) -> str | None:
        """What makes it late, if that is a single thing, step by step.

        A worker with too little of a busy machine is late in everything, by an amount that varies.
        """
        kind = max(self.by_kind, key=self.by_kind.__getitem__, default=None)
        if kind is None or self.steady < OFTEN:
            return None
        return kind if self.by_kind[kind] >= OFTEN * self.late > 0 else None

    def __str__(self) -> str:
        whole = "a step" if self.unit == "steps" else "the run"
        return (
            f"{self.worker} was last in {self.last:,} of {self.steps:,} {self.unit}, by {_time(self.late)} in the "
            f"mean: {in_kinds(self.late, self.by_kind)}; {self.losses}; without it {whole} "
            f"would take {_time(self.without)} instead of {_time(self.seconds)}"
        )

    @property
    def losses(self) -> str:
        """Its cost in words: the run's time, and that of the workers."""
        share = 100 * self.run_seconds_lost / (self.wall_seconds or 1.0)
        return (
            f"the run lost {_time(self.run_seconds_lost)} of {_time(self.wall_seconds)} to it ({share:.0f} %), and the "
            f"others together waited {self.worker_seconds_lost:.3g} worker-seconds"
        )

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {**structs.asdict(self), "straggler": self.straggler, "cause": self.cause, "words": str(self)}


def in_kinds(seconds: float, by_kind: Mapping[str, float]) -> str:
    """Seconds by kind, in words, the largest first."""
    kinds = sorted(((spent, kind) for kind, spent in by_kind.items() if spent > _LITTLE * seconds), reverse=True)
    names = {KINDS[UNKNOWN]: "unknown (no DataLoader was seen)"}
    return ", ".join(f"{_time(spent)} {names.get(kind, kind)}" for spent, kind in kinds) or "a little of everything"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def blame(stamps: Stamps, servers: ServerStamps | None = None, queues: Queues | None = None) -> list[Blame]:
    """What each worker has cost the others, the most costly first; empty if they have met nowhere."""
    ranks = {worker_name(rank): rank for rank in stamps}
    totals = defaultdict[str, _Total](_Total)
    steps = collectives = 0
    for own, served in stretches(stamps, servers or {}):
        history = history_of(own, served)
        late = [arrival for arrival in arrivals(history) if not _is_intended(history.event(arrival.entry))]
        if not late:
            continue
        latest = _by_step(history, late, own)
        steps += len(latest)
        collectives += len(late)
        times = [stamp.time for some in own.values() for stamp in some]
        for forecast in forecasts(history, history.processes[: len(own)], late):
            waited = queued(queues or {}, ranks[forecast.process], min(times), max(times))
            totals[forecast.process].add(forecast, late, latest, waited)
    workers = [
        total.blame(name, steps, collectives, [other for key, other in totals.items() if key != name])
        for name, total in totals.items()
    ]
    return sorted(workers, key=lambda worker: (-worker.run_seconds_lost, worker.worker))


def _is_intended(entry: Event) -> bool:
    """Whether the strategy wants the others to wait there: then no worker is to blame."""
    return entry.call is not None and entry.call.operation == meeting(WARM_START)


def late_steps(stamps: Stamps, servers: ServerStamps | None = None) -> list[LateWorker]:
    """The latest worker of each step, and why."""
    latest: list[LateWorker] = []
    for own, served in stretches(stamps, servers or {}):
        history = history_of(own, served)
        latest += _by_step(history, arrivals(history), own)
    return latest


class _Total:
    """Lateness of one worker over several stretches."""

    def __init__(self) -> None:
        self._late: list[LateWorker] = []
        self._all: list[LateWorker] = []
        self._lost = self._took = self._without = 0.0
        self.queued: float | None = 0.0
        self._steps = 0

    def add(
        self, forecast: Forecast, late: Sequence[Arrival], latest: Sequence[LateWorker], waited: float | None
    ) -> None:
        self._late += [one for one in latest if one.worker == forecast.process]
        self._all += latest
        self.queued = None if self.queued is None or waited is None else self.queued + waited
        self._lost += sum(arrival.lost for arrival in late if arrival.last == forecast.process)
        self._took += forecast.seconds
        self._without += forecast.without
        self._steps += len({one.step for one in latest if one.step >= 0})

    @property
    def saved(self) -> float:
        """How much shorter the run would have been without its lateness."""
        return max(0.0, self._took - self._without)

    def blame(self, name: str, steps: int, collectives: int, others: Sequence[_Total]) -> Blame:
        count = max(1, len(self._late))
        late = sum(one.lateness for one in self._late) / count
        kinds = {kind for one in self._late for kind in one.by_kind}
        usual = [other.queued for other in others if other.queued is not None]
        return Blame(
            worker=name,
            last=len(self._late),
            steps=steps,
            unit="steps" if self._steps else "collectives",
            late=late,
            by_kind={kind: sum(one.by_kind.get(kind, 0.0) for one in self._late) / count for kind in sorted(kinds)},
            steady=sum(one.lateness >= late / 2 for one in self._late) / max(1, steps),
            collectives=collectives,
            run_seconds_lost=self.saved,
            worker_seconds_lost=self._lost,
            wall_seconds=self._took,
            usual_seconds_lost=fmean(other.saved for other in others) if others else 0.0,
            queued_seconds=None if self.queued is None or not usual else max(0.0, self.queued - fmean(usual)),
            deviations=_deviations(name, self._all, 1 + len(others)),
            seconds=self._took / max(1, self._steps),
            without=self._without / max(1, self._steps),
        )


def _deviations(worker: str, steps: Sequence[LateWorker], workers: int) -> float:
    """How far a worker's lateness is from chance if all are equally late, in standard deviations.

    The steps are divided into consecutive parts, so that a spell of bad luck counts once however many steps it lasts.
    In each part the mean lateness of the others is subtracted: a worker as late as they are comes to nothing, and so
    does one that was late in a single part only.
    """
    parts = np.zeros(min(BLOCKS, len(steps)))
    for number, one in enumerate(steps):
        own = 1.0 if one.worker == worker else -1.0 / max(1, workers - 1)
        parts[number * len(parts) // len(steps)] += own * max(0.0, one.lateness)
    spread = float(np.sqrt((parts**2).sum()))
    return float(parts.sum()) / spread if spread else 0.0


def _by_step(history: Computation, late: Sequence[Arrival], stamps: Stamps) -> list[LateWorker]:
    """The latest worker of each step; in a run without steps, of each collective, under negative numbers."""
    steps = {
        worker_name(rank): [(stamp.time, stamp.sequence) for stamp in own if stamp.mark is Mark.STEP]
        for rank, own in stamps.items()
    }
    groups = defaultdict[int, list[Arrival]](list)
    for number, arrival in enumerate(late):
        own = steps.get(arrival.last, ())
        at = bisect_right(own, history.event(arrival.entry).time, key=lambda step: step[0])
        groups[own[max(0, at - 1)][1] if own else -1 - number].append(arrival)
    return [_latest(step, group) for step, group in sorted(groups.items())]


def _latest(step: int, late: Sequence[Arrival]) -> LateWorker:
    lateness = defaultdict[str, float](float)
    kinds = defaultdict[str, defaultdict[str, float]](lambda: defaultdict[str, float](float))
    for arrival in late:
        lateness[arrival.last] += arrival.lateness
        for kind, seconds in arrival.by_kind.items():
            kinds[arrival.last][kind] += seconds
    worst = max(lateness, key=lateness.__getitem__)
    return LateWorker(step, worst, lateness[worst], dict(kinds[worst]))


def stretches(stamps: Stamps, servers: ServerStamps) -> Iterator[tuple[Stamps, ServerStamps]]:
    """The run, cut between steps into pieces that can be examined separately.

    From the first step on: that one worker was ready before another is nobody's fault.
    """
    steps = {rank: [at for at, stamp in enumerate(own) if stamp.mark is Mark.STEP] for rank, own in stamps.items()}
    numbers = {rank: [stamps[rank][at].sequence for at in own] for rank, own in steps.items() if own}
    if not numbers:
        yield {rank: own[-LATEST:] for rank, own in stamps.items()}, servers
        return
    first, last = max(own[0] for own in numbers.values()), max(own[-1] for own in numbers.values())
    events = max(len(own) for own in stamps.values())
    pieces = max(1, events // min(STRETCH, LOOKED // (STRETCHES * len(stamps))))
    length = max(ENOUGH, -(-(last - first) // pieces))
    starts = list(range(first, max(last, first + 1), length))
    for start in starts if len(starts) <= STRETCHES else starts[:: -(-len(starts) // STRETCHES)]:
        piece = {
            rank: _between(stamps[rank], steps[rank], numbers.get(rank, ()), start, start + length) for rank in stamps
        }
        times = [stamp.time for own in piece.values() for stamp in own]
        if times:
            begin, end = min(times), max(times)
            yield piece, {name: [stamp for stamp in own if begin <= stamp.time <= end] for name, own in servers.items()}


def _between(
    stamps: Sequence[Stamp], steps: Sequence[int], numbers: Sequence[int], start: int, stop: int
) -> Sequence[Stamp]:
    """Events from one step up to and including another."""
    begin, end = bisect_left(numbers, start), bisect_right(numbers, stop)
    if begin == end:
        return ()
    first, closed = steps[begin], numbers[end - 1] == stop
    turns = (stamps[at] for at in range(first - 1, max(0, first - LATEST) - 1, -1) if stamps[at].mark is Mark.TURN)
    before = [structs.replace(turn, time=stamps[first].time) for turn in itertools.islice(turns, 1)]
    return [*before, *stamps[first : steps[end - 1] + 1 if closed else len(stamps)]]
