"""From event records to stays: which process was in which call, from when to when, and since when it only waited.

Records are processed as whole columns, since a run of 64 workers may have a million of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.monitor.calls import SEND, call_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.histories import Call, Computation, EventKind
from offbeat.runtime.events.recorder import RECORDS, About, Mark, Reader, Stamp
from offbeat.runtime.events.servers import GROUP as SERVERS

Floats = NDArray[np.float64]
Table = NDArray[Any]

STAY: Final = np.dtype(
    [
        ("begun", "<f8"), ("waited", "<f8"), ("ended", "<f8"), ("sequence", "<u8"), ("channel", "<u4"),
        ("label", "<u4"), ("lane", "<u2"), ("failed", "?"),
    ]
)  # fmt: skip
"""`waited`: since when the process only waited, infinite if never; `ended`: infinite if the call is in flight."""
KEPT: Final = RECORDS  # Number of stays kept for each process, the latest ones: about two rings full of records.
_ROW: Final = np.dtype(
    [
        ("kind", "<u4"), ("name", "<u4"), ("sequence", "<u8"), ("time", "<f8"), ("value", "<i8"), ("number", "<u8"),
    ]
)  # fmt: skip
COMPUTATION: Final = np.dtype(
    [("start", "<f8"), ("stop", "<f8"), ("sequence", "<u4"), ("label", "<u4"), ("work", "u1")]
)  # fmt: skip
"""What a stage of a pipeline computed for a microbatch, which is its sequence number."""
WORKS: Final = ("microbatch forward", "microbatch backward", "microbatch weights")
_WORK: Final = {"forward": 0, "backward": 1, "input_gradient": 1, "weight_gradient": 2}
_FROM_ROOT: Final = ("broadcast", "scatter")


class Label(NamedTuple):
    """The name of a call in two parts, between which its number goes; and who waits for whom in it."""

    what: str  # `all_reduce`, `send to worker 1` …
    more: str = ""  # `(sum of float32 x 4) of group world, called at train.py:88`.
    root: str | None = None  # The member that sends or receives everything; None: all wait for all.
    gives: bool = False  # Whether the others wait for the root, instead of the root for the others.

    def numbered(self, sequence: int) -> str:
        """The name of the call with this number."""
        return f"{self.what} #{sequence} {self.more}" if self.more else self.what


UNKNOWN: Final = Label("something")


class CallChannel(NamedTuple):
    """A group or a pair of processes whose calls are numbered together."""

    members: tuple[str, ...] = ()  # Processes that take part in each call; empty if unknown.
    collective: bool = False


class Names:
    """Numbers for the labels and channels of one run, over all its processes."""

    def __init__(self) -> None:
        self._labels: dict[Label, int] = {}
        self._channels: dict[Hashable, int] = {}
        self.labels: list[Label] = []  # By number.
        self.channels: list[CallChannel] = []  # By number.
        self.label(UNKNOWN)

    def label(self, label: Label) -> int:
        """The number of a label."""
        if label not in self._labels:
            self._labels[label] = len(self.labels)
            self.labels.append(label)
        return self._labels[label]

    def channel(self, key: Hashable, channel: CallChannel) -> int:
        """The number of the channel with this key."""
        if key not in self._channels:
            self._channels[key] = len(self.channels)
            self.channels.append(channel)
        return self._channels[key]

    def of_call(self, call: Call) -> tuple[int, int]:
        """Channel and label of a collective."""
        return self.channel((call.group,), CallChannel(call.members, True)), self._label_of(call)

    def of_record(self, lane: str, about: About | None) -> tuple[int, int]:
        """Channel and label of a record: all members of a group share a channel, and so do both ends of messages."""
        if about is None:
            return self.channel((lane, None), CallChannel()), self.label(UNKNOWN)
        call = call_of(about, 0)
        if about.group == SERVERS:  # Each worker counts its own pulls.
            return self.channel((lane, about.group, about.operation), CallChannel()), self._label_of(call)
        if about.peer is None:
            return self.of_call(call)
        peer = worker_name(about.peer) if about.peer >= 0 else "anybody"
        label = self._label_of(call, f" {peer}", f", tag {about.tag}" if about.tag else "")
        if about.peer < 0:
            return self.channel((about.group, lane, about.operation, about.tag), CallChannel()), label
        ends = (lane, peer) if about.operation == SEND else (peer, lane)
        return self.channel((about.group, *ends, about.tag), CallChannel(ends)), label

    def _label_of(self, call: Call, peer: str = "", tag: str = "") -> int:
        what, _, more = str(call).partition(f" #{call.sequence} ")
        gives = call.root is not None and call.operation in _FROM_ROOT
        return self.label(Label(what + peer, more + tag, call.root, gives))


class Lane:
    """The stays and steps of one process, from the records read so far."""

    def __init__(self, name: str, names: Names, kept: int = KEPT) -> None:
        self.name = name
        self.ended: Table = np.zeros(0, STAY)  # Stays that have ended, by their ends.
        self.open: Table = np.zeros(0, STAY)  # Stays in flight.
        self.computed: Table = np.zeros(0, COMPUTATION)  # Computations of a stage of a pipeline.
        self.steps: Floats = np.zeros(0)  # Times of the steps.
        self.stepped = 0  # Number of steps seen, including those whose times are no longer kept.
        self.began: float | None = None  # Time of the first event read.
        self.last = 0.0  # Time of the last event.
        self.finished = False  # Whether its program has returned.
        self.entered: dict[int, int] = {}  # The highest call number on each channel.
        self._names, self._kept = names, kept
        self._known = np.zeros((0, 2), np.uint32)
        self._rows: Table = np.zeros(0, _ROW)

    @property
    def stays(self) -> Table:
        """All of them."""
        return np.concatenate([self.ended, self.open])

    def take(self, fresh: Table, about: Callable[[int], About | None]) -> bool:
        """Process new records; returns whether there were any."""
        if not len(fresh):
            return False
        self.began = float(fresh["time"][0]) if self.began is None else self.began
        self.last = float(fresh["time"][-1])
        self.finished = bool(fresh["kind"][-1] == Mark.END)
        steps = fresh[fresh["kind"] == Mark.STEP]
        self.stepped = max(self.stepped + len(steps), int(steps["sequence"].max(initial=0)))
        self.steps = np.concatenate([self.steps, steps["time"]])[-self._kept :]
        computed = fresh[fresh["kind"] == Mark.COMPUTED]
        if len(computed):
            self.computed = np.concatenate([self.computed, self._computations(computed, about)])[-self._kept :]
        calls = fresh[(fresh["kind"] >= Mark.ENTER) & (fresh["kind"] <= Mark.FAIL)]
        self._pair(np.concatenate([self._rows, calls]) if len(self._rows) else calls, about)
        return True

    def _computations(self, rows: Table, about: Callable[[int], About | None]) -> Table:
        """What was computed, by the records of when it was over."""
        made = np.zeros(len(rows), COMPUTATION)
        made["start"], made["stop"] = rows["time"] - 1e-9 * rows["value"], rows["time"]
        made["sequence"] = rows["sequence"]
        for name in np.unique(rows["name"]).tolist():
            what = about(name)
            if what is not None and what.operation in _WORK:
                own = rows["name"] == name
                made["work"][own] = _WORK[what.operation]
                made["label"][own] = self._names.label(Label(what.operation.replace("_", " "), what.words or ""))
        return made

    def _pair(self, rows: Table, about: Callable[[int], About | None]) -> None:
        """Match begins with ends; rows of calls that have not ended are kept for the next time."""
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
        numbers = range(len(self._known), int(rows["name"].max()) + 1)
        if numbers:
            more = [self._names.of_record(self.name, about(number)) for number in numbers]
            self._known = np.concatenate([self._known, np.array(more, np.uint32)])
        known = self._known[rows["name"][new]]
        stays["channel"], stays["label"] = known[:, 0], known[:, 1]
        done = np.isfinite(stays["ended"])
        self._rows = rows[~np.repeat(done, np.diff(new, append=len(rows)))]
        self.open = stays[~done]
        ended = stays[done]
        self.ended = np.concatenate([self.ended, ended[np.argsort(ended["ended"], kind="stable")]])[-self._kept :]
        for channel in np.unique(stays["channel"]).tolist():
            highest = int(stays["sequence"][stays["channel"] == channel].max())
            self.entered[channel] = max(highest, self.entered.get(channel, 0))


class FileLane(Lane):
    """A process whose events file is read, possibly while it is written."""

    def __init__(self, name: str, reader: Reader, names: Names) -> None:
        super().__init__(name, names)
        self.reader = reader

    def read(self) -> bool:
        """Process new records; returns whether there were any."""
        return self.take(self.reader.rows(), self.reader.about)


def lane_of(name: str, stamps: Sequence[Stamp], names: Names) -> Lane:
    """A process from events in memory; all of them are kept."""
    abouts = {about: number for number, about in enumerate(dict.fromkeys(stamp.about for stamp in stamps))}
    rows = [
        (stamp.mark, abouts[stamp.about], stamp.sequence, stamp.time, stamp.value, i) for i, stamp in enumerate(stamps)
    ]
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
    """Stays in the collectives of these groups, or of all, from the events of a run."""
    rows: list[tuple[float, float, float, int, int, int, int, bool]] = []
    for lane, history in enumerate(run.histories):
        since: dict[tuple[int, int], tuple[float, int]] = {}
        for event, time in zip(history, times[lane].tolist(), strict=True):
            if event.call is None or (groups is not None and event.call.group not in groups):
                continue
            channel, label = names.of_call(event.call)
            key = (channel, event.call.sequence)
            if event.kind is EventKind.ENTER:
                since[key] = time, label
            elif key in since:
                begun, label = since.pop(key)
                rows.append((begun, begun, time, key[1], channel, label, lane, False))
        for (channel, number), (begun, label) in since.items():
            rows.append((begun, begun, np.inf, number, channel, label, lane, False))
    return np.array(rows, STAY)
