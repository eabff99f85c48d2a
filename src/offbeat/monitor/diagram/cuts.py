"""Cuts of a run as people ask for them, and as lines through its lanes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median
from typing import Final

from offbeat.errors import UsageError
from offbeat.monitor.diagram.model import CutLine
from offbeat.monitor.diagram.waits import Floats
from offbeat.protocols.causality.cuts import Cut, causal_past, check, latest_consistent, violation
from offbeat.protocols.causality.histories import Computation, EventPosition

FORMS: Final = "`latest`, `3.5s`, `past worker 0:123` or `worker 0:123, worker 1:120`"
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_TIME: Final = re.compile(r"([0-9]*\.?[0-9]+)\s*(us|ms|s|)")
_MARGIN: Final = 0.15
"""How far a line keeps away from the events beside it, as a share of their distance."""


def moment(text: str) -> float:
    """A time on the axis of a diagram: `3.5s`, `200ms`, or a plain number."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r} is not a time: give it as 3.5s or 200ms, or, in a log without times, as 120.")
    return float(found[1]) * _SECONDS[found[2]]


def window(text: str, start: float, stop: float) -> tuple[float, float]:
    """A window as it is asked for, `3s..4s`; either end may be left out."""
    first, dots, last = text.partition("..")
    if not dots:
        raise UsageError(f"{text!r} is not a window: give it as 3s..4s; either end may be left out.")
    begin = moment(first) if first.strip() else start
    end = moment(last) if last.strip() else stop
    if not begin < end:
        raise UsageError(f"window {text!r} ends before it begins; there are events from {start:g} to {stop:g}.")
    if begin > stop or end < start:
        raise UsageError(f"window {text!r} holds nothing: there are events from {start:g} to {stop:g}.")
    return begin, end


def until(times: Sequence[Floats], time: float) -> Cut:
    """Everything up to a time on the axis, which need not be consistent."""
    return tuple(int(some.searchsorted(time, "right")) for some in times)


def asked(run: Computation, times: Sequence[Floats], text: str, stop: float) -> Cut:
    """The cut that a text asks for; `latest` is the largest consistent one up to the end of the window."""
    words = text.strip()
    if words == "latest":
        return latest_consistent(run, until(times, stop))
    if _TIME.fullmatch(words):
        return until(times, moment(words))
    if words.startswith("past "):
        return causal_past(run, _place(run, words.removeprefix("past ")))
    return _counted(run, words)


def _counted(run: Computation, text: str) -> Cut:
    counts: dict[int, int] = {}
    for part in text.split(","):
        name, colon, number = part.rpartition(":")
        if not colon or not number.strip().isdigit():
            raise UsageError(f"{part.strip()!r} in --cut {text!r} is not a count of events. Forms: {FORMS}.")
        counts[run.index(name.strip())] = int(number)
    missing = [name for index, name in enumerate(run.processes) if index not in counts]
    if missing:
        raise UsageError(
            f"--cut {text!r} leaves out {', '.join(missing)}: say of every process how many of its events are in it."
        )
    cut = tuple(counts[index] for index in range(run.size))
    check(run, cut)
    return cut


def _place(run: Computation, text: str) -> EventPosition:
    name, _, number = text.rpartition(":")
    process = run.index(name.strip())
    length = run.lengths[process]
    if number.strip() == "last":
        number = str(length)
    if not number.strip().isdigit() or not 0 < int(number) <= length:
        raise UsageError(f"{name.strip()} has events 1 to {length}, and no event {number.strip()!r}: give one of them.")
    return EventPosition(process, int(number))


def crossed(run: Computation, times: Sequence[Floats], label: str, cut: Cut) -> CutLine:
    """A cut as a line through all lanes, as straight as its events let it be."""
    wrong = violation(run, cut)
    rooms = [_room(times[process].tolist(), count) for process, count in enumerate(cut)]
    middle = _middle(rooms)
    places = tuple(min(max(middle, low), high) for low, high in rooms)
    return CutLine(label, cut, places, wrong is None, "" if wrong is None else str(wrong))


def _room(times: Sequence[float], count: int) -> tuple[float, float]:
    """Between which times a line may cross a lane: before its first event and behind its last, anywhere."""
    low = times[count - 1] if count else -math.inf
    high = times[count] if count < len(times) else math.inf
    gap = _MARGIN * (high - low) if math.isfinite(high - low) else 0.0
    return low + gap, high - gap


def _middle(rooms: Sequence[tuple[float, float]]) -> float:
    """Where a line crosses most lanes, if it can."""
    inner = [(low + high) / 2 for low, high in rooms if math.isfinite(high - low)]
    if inner:
        return median(inner)
    lows = [low for low, _ in rooms if math.isfinite(low)]
    highs = [high for _, high in rooms if math.isfinite(high)]
    return max(lows) if lows else min(highs, default=0.0)
