"""The lanes of a run, and what of them is seen through a window: at most one thing for each pixel of a lane.

A wait for others ends when the last one that a call needs has entered it; the rest of the call is communication. What
was begun and is not waited for is *under way*. What is shorter than a pixel is put together with what lies beside it:
the pixel then has a share, of how much of it was spent that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from offbeat.monitor.page.names import Names
from offbeat.monitor.page.spans import SPAN, Floats, Lane, Table

WAIT, COMMUNICATE, UNDER_WAY, FAILED = range(4)
KINDS: Final = ("wait", "communicate", "under way", "failed")
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

    def __init__(self, lanes: Sequence[Lane], names: Names, now: float) -> None:
        self.names = [lane.name for lane in lanes]
        self.labels = names.labels
        began = [lane.began for lane in lanes if lane.began is not None]
        self.start = min(began, default=0.0)
        self.stop = max([lane.last for lane in lanes if lane.began is not None], default=0.0)
        self.now = max(now, self.stop)
        self.steps = [lane.steps for lane in lanes]
        self.extents = [(lane.began or 0.0, lane.last if lane.finished or not now else self.now) for lane in lanes]
        self.pieces = _pieces(lanes, names, self.now)

    def window(self, start: float, stop: float, pixels: int) -> Table:
        """What is seen between two times on so many pixels: long pieces as they are, short ones put together."""
        inside = self.pieces[(self.pieces["start"] < stop) & (self.pieces["start"] + self.pieces["length"] > start)]
        width = (stop - start) / pixels
        short = inside["length"] < width
        if np.count_nonzero(short) <= pixels:
            return inside
        return np.concatenate([inside[~short], _merged(inside[short], start, width, pixels, len(self.names))])

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


def _pieces(lanes: Sequence[Lane], names: Names, now: float) -> Table:
    spans: Table = np.concatenate([np.zeros(0, SPAN), *(part for lane in lanes for part in (lane.spans, lane.open))])
    if not len(spans):
        return np.zeros(0, PIECE)
    counts = [len(lane.spans) + len(lane.open) for lane in lanes]
    numbers = np.repeat(np.arange(len(lanes), dtype=np.uint16), counts)
    call, arrived = _arrivals(spans, names)
    ended = np.minimum(spans["ended"], now)
    waited = np.minimum(spans["waited"], ended)
    # Who left before the last one came did not need it.
    met = np.where(arrived > ended, np.where(np.isfinite(spans["ended"]), waited, ended), np.maximum(arrived, waited))
    after = np.where(spans["failed"], FAILED, COMMUNICATE)
    cuts = ((spans["begun"], waited, UNDER_WAY), (waited, met, WAIT), (met, ended, after))
    parts: list[Table] = []
    for start, stop, kind in cuts:
        part = np.zeros(len(spans), PIECE)
        part["start"], part["length"], part["kind"] = start, stop - start, kind
        part["call"], part["lane"], part["share"] = call, numbers, 255
        part["sequence"], part["label"] = spans["sequence"], np.minimum(spans["label"], 65535)
        parts.append(part[part["length"] > 0])
    return np.concatenate(parts)


def _arrivals(spans: Table, names: Names) -> tuple[Table, Floats]:
    """Of each span the number of its call, and when the last one that it needs came; never, if somebody has not."""
    keys = np.empty(len(spans), [("channel", "<u4"), ("sequence", "<u8")])
    keys["channel"], keys["sequence"] = spans["channel"], spans["sequence"]
    order = np.lexsort((keys["sequence"], keys["channel"]))
    ranked = keys[order]
    first = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    groups = np.flatnonzero(first)
    last = np.maximum.reduceat(spans["begun"][order], groups)
    there = np.diff(groups, append=len(order))
    needed = np.array([len(members) for members in names.members], np.int64)[ranked["channel"][groups]]
    # Members whose events are gone, or who are not watched, count as there if somebody could leave.
    left = np.minimum.reduceat(spans["ended"][order], groups)
    last = np.where((there >= needed) | np.isfinite(left), last, np.inf)
    call = np.empty(len(spans), np.int64)
    call[order] = np.cumsum(first) - 1
    return call, np.where(needed[call] == 0, np.inf, last[call])


def _merged(short: Table, start: float, width: float, pixels: int, lanes: int) -> Table:
    """One piece for each pixel of a lane in which something short lies, and for each kind."""
    pixel = np.clip(((short["start"] - start) / width).astype(np.int64), 0, pixels - 1)
    cell = (short["lane"].astype(np.int64) * len(KINDS) + short["kind"]) * pixels + pixel
    size = lanes * len(KINDS) * pixels
    spent = np.bincount(cell, short["length"], size)
    some = np.flatnonzero(np.bincount(cell, minlength=size))
    found = np.zeros(len(some), PIECE)
    found["start"] = start + some % pixels * width
    found["length"] = width
    found["lane"], found["kind"] = some // pixels // len(KINDS), some // pixels % len(KINDS)
    found["call"] = NO_CALL
    found["share"] = np.clip(np.ceil(spent[some] / width * 255), 1, 255)
    return found
