"""The lanes of a run as the page draws them: extents, steps, and the intervals in a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from offbeat.monitor.diagram.intervals import KINDS, CallGroups, Window, intervals
from offbeat.monitor.diagram.waits import Lane, Names, Table, joined

TAIL: Final = 0.03
"""Stuck calls are drawn this far beyond the last event, as a share of the whole: when they ended is unknown."""
MOST_STEPS: Final = 4000
"""Maximum number of steps that are marked one by one."""
_COLUMNS: Final = ("call", "sequence", "count", "share", "label", "lane", "kind")
"""The columns after starts and lengths; as in common.js."""


class LaneView:
    """All intervals of a run at one moment."""

    def __init__(self, lanes: Sequence[Lane], names: Names, now: float | None) -> None:
        """`now` is the current time if the run is still going, None if it is over."""
        self.names = [lane.name for lane in lanes]
        self.labels = names.labels
        self.start = min((lane.began for lane in lanes if lane.began is not None), default=0.0)
        self.stop = max((lane.last for lane in lanes if lane.began is not None), default=0.0)
        tail = TAIL * (self.stop - self.start) if any(len(lane.open) for lane in lanes) else 0.0
        self.now = self.stop + tail if now is None else max(now, self.stop)
        """End of what is drawn."""
        self.steps = [lane.steps for lane in lanes]
        self.extents = [
            (lane.began or 0.0, self.now if now is not None and not lane.finished else lane.last) for lane in lanes
        ]
        calls = CallGroups(joined(lanes), names, self.names)
        self.intervals = intervals(calls, self.now, now is not None)
        self.last_in = np.bincount(calls.stays["lane"][calls.decisive], minlength=len(lanes))
        """Number of calls that each lane was the last to enter."""
        self._window = Window(self.intervals, len(lanes))

    def often_last(self, share: float, calls: int) -> list[str]:
        """Lanes that were last to enter at least this share of the shared calls, if there were at least `calls`."""
        total = int(self.last_in.sum())
        often = zip(self.names, self.last_in, strict=True)
        return [name for name, count in often if total >= calls and count >= share * total]

    def window(self, start: float, stop: float, pixels: int) -> Table:
        """The intervals between two times, merged to this number of pixels."""
        return np.concatenate(self._window.seen(start, stop, pixels))

    def packed(self, table: Table, start: float, stop: float) -> bytes:
        """Intervals as the page reads them: the length of a head, the head as JSON, then column after column."""
        steps = [own[(own >= start) & (own <= stop)] for own in self.steps]
        head: dict[str, Any] = {
            "start": start,
            "stop": stop,
            "first": self.start,
            "last": self.now,
            "count": len(table),
            "lanes": self.names,
            "extents": self.extents,
            "kinds": KINDS,
            "labels": {str(number): self.labels[number] for number in np.unique(table["label"]).tolist()},
            "steps": [own.tolist() for own in steps] if sum(map(len, steps)) <= MOST_STEPS else [],
        }
        text = msgspec.json.encode(head)
        text += b" " * (-(len(text) + 4) % 8)
        columns = [table["start"], table["stop"] - table["start"], *(table[name] for name in _COLUMNS)]
        return b"".join([len(text).to_bytes(4, "little"), text, *(column.tobytes() for column in columns)])
