"""From stays to intervals (waiting, communicating, in flight), and what of them a window shows.

A wait for others ends when the last member that a call needs has entered it; the rest of the call is communication. A
call that was begun and is not waited for is *under way*. Intervals shorter than a pixel of the window are merged with
their neighbours: the pixel then has a share, of how much of it was spent that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from offbeat.monitor.diagram.waits import WORKS, Floats, Lane, Names, Table

KINDS: Final = ("wait", "communicate", "under way", "failed", "stuck", "compute", "input", "evaluate", "other", *WORKS)
"""`stuck`: the process was in it when the run ended, and never left. The last seven are a process's own work, of which
the last three are for a microbatch, on a stage of a pipeline."""
WAIT, COMMUNICATE, UNDER_WAY, FAILED, STUCK, COMPUTE, INPUT, EVALUATE, OTHER, FORWARD, *_ = range(len(KINDS))
INTERVAL: Final = np.dtype(
    [
        ("start", "<f8"), ("stop", "<f8"), ("call", "<u4"), ("sequence", "<u4"), ("count", "<u4"), ("share", "<f4"),
        ("label", "<u2"), ("lane", "<u2"), ("kind", "u1"), ("open", "?"),
    ]
)  # fmt: skip
"""`call` is the same for all intervals of one call; `count` and `share` are of merged intervals."""
NO_CALL: Final = 2**32 - 1  # The call of a process's own work, and of merged intervals.


class CallGroups:
    """Stays grouped by call, and when the members that each stay needs had entered."""

    def __init__(self, stays: Table, names: Names, lanes: Sequence[str]) -> None:
        self.stays = stays
        order = np.lexsort((stays["begun"], stays["sequence"], stays["channel"]))
        ranked = stays[["channel", "sequence"]][order]
        new = np.concatenate([[True], ranked[1:] != ranked[:-1]]) if len(stays) else np.zeros(0, bool)
        self._order, self._edges = order, np.append(np.flatnonzero(new), len(order))
        self.of_stay = np.empty(len(stays), np.int64)  # The number of each stay's call.
        self.of_stay[order] = np.cumsum(new) - 1
        present = np.diff(self._edges)
        last = order[self._edges[1:] - 1]
        self.decisive: Table = last[present > 1]  # The stays that were the last to enter a call of several members.
        self.ready = self._ready(names, lanes, present, stays["begun"][last])
        """For each stay, when the last member that it needs entered; infinite if one has not."""

    def __len__(self) -> int:
        return len(self._edges) - 1

    def of(self, call: int) -> Table:
        """The stays of a call, by their start."""
        return self.stays[self._order[self._edges[call] : self._edges[call + 1]]]

    def reduced(self, ufunc: np.ufunc, column: str) -> Table:
        """One number for each call, such as the minimum of a column."""
        return ufunc.reduceat(self.stays[column][self._order], self._edges[:-1]) if len(self) else np.zeros(0)

    def _ready(self, names: Names, lanes: Sequence[str], present: Table, last: Floats) -> Floats:
        stays, call = self.stays, self.of_stay
        members = np.array([len(channel.members) for channel in names.channels] or [0])
        needed = members[self.reduced(np.minimum, "channel").astype(np.int64)]
        # Members whose events are gone, or that are not watched, count as present if anyone could leave.
        left = self.reduced(np.minimum, "ended")
        all_in = np.where((needed > 0) & ((present >= needed) | np.isfinite(left)), last, np.inf)[call]
        index = {name: number for number, name in enumerate(lanes)}
        root = np.array([index.get(label.root or "", -1) for label in names.labels])[stays["label"]]
        gives = np.array([label.gives for label in names.labels])[stays["label"]]
        is_root = stays["lane"] == root
        root_in = np.full(len(self), np.inf)
        root_in[call[is_root]] = stays["begun"][is_root]
        return np.where((root < 0) | (is_root & ~gives), all_in, np.where(gives & ~is_root, root_in[call], -np.inf))


def intervals(calls: CallGroups, now: float, live: bool) -> Table:
    """Each stay in up to three parts; one that has not ended lasts until `now`, and is stuck if the run is over."""
    stays = calls.stays
    ended = np.minimum(stays["ended"], now)
    waited = np.minimum(stays["waited"], ended)
    over = np.isfinite(stays["ended"])
    # A member that left before the last one came did not need it; whom a failed call needed is unknown.
    met = np.where(over & np.isfinite(calls.ready) | stays["failed"], waited, ended)
    met = np.where(calls.ready <= ended, np.maximum(calls.ready, waited), met)
    after = np.where(stays["failed"], FAILED, COMMUNICATE)
    waiting = np.where(over | live, WAIT, STUCK)
    # A call that nobody waited for and whose end nobody saw may have ended long ago.
    beside = np.where(over | np.isfinite(stays["waited"]), waited, stays["begun"])
    parts: list[Table] = []
    for start, stop, kind in ((stays["begun"], beside, UNDER_WAY), (waited, met, waiting), (met, ended, after)):
        part = np.zeros(len(stays), INTERVAL)
        part["start"], part["stop"], part["kind"], part["open"] = start, stop, kind, ~over & (stop == ended)
        part["call"], part["lane"], part["sequence"] = calls.of_stay, stays["lane"], stays["sequence"]
        part["label"], part["count"], part["share"] = np.minimum(stays["label"], 65535), 1, 1.0
        parts.append(part[start < stop])
    return np.concatenate(parts)


def computations(lanes: Sequence[Lane]) -> Table:
    """What the stages of a pipeline computed for each microbatch."""
    tables: list[Table] = [np.zeros(0, INTERVAL)]
    for number, lane in enumerate(lanes):
        part = np.zeros(len(lane.computed), INTERVAL)
        for column in ("start", "stop", "sequence"):
            part[column] = lane.computed[column]
        part["kind"], part["label"] = FORWARD + lane.computed["work"], np.minimum(lane.computed["label"], 65535)
        part["call"], part["count"], part["share"], part["lane"] = NO_CALL, 1, 1.0, number
        tables.append(part)
    return np.concatenate(tables)


def apart(lane: Table) -> Table:
    """The intervals of one lane in order and without overlaps: the one that began first wins."""
    lane = lane[np.lexsort((lane["stop"], lane["start"]))]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(lane["stop"])[:-1]])
    lane["start"] = np.maximum(lane["start"], before)
    return lane[lane["start"] < lane["stop"]]


def layered(below: Table, above: Table) -> Table:
    """The intervals of one lane in order; those below show where none above hides them."""
    left = np.concatenate([[-np.inf], above["stop"]])
    right = np.concatenate([above["start"], [np.inf]])
    first = np.searchsorted(right, below["start"], "right")
    counts = np.maximum(0, np.searchsorted(left, below["stop"], "left") - first)
    gap = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
    seen = np.repeat(below, counts)
    seen["start"], seen["stop"] = np.maximum(seen["start"], left[gap]), np.minimum(seen["stop"], right[gap])
    lane = np.concatenate([seen[seen["start"] < seen["stop"]], above])
    return lane[np.argsort(lane["start"], kind="stable")]


class Window:
    """Intervals as separate columns, which are far faster to search."""

    def __init__(self, table: Table, lanes: int) -> None:
        self.all = table
        self._lanes = lanes
        self._starts, self._stops = table["start"].copy(), table["stop"].copy()
        self._lengths = self._stops - self._starts
        self._kinds = int(table["kind"].max(initial=0)) + 1
        self._rows = table["lane"].astype(np.int64) * self._kinds + table["kind"]

    def seen(self, start: float, stop: float, pixels: int, most: int | None = None) -> tuple[Table, Table]:
        """What this number of pixels shows between two times: long intervals as they are, and merged short ones.

        There is at most one merged interval for each pixel, lane and kind. Short ones are not merged if there are at
        most `most` of them; by default, as many as pixels.
        """
        inside = np.flatnonzero((self._starts < stop) & (self._stops > start))
        width = (stop - start) / pixels
        is_short = self._lengths[inside] < width
        if np.count_nonzero(is_short) <= (pixels if most is None else most):
            return self.all[inside], self.all[:0]
        short = inside[is_short]
        pixel = np.clip(((self._starts[short] - start) / width).astype(np.int64), 0, pixels - 1)
        cell = self._rows[short] * pixels + pixel
        size = self._lanes * self._kinds * pixels
        counts = np.bincount(cell, minlength=size)
        used = np.flatnonzero(counts)
        merged = np.zeros(len(used), INTERVAL)
        row, pixel = np.divmod(used, pixels)
        merged["start"], merged["stop"] = start + pixel * width, start + (pixel + 1) * width
        merged["lane"], merged["kind"] = np.divmod(row, self._kinds)
        merged["call"], merged["count"] = NO_CALL, counts[used]
        merged["share"] = np.bincount(cell, self._lengths[short], size)[used] / width
        return self.all[inside[~is_short]], merged
