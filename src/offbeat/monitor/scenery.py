"""What there is to be drawn of a run: pieces of its lanes, arrows between them, marks on them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from offbeat.monitor.lanes import COMMUNICATE, COMPUTE, LOGICAL, WAIT, Arrow, Mark
from offbeat.monitor.stays import Stretch, Times
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.histories import Computation, Event, Join, Kind, Place
from offbeat.runtime.stamps import Mark as Stamped
from offbeat.runtime.stamps import Stamp

OTHER: Final = "other"
"""What of an event's time is said to be of no kind."""
CALLED: Final[Mapping[str, str]] = {
    "computing": COMPUTE, "exchanging": COMMUNICATE, "evaluating": "evaluate", "unknown": COMPUTE,
}  # fmt: skip
"""Kinds of time that are called otherwise where they are stamped."""
EVENT: Final = "event"
"""The mark of what has no kind of its own."""


class Piece(NamedTuple):
    """A span, before it is known whether it is drawn alone."""

    start: float
    stop: float
    kind: str
    what: object = ""
    """What it is told as: made into words only if it is drawn."""
    open: bool = False


def first_time(run: Computation) -> float:
    """When the first event was, by the events' own clock."""
    return min((event.time for history in run.histories for event in history), default=0.0)


def seconds(run: Computation, origin: float) -> Times:
    """For each process when its events were; one that was written a little too late is not before the one before."""
    found = [np.array([event.time - origin for event in history], float) for history in run.histories]
    return [np.maximum.accumulate(times) if times.size else times for times in found]


def logical(run: Computation) -> Times:
    """For each process the Lamport clocks of its events."""
    return [clocks[1:].astype(float) for clocks in run.lamports]


def pieces(
    history: Sequence[Event], times: Sequence[float], stretches: Sequence[Stretch] | None, end: float
) -> list[Piece]:
    """The spans of a lane by seconds: what a process did itself, and over it where it was held up.

    Of one of which that is not known, such as a server, there are none.
    """
    if stretches is None:
        return []
    return list(_laid_over(_own(history, times), list(split(stretches, end))))


def split(stretches: Sequence[Stretch], end: float) -> Iterator[Piece]:
    """Each stretch in two: waiting for somebody, then the exchange itself. One that never ended ends with the run."""
    for one in stretches:
        stop, open_ = min(one.stop, end), math.isinf(one.stop)
        turn = min(max(one.ready, one.start), stop)
        if one.start < turn:
            yield Piece(one.start, turn, WAIT, one.what, open_ and turn == stop)
        if turn < stop:
            yield Piece(turn, stop, COMMUNICATE, one.what, open_)


def _own(history: Sequence[Event], times: Sequence[float]) -> list[Piece]:
    """What the time between events was spent on, neighbours of the same kind joined."""
    found: list[Piece] = []
    for event, start, stop in zip(history[1:], times[:-1], times[1:], strict=True):
        for kind, begin, end in _shares(event.spent, start, stop):
            if found and found[-1].kind == kind and found[-1].stop == begin:
                found[-1] = found[-1]._replace(stop=end)
            elif begin < end:
                found.append(Piece(begin, end, kind))
    return found


def _shares(spent: Mapping[str, float], start: float, stop: float) -> Iterator[tuple[str, float, float]]:
    """The kinds of time between two events, one after another: in which order they came is not known."""
    if not spent:
        yield COMPUTE, start, stop
        return
    scale = min(1.0, (stop - start) / (sum(spent.values()) or 1.0))
    at = start
    for kind, length in spent.items():
        yield CALLED.get(kind, kind), at, at + scale * length
        at += scale * length
    yield OTHER, min(at, stop), stop


def _laid_over(below: Sequence[Piece], above: Sequence[Piece]) -> Iterator[Piece]:
    """Pieces in order, of which some hide others."""
    at, upper = -math.inf, iter(above)
    over = next(upper, None)
    for piece in below:
        start = max(piece.start, at)
        while over is not None and over.start < piece.stop:
            if start < over.start:
                yield piece._replace(start=start, stop=over.start)
            yield over
            start = at = max(over.stop, start)
            over = next(upper, None)
        if start < piece.stop:
            yield piece._replace(start=start)
    while over is not None:
        yield over
        over = next(upper, None)


def arrows(run: Computation, times: Times) -> Iterator[Arrow]:
    """Messages; of a log, from each event to those that learned of it first."""
    for join in run.joins:
        if _is_collective(run, join):
            continue
        for effect in join.effects:
            for cause in _nearest(run, [cause for cause in join.causes if cause.process != effect.process]):
                label = run.event(cause).what or run.event(effect).what
                sent, received = (float(times[place.process][place.number - 1]) for place in (cause, effect))
                yield Arrow(cause.process, effect.process, sent, received, label)


def _is_collective(run: Computation, join: Join) -> bool:
    return run.event(join.effects[0]).kind is Kind.EXIT and run.event(join.causes[0]).kind is Kind.ENTER


def _nearest(run: Computation, causes: Sequence[Place]) -> list[Place]:
    """Without those that are known of by way of another."""
    if len(causes) < 2:
        return list(causes)
    return [one for one in causes if not any(run.happened_before(one, other) for other in causes)]


def marks(run: Computation, times: Times, axis: str) -> Iterator[Mark]:
    """Steps, checkpoints, faults, ends; by logical time every event."""
    for lane, history in enumerate(run.histories):
        for event, time in zip(history, times[lane].tolist(), strict=True):
            if axis == LOGICAL:
                yield Mark(lane, EVENT, time, event.what or str(event.call or event.kind))
            elif event.kind is Kind.LOCAL:
                yield Mark(lane, event.what.partition(" ")[0] or EVENT, time, event.what)


def failures(stamps: Mapping[int, Sequence[Stamp]], run: Computation, origin: float) -> Iterator[Mark]:
    """Waits that have ended with an error."""
    for rank, some in stamps.items():
        for stamp in some:
            if stamp.mark is Stamped.FAIL:
                what = "" if stamp.about is None else f" {stamp.about.operation} #{stamp.sequence}"
                yield Mark(run.index(worker_name(rank)), "fail", stamp.time - origin, f"failed:{what}")


def numbered(names: Sequence[str]) -> list[int]:
    """Names as numbers: the same for the same name."""
    numbers: defaultdict[str, int] = defaultdict(lambda: len(numbers))
    return [numbers[name] for name in names]
