"""The lanes of a run as the page draws them: extents, steps, and what is seen of their intervals through a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from offbeat.monitor.diagram.intervals import KINDS, CallGroups, Window, intervals
from offbeat.monitor.diagram.waits import Lane, Names, Table, joined

TAIL: Final = 0.03
"""What is stuck is drawn this far beyond the last event, as a share of the whole: when it was ended is not known."""
MOST_STEPS: Final = 4000
"""More steps than this are not marked one by one."""
_COLUMNS: Final = ("call", "sequence", "count", "share", "label", "lane", "kind")
"""What follows on starts and lengths; as in common.js."""


class LaneView:
    """All intervals of a run at one moment."""

    def __init__(self, lanes: Sequence[Lane], names: Names, now: float | None) -> None:
        """`now` is the time up to which a run has gone that still goes on; None of one that is over."""
        self.names = [lane.name for lane in lanes]
        self.labels = names.labels
        self.start = min((lane.began for lane in lanes if lane.began is not None), default=0.0)
        self.stop = max((lane.last for lane in lanes if lane.began is not None), default=0.0)
        stuck = any(len(lane.open) for lane in lanes)
        self.now = (
            self.stop + (TAIL * (self.stop - self.start) if stuck else 0.0) if now is None else max(now, self.stop)
        )
        """Up to when there is something to be drawn."""
        self.steps = [lane.steps for lane in lanes]
        self.extents = [
            (lane.began or 0.0, self.now if now is not None and not lane.finished else lane.last) for lane in lanes
        ]
        calls = CallGroups(joined(lanes), names, self.names)
        self.intervals = intervals(calls, self.now, now is not None)
        self.last_in = np.bincount(calls.stays["lane"][calls.decisive], minlength=len(lanes))
        """In how many calls each lane was the last to enter."""
        self._window = Window(self.intervals, len(lanes))

    def often_last(self, share: float, calls: int) -> list[str]:
        """Who was the last to enter at least this share of the calls of several, if there were at least so many."""
        total = int(self.last_in.sum())
        often = zip(self.names, self.last_in, strict=True)
        return [name for name, count in often if total >= calls and count >= share * total]

    def window(self, start: float, stop: float, pixels: int) -> Table:
        """What is seen between two times on so many pixels."""
        return np.concatenate(self._window.seen(start, stop, pixels))

    def ticks(self, start: float, stop: float) -> list[list[float]]:
        """When steps were made, by lane; nothing if there are too many to be told apart."""
        inside = [steps[(steps >= start) & (steps <= stop)] for steps in self.steps]
        return [steps.tolist() for steps in inside] if sum(map(len, inside)) <= MOST_STEPS else []

    def packed(self, some: Table, start: float, stop: float) -> bytes:
        """Intervals as the page reads them: the length of a head, the head as JSON, then column after column."""
        used = np.unique(some["label"]).tolist()
        head: dict[str, Any] = {
            "start": start,
            "stop": stop,
            "first": self.start,
            "last": self.now,
            "count": len(some),
            "lanes": self.names,
            "extents": self.extents,
            "kinds": KINDS,
            "labels": {str(number): self.labels[number] for number in used},
            "steps": self.ticks(start, stop),
        }
        text = msgspec.json.encode(head)
        text += b" " * (-(len(text) + 4) % 8)
        columns = [some["start"], some["stop"] - some["start"], *(some[name] for name in _COLUMNS)]
        return b"".join([len(text).to_bytes(4, "little"), text, *(column.tobytes() for column in columns)])
