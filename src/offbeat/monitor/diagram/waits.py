"""From records, or events, to stays: who was in which call, from when to when, and since when it did nothing else.

Records are worked on as whole columns, since a run of 64 workers may have a million of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.monitor.diagram.labels import CallChannel, Label, Names
from offbeat.protocols.causality.histories import Computation, EventKind
from offbeat.runtime.events.recorder import RECORDS, About, Mark, Reader, Stamp

Floats = NDArray[np.float64]
Table = NDArray[Any]

STAY: Final = np.dtype(
    [
        ("begun", "<f8"),
        ("waited", "<f8"),
        ("ended", "<f8"),
        ("sequence", "<u8"),
        ("channel", "<u4"),
        ("label", "<u4"),
        ("lane", "<u2"),
        ("failed", "?"),
    ]
)
"""`waited`: from when on the process did nothing else, infinite if never; `ended`: infinite if it is under way."""
KEPT: Final = RECORDS
"""How many stays of each process are kept, the latest ones: about two rings full of records."""
_ROW: Final = np.dtype([("kind", "<u4"), ("name", "<u4"), ("sequence", "<u8"), ("time", "<f8"), ("number", "<u8")])


class Lane:
    """What one process has done, as far as its records were taken in."""

    def __init__(self, name: str, names: Names, kept: int = KEPT) -> None:
        self.name = name
        self.ended: Table = np.zeros(0, STAY)
        """Stays that have ended, in the order of their ends."""
        self.open: Table = np.zeros(0, STAY)
        """Stays under way."""
        self.steps: Floats = np.zeros(0)
        """When each step was made."""
        self.stepped = 0
        """How many steps were seen, including those whose times are no longer kept."""
        self.began: float | None = None
        """When its first event was, of those that were read."""
        self.last = 0.0
        """When its last event was."""
        self.finished = False
        """Whether its program has returned."""
        self.entered: dict[int, int] = {}
        """The highest number of its calls on each channel."""
        self._names = names
        self._kept = kept
        self._known = np.zeros((0, 2), np.uint32)
        self._rows: Table = np.zeros(0, _ROW)

    @property
    def stays(self) -> Table:
        """All of them."""
        return np.concatenate([self.ended, self.open])

    def take(self, fresh: Table, about: Callable[[int], About | None]) -> bool:
        """Take in new records; returns whether there were any."""
        if not len(fresh):
            return False
        self.began = float(fresh["time"][0]) if self.began is None else self.began
        self.last = float(fresh["time"][-1])
        self.finished = bool(fresh["kind"][-1] == Mark.END)
        steps = fresh[fresh["kind"] == Mark.STEP]
        self.stepped = max(self.stepped + len(steps), int(steps["sequence"].max(initial=0)))
        self.steps = np.concatenate([self.steps, steps["time"]])[-self._kept :]
        calls = fresh[(fresh["kind"] >= Mark.ENTER) & (fresh["kind"] <= Mark.FAIL)]
        self._pair(np.concatenate([self._rows, calls]) if len(self._rows) else calls, about)
        return True

    def _pair(self, rows: Table, about: Callable[[int], About | None]) -> None:
        """Pair beginnings with ends; what has not ended is looked at again with the next rows."""
        if not len(rows):
            return
        rows = rows[np.lexsort((rows["number"], rows["sequence"], rows["name"]))]
        new = np.flatnonzero(np.concatenate([[True], (np.diff(rows["name"]) != 0) | (np.diff(rows["sequence"]) != 0)]))
        kind, time = rows["kind"], rows["time"]
        stays = np.zeros(len(new), STAY)
        stays["begun"] = np.minimum.reduceat(time, new)
        stays["waited"] = np.minimum.reduceat(np.where((kind == Mark.ENTER) | (kind == Mark.WAIT), time, np.inf), new)
        over = (kind == Mark.EXIT) | (kind == Mark.FAIL)
        stays["ended"] = np.minimum.reduceat(np.where(over, time, np.inf), new)
        stays["failed"] = np.maximum.reduceat(kind == Mark.FAIL, new)
        stays["sequence"] = rows["sequence"][new]
        known = self._numbered(int(rows["name"].max()), about)[rows["name"][new]]
        stays["channel"], stays["label"] = known[:, 0], known[:, 1]
        done = np.isfinite(stays["ended"])
        self._rows = rows[~np.repeat(done, np.diff(new, append=len(rows)))]
        self.open = stays[~done]
        ended = stays[done]
        self.ended = np.concatenate([self.ended, ended[np.argsort(ended["ended"], kind="stable")]])[-self._kept :]
        for channel in np.unique(stays["channel"]).tolist():
            highest = int(stays["sequence"][stays["channel"] == channel].max())
            self.entered[channel] = max(highest, self.entered.get(channel, 0))

    def _numbered(self, most: int, about: Callable[[int], About | None]) -> NDArray[np.uint32]:
        """Channel and label of each name up to this one."""
        more = [self._names.of_record(self.name, about(number)) for number in range(len(self._known), most + 1)]
        if more:
            self._known = np.concatenate([self._known, np.array(more, np.uint32)])
        return self._known


class FileLane(Lane):
    """A process whose file of events is read, perhaps while it is written."""

    def __init__(self, name: str, reader: Reader, names: Names) -> None:
        super().__init__(name, names)
        self.reader = reader

    def read(self) -> bool:
        """Take in what is new; returns whether there was something."""
        return self.take(self.reader.rows(), self.reader.about)


def lane_of(name: str, stamps: Sequence[Stamp], names: Names) -> Lane:
    """A process by events that were read already; all of them are kept."""
    abouts = {about: number for number, about in enumerate(dict.fromkeys(stamp.about for stamp in stamps))}
    rows = [(one.mark, abouts[one.about], one.sequence, one.time, i) for i, one in enumerate(stamps)]
    lane = Lane(name, names, kept=max(1, len(rows)))
    lane.take(np.array(rows, _ROW), list(abouts).__getitem__)
    return lane


def joined(lanes: Sequence[Lane]) -> Table:
    """The stays of all lanes, numbered in their order."""
    tables = [lane.stays for lane in lanes]
    for number, table in enumerate(tables):
        table["lane"] = number
    return np.concatenate([np.zeros(0, STAY), *tables])


def stays_of(run: Computation, times: Sequence[Floats], names: Names, groups: Container[str] | None = None) -> Table:
    """The stays in the collectives of these groups, by the events of a run; of all groups, also until messages came."""
    messages: dict[object, int] = {}
    channel = names.channel("messages", CallChannel(("sender", "receiver")))
    rows: list[tuple[float, float, float, int, int, int, int, bool]] = []
    for lane, history in enumerate(run.histories):
        since: dict[tuple[int, int], tuple[float, int]] = {}
        awaited: tuple[float, int] | None = None
        for event, time in zip(history, times[lane].tolist(), strict=True):
            if event.call is not None and (groups is None or event.call.group in groups):
                key = (names.of_call(event.call)[0], event.call.sequence)
                if event.kind is EventKind.ENTER:
                    since[key] = time, names.of_call(event.call)[1]
                elif event.kind is EventKind.EXIT and key in since:
                    begun, label = since.pop(key)
                    rows.append((begun, begun, time, key[1], key[0], label, lane, False))
            elif groups is None and event.kind is EventKind.SEND:
                number = messages.setdefault(event.message, len(messages))
                rows.append((time, time, time, number, channel, 0, lane, False))
            elif event.kind is EventKind.AWAIT:
                awaited = time, names.label(Label(event.what or "a receipt"))
            elif groups is None and event.kind is EventKind.RECEIVE and awaited is not None:
                number = messages.setdefault(event.message, len(messages))
                rows.append((awaited[0], awaited[0], time, number, channel, awaited[1], lane, False))
                awaited = None
        rows += [(begun, begun, np.inf, key[1], key[0], label, lane, False) for key, (begun, label) in since.items()]
        if groups is None and awaited is not None:
            number = messages.setdefault((lane, "never"), len(messages))
            rows.append((awaited[0], awaited[0], np.inf, number, channel, awaited[1], lane, False))
    return np.array(rows, STAY)
