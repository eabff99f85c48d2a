"""The space-time diagram of a run as plain data: what is drawn, not how.

Each process has a lane, and time runs along it. Everything refers to lanes by number, and to times on the diagram's own
axis: seconds since the first event of the run, or, for logs without times, logical time, in which every effect comes
after its causes. Pictures and Chrome traces are made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

SECONDS: Final = "seconds"
LOGICAL: Final = "logical"  # An axis of Lamport clocks: no event happened before any event further left.
MANY: Final = "many"  # Intervals too short to tell apart at this size; `Span.mix` lists their kinds.


class Span(Struct, frozen=True):
    """What a process was doing for a while. The spans of a lane do not overlap."""

    lane: int
    kind: str  # `many`, or one of `intervals.KINDS`.
    start: float
    stop: float
    label: str = ""  # For example `all_reduce #57 (sum of float32 x 4) of group world, called at train.py:88`.
    count: int = 1  # Number of spans merged into it.
    mix: Mapping[str, float] = {}  # Of merged spans: the share of each kind.
    open: bool = False  # Whether it was still going on at the last event.


class Arrow(Struct, frozen=True):
    """A message, from sending to receipt; in logs, from a cause to its effect."""

    source: int  # Lane of the sender.
    target: int
    start: float
    stop: float
    label: str = ""
    count: int = 1  # Number of messages merged into it.


class Stay(Struct, frozen=True):
    """One member's time in a collective."""

    lane: int
    start: float
    stop: float
    open: bool = False  # Whether the member never left it.


class Band(Struct, frozen=True):
    """A collective, joined over its members' lanes."""

    label: str
    stays: tuple[Stay, ...]  # By lane; of merged collectives, from the first entry to the last exit.
    last: int | None = None  # Lane of the last member to enter; None if merged, or if some have not entered.
    missing: tuple[int, ...] = ()  # Lanes of members that never entered.
    count: int = 1  # Number of collectives merged into it.


class Moment(Struct, frozen=True):
    """Something at a single point in time: a step, a checkpoint, a fault, an end, any event of a log."""

    lane: int
    kind: str  # `step`, `end`, `fail`, `checkpoint`, `fault` …; `event` in logs.
    time: float
    label: str = ""
    count: int = 1  # Number of moments merged into it.


class CutLine(Struct, frozen=True):
    """A cut: a line through all lanes, with the events of the cut to its left."""

    label: str
    counts: tuple[int, ...]  # Number of events of each lane in the cut, from the start of the run.
    times: tuple[float, ...]  # Where it crosses each lane: between the last event inside and the first outside.
    consistent: bool
    words: str = ""  # If it is not consistent: which effect is in it without its cause.


class Diagram(Struct, frozen=True):
    """A space-time diagram, or a window of one."""

    title: str
    axis: str  # `seconds` or `logical`.
    start: float  # Start of the window, on the axis.
    stop: float
    names: tuple[str, ...]  # Of the lanes, from top to bottom.
    spans: tuple[Span, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    bands: tuple[Band, ...] = ()
    marks: tuple[Moment, ...] = ()
    cuts: tuple[CutLine, ...] = ()
    events: int = 0  # Number of events in the window.
    origin: float = 0.0  # Time on the events' own clock at which this axis is 0.
    machines: tuple[str, ...] = ()  # Of each lane its machine and that clock's offset; empty if all are on one.
    notes: tuple[str, ...] = ()  # What the picture omits or merges, to be shown with it.
