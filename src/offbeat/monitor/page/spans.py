"""From a process's records to spans: what it was in, from when to when, and since when it did nothing else.

All of it is done on whole columns, since a run of 64 workers may have a million records.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.monitor.page.names import Names
from offbeat.runtime.stamps import RECORDS, Mark, Reader

Floats = NDArray[np.float64]
Table = NDArray[Any]

SPAN: Final = np.dtype(
    [
        ("begun", "<f8"),
        ("waited", "<f8"),
        ("ended", "<f8"),
        ("sequence", "<u8"),
        ("channel", "<u4"),
        ("label", "<u4"),
        ("failed", "?"),
    ]
)
"""`waited`: from when on the process did nothing else, infinite if never; `ended`: infinite if it is under way."""
KEPT: Final = RECORDS
"""How many spans of each process are kept, the latest ones: about two rings full of records."""


class Lane:
    """What one process has done, as far as it was read."""

    def __init__(self, name: str, reader: Reader, names: Names) -> None:
        self.name = name
        self.reader = reader
        self.spans: Table = np.zeros(0, SPAN)
        """What has ended, in the order of the ends."""
        self.open: Table = np.zeros(0, SPAN)
        """What is under way."""
        self.steps: Floats = np.zeros(0)
        """When each step was made."""
        self.stepped = 0
        """How many steps were seen: those whose times are no longer kept, too."""
        self.began: float | None = None
        """When its first event was, of those that were read."""
        self.last = 0.0
        """When its last event was."""
        self.finished = False
        """Whether its program has returned."""
        self.entered: dict[int, int] = {}
        """The highest number of its calls on each channel."""
        self._names = names
        self._known = np.zeros((0, 2), np.uint32)
        self._rows: Table = np.zeros(0, [])

    def read(self) -> bool:
        """Take in what is new; answers whether something was."""
        fresh = self.reader.rows()
        if not len(fresh):
            return False
        self.began = float(fresh["time"][0]) if self.began is None else self.began
        self.last = float(fresh["time"][-1])
        self.finished = bool(fresh["kind"][-1] == Mark.END)
        steps = fresh[fresh["kind"] == Mark.STEP]
        self.stepped = max(self.stepped + len(steps), int(steps["sequence"].max(initial=0)))
        self.steps = np.concatenate([self.steps, steps["time"]])[-KEPT:]
        calls = fresh[(fresh["kind"] >= Mark.ENTER) & (fresh["kind"] <= Mark.FAIL)]
        self._take(np.concatenate([self._rows, calls]) if len(self._rows) else calls)
        return True

    def _take(self, rows: Table) -> None:
        """Pair beginnings with ends; what has not ended is looked at again with the next rows."""
        if not len(rows):
            return
        order = np.lexsort((rows["number"], rows["sequence"], rows["name"]))
        rows = rows[order]
        new = np.flatnonzero(np.concatenate([[True], (np.diff(rows["name"]) != 0) | (np.diff(rows["sequence"]) != 0)]))
        kind, time = rows["kind"], rows["time"]
        found = np.zeros(len(new), SPAN)
        found["begun"] = np.minimum.reduceat(time, new)
        found["waited"] = np.minimum.reduceat(np.where((kind == Mark.ENTER) | (kind == Mark.WAIT), time, np.inf), new)
        over = (kind == Mark.EXIT) | (kind == Mark.FAIL)
        found["ended"] = np.minimum.reduceat(np.where(over, time, np.inf), new)
        found["failed"] = np.maximum.reduceat(kind == Mark.FAIL, new)
        found["sequence"] = rows["sequence"][new]
        known = self._numbered(int(rows["name"].max()))[rows["name"][new]]
        found["channel"], found["label"] = known[:, 0], known[:, 1]
        done = np.isfinite(found["ended"])
        self._rows = rows[~np.repeat(done, np.diff(new, append=len(rows)))]
        self.open = found[~done]
        ended = found[done]
        self.spans = np.concatenate([self.spans, ended[np.argsort(ended["ended"], kind="stable")]])[-KEPT:]
        for channel in np.unique(found["channel"]).tolist():
            highest = int(found["sequence"][found["channel"] == channel].max())
            self.entered[channel] = max(highest, self.entered.get(channel, 0))

    def _numbered(self, most: int) -> NDArray[np.uint32]:
        """Channel and label of each name up to this one."""
        abouts = [self.reader.about(number) for number in range(len(self._known), most + 1)]
        more = [(self._names.channel(self.name, about), self._names.label(about)) for about in abouts]
        if more:
            self._known = np.concatenate([self._known, np.array(more, np.uint32)])
        return self._known
