"""The lanes of a run, and what of them is seen through a window: at most one thing for each pixel of a lane.

A wait for others ends when the last one that a call needs has entered it; the rest of the call is communication. What
was begun and is not waited for is *under way*. What is shorter than a pixel is put together with what lies beside it:
the pixel then has a share, of how much of it was spent that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np

from offbeat.monitor.page.names import Names
from offbeat.monitor.page.spans import SPAN, Floats, Lane, Table

WAIT, COMMUNICATE, UNDER_WAY, FAILED, STUCK = range(5)
KINDS: Final = ("wait", "communicate", "under way", "failed", "stuck")
"""`stuck`: the process was in it when the run ended, and never came out."""
TAIL: Final = 0.03
"""What is stuck is drawn this far beyond the last event, as a share of the whole: when it was ended is not known."""
PIECE: Final = np.dtype(
    [
        ("start", "<f8"),
        ("length", "<f8"),
        ("call", "<u4"),
        ("sequence", "<u4"),
        ("label", "<u2"),
        ("lane", "<u2"),
        ("kind", "u1"),
        ("share", "u1"),
    ]
)
"""What is drawn. `call` is the same for all that belongs together, `share` is out of 255."""
NO_CALL: Final = 2**32 - 1
"""The call of what was put together from several."""
MOST_STEPS: Final = 4000
"""More steps than this are not marked one by one."""


class Lanes:
    """All spans of a run at one moment, cut into pieces."""

    def __init__(self, lanes: Sequence[Lane], names: Names, now: float | None) -> None:
        """`now` is the time up to which a run has gone that still goes on; None of one that is over."""
        self.names = [lane.name for lane in lanes]
        self.labels = names.labels
        began = [lane.began for lane in lanes if lane.began is not None]
        self.start = min(began, default=0.0)
        self.stop = max([lane.last for lane in lanes if lane.began is not None], default=0.0)
        stuck = any(len(lane.open) for lane in lanes)
        self.now = (
            self.stop + (TAIL * (self.stop - self.start) if stuck else 0.0) if now is None else max(now, self.stop)
        )
        """Up to when there is something to be drawn."""
        self.steps = [lane.steps for lane in lanes]
        self.extents = [
            (lane.began or 0.0, self.now if now is not None and not lane.finished else lane.last) for lane in lanes
        ]
        self.pieces, self.last_in = _pieces(lanes, names, self.now, now is not None)
        """What is drawn; and in how many calls each lane was the last to enter."""

    def often_last(self, share: float, calls: int) -> list[str]:
        """Who was the last to enter at least this share of the calls of several, if there were at least so many."""
        total = int(self.last_in.sum())
        return [
            name
            for name, count in zip(self.names, self.last_in, strict=True)
            if total >= calls and count >= share * total
        ]

    @cached_property
    def _columns(self) -> tuple[Table, Table, Table, Table]:
        """Starts, stops, lengths and rows (a row is a kind of a lane), each by itself: far faster to look through."""
        starts, lengths = self.pieces["start"].copy(), self.pieces["length"].copy()
        rows = self.pieces["lane"].astype(np.int64) * len(KINDS) + self.pieces["kind"]
        return starts, starts + lengths, lengths, rows

    def window(self, start: float, stop: float, pixels: int) -> Table:
        """What is seen between two times on so many pixels: long pieces as they are, short ones put together."""
        starts, stops, lengths, rows = self._columns
        inside = np.flatnonzero((starts < stop) & (stops > start))
        width = (stop - start) / pixels
        is_short = lengths[inside] < width
        if np.count_nonzero(is_short) <= pixels:
            return self.pieces[inside]
        short = inside[is_short]
        pixel = np.clip(((starts[short] - start) / width).astype(np.int64), 0, pixels - 1)
        cells = _cells(rows[short] * pixels + pixel, lengths[short], len(self.names) * len(KINDS) * pixels)
        return np.concatenate([self.pieces[inside[~is_short]], _merged(*cells, start, width, pixels)])

    def ticks(self, start: float, stop: float) -> list[list[float]]:
        """When steps were made, by lane; nothing if there are too many to be told apart."""
        inside = [steps[(steps >= start) & (steps <= stop)] for steps in self.steps]
        return [steps.tolist() for steps in inside] if sum(map(len, inside)) <= MOST_STEPS else []

    def packed(self, pieces: Table, start: float, stop: float) -> bytes:
        """Pieces as a page reads them: the length of a head, the head as JSON, then column after column."""
        used = np.unique(pieces["label"]).tolist()
        head: dict[str, Any] = {
            "start": start,
            "stop": stop,
            "first": self.start,
            "last": self.now,
            "count": len(pieces),
            "lanes": self.names,
            "extents": self.extents,
            "kinds": KINDS,
            "labels": {str(number): self.labels[number] for number in used},
            "steps": self.ticks(start, stop),
        }
        text = msgspec.json.encode(head)
        text += b" " * (-(len(text) + 4) % 8)
        names: tuple[str, ...] = PIECE.names or ()
        columns = [np.ascontiguousarray(pieces[name]).tobytes() for name in names]
        return b"".join([len(text).to_bytes(4, "little"), text, *columns])


def _pieces(lanes: Sequence[Lane], names: Names, now: float, live: bool) -> tuple[Table, Table]:
    spans: Table = np.concatenate([np.zeros(0, SPAN), *(part for lane in lanes for part in (lane.spans, lane.open))])
    if not len(spans):
        return np.zeros(0, PIECE), np.zeros(len(lanes), np.int64)
    counts = [len(lane.spans) + len(lane.open) for lane in lanes]
    numbers = np.repeat(np.arange(len(lanes), dtype=np.uint16), counts)
    call, arrived, latest = _arrivals(spans, names)
    ended = np.minimum(spans["ended"], now)
    waited = np.minimum(spans["waited"], ended)
    # Who left before the last one came did not need it.
    met = np.where(arrived > ended, np.where(np.isfinite(spans["ended"]), waited, ended), np.maximum(arrived, waited))
    after = np.where(spans["failed"], FAILED, COMMUNICATE)
    waiting = np.where(np.isfinite(spans["ended"]) | live, WAIT, STUCK)
    # What nobody has ever waited for and whose end nobody has seen may have ended long ago.
    known = np.isfinite(spans["ended"]) | np.isfinite(spans["waited"])
    beside = np.where(known, waited, spans["begun"])
    cuts = ((spans["begun"], beside, UNDER_WAY), (waited, met, waiting), (met, ended, after))
    parts: list[Table] = []
    for start, stop, kind in cuts:
        part = np.zeros(len(spans), PIECE)
        part["start"], part["length"], part["kind"] = start, stop - start, kind
        part["call"], part["lane"], part["share"] = call, numbers, 255
        part["sequence"], part["label"] = spans["sequence"], np.minimum(spans["label"], 65535)
        parts.append(part[part["length"] > 0])
    return np.concatenate(parts), np.bincount(numbers[latest], minlength=len(lanes))


def _arrivals(spans: Table, names: Names) -> tuple[Table, Floats, Table]:
    """Of each span the number of its call, and when the last one that it needs came; never, if somebody has not.

    Also which spans were the last to enter a call of several.
    """
    keys = np.empty(len(spans), [("channel", "<u4"), ("sequence", "<u8")])
    keys["channel"], keys["sequence"] = spans["channel"], spans["sequence"]
    order = np.lexsort((spans["begun"], keys["sequence"], keys["channel"]))
    ranked = keys[order]
    first = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    groups = np.flatnonzero(first)
    there = np.diff(groups, append=len(order))
    latest = order[groups + there - 1]
    last = spans["begun"][latest]
    needed = np.array([len(members) for members in names.members], np.int64)[ranked["channel"][groups]]
    # Members whose events are gone, or who are not watched, count as there if somebody could leave.
    left = np.minimum.reduceat(spans["ended"][order], groups)
    last = np.where((there >= needed) | np.isfinite(left), last, np.inf)
    call = np.empty(len(spans), np.int64)
    call[order] = np.cumsum(first) - 1
    return call, np.where(needed[call] == 0, np.inf, last[call]), latest[there > 1]


def _cells(cell: Table, length: Table, count: int) -> tuple[Table, Table]:
    """Which cells have something in them, and how much time."""
    spent = np.bincount(cell, length, count)
    some = np.flatnonzero(spent)
    return some, spent[some]


def _merged(some: Table, spent: Table, start: float, width: float, pixels: int) -> Table:
    """One piece for each pixel of a lane in which something short lies, and for each kind."""
    found = np.zeros(len(some), PIECE)
    row, pixel = np.divmod(some, pixels)
    found["start"], found["length"] = start + pixel * width, width
    found["lane"], found["kind"] = np.divmod(row, len(KINDS))
    found["call"] = NO_CALL
    found["share"] = np.clip(np.ceil(spent / width * 255), 1, 255)
    return found
