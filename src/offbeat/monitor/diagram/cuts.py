"""Windows and cuts of a run as users write them, and cuts as lines through its lanes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median
from typing import Final

from offbeat.errors import UsageError
from offbeat.monitor.diagram.model import CutLine
from offbeat.monitor.diagram.waits import Floats
from offbeat.protocols.causality.cuts import Cut, check, latest_consistent, violation
from offbeat.protocols.causality.histories import Computation, EventPosition

FORMS: Final = "`latest`, `3.5s`, `past worker 0:123` or `worker 0:123, worker 1:120`"
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_TIME: Final = re.compile(r"([0-9]*\.?[0-9]+)\s*(us|ms|s|)")
_MARGIN: Final = 0.15  # Distance of a line from the events beside it, as a share of the distance between them.


def moment(text: str) -> float:
    """Parse a time on the axis of a diagram: `3.5s`, `200ms`, or a plain number."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a time: give it as 3.5s or 200ms, or, in a log without times, as 120.")
    return float(match[1]) * _SECONDS[match[2]]


def window(text: str, start: float, stop: float) -> tuple[float, float]:
    """Parse a window such as `3s..4s`; either end may be omitted."""
    first, dots, last = text.partition("..")
    if not dots:
        raise UsageError(f"{text!r} is not a window: give it as 3s..4s; either end may be omitted.")
    begin = moment(first) if first.strip() else start
    end = moment(last) if last.strip() else stop
    if not begin < end:
        raise UsageError(f"window {text!r} ends before it begins; there are events from {start:g} to {stop:g}.")
    if begin > stop or end < start:
        raise UsageError(f"window {text!r} holds nothing: there are events from {start:g} to {stop:g}.")
    return begin, end


def parse_cut(run: Computation, times: Sequence[Floats], text: str, stop: float) -> Cut:
    """Parse a cut; `latest` is the largest consistent one up to the end of the window."""
    words = text.strip()
    if words == "latest" or _TIME.fullmatch(words):
        end = stop if words == "latest" else moment(words)
        cut = tuple(int(lane.searchsorted(end, "right")) for lane in times)
        return latest_consistent(run, cut) if words == "latest" else cut
    if words.startswith("past "):
        return run.vector(_event(run, words.removeprefix("past ")))
    counts: dict[int, int] = {}
    for part in words.split(","):
        name, colon, number = part.rpartition(":")
        if not colon or not number.strip().isdigit():
            raise UsageError(f"{part.strip()!r} in --cut {words!r} is not a count of events. Forms: {FORMS}.")
        counts[run.index(name.strip())] = int(number)
    missing = [name for index, name in enumerate(run.processes) if index not in counts]
    if missing:
        raise UsageError(
            f"--cut {words!r} omits {', '.join(missing)}: say of every process how many of its events are in it."
        )
    cut = tuple(counts[index] for index in range(run.size))
    check(run, cut)
    return cut


def _event(run: Computation, text: str) -> EventPosition:
    name, _, number = text.rpartition(":")
    process = run.index(name.strip())
    length = run.lengths[process]
    if number.strip() == "last":
        number = str(length)
    if not number.strip().isdigit() or not 0 < int(number) <= length:
        raise UsageError(f"{name.strip()} has events 1 to {length}, and no event {number.strip()!r}: give one of them.")
    return EventPosition(process, int(number))


def line_of(run: Computation, times: Sequence[Floats], label: str, cut: Cut) -> CutLine:
    """A cut as a line through all lanes, as straight as its events allow."""
    wrong = violation(run, cut)
    gaps = [_gap(times[process].tolist(), count) for process, count in enumerate(cut)]
    inner = [(low + high) / 2 for low, high in gaps if math.isfinite(high - low)]
    lows = [low for low, _ in gaps if math.isfinite(low)]
    highs = [high for _, high in gaps if math.isfinite(high)]
    middle = median(inner) if inner else max(lows) if lows else min(highs, default=0.0)
    places = tuple(min(max(middle, low), high) for low, high in gaps)
    return CutLine(label, cut, places, wrong is None, "" if wrong is None else str(wrong))


def _gap(times: Sequence[float], count: int) -> tuple[float, float]:
    """The times between which a line may cross a lane."""
    low = times[count - 1] if count else -math.inf
    high = times[count] if count < len(times) else math.inf
    margin = _MARGIN * (high - low) if math.isfinite(high - low) else 0.0
    return low + margin, high - margin
