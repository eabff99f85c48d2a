"""The space-time diagram of a run as plain data: what is drawn, not how.

Each process has a lane, and time goes along it. Everything refers to lanes by their number, and to times on the
diagram's own axis: seconds since the first event of the run, or, for logs without times, logical time, in which every
effect comes after its causes. Pictures and traces are made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

SECONDS: Final = "seconds"
LOGICAL: Final = "logical"
"""An axis by Lamport clocks: what is further right did not happen before what is further left, and nothing more."""
MANY: Final = "many"
"""Intervals too short to be told apart at this size; `Span.mix` says of what."""


class Span(Struct, frozen=True):
    """What a process was in for a while. The spans of a lane do not overlap."""

    lane: int
    kind: str
    """`many`, or one of `intervals.KINDS`."""
    start: float
    stop: float
    label: str = ""
    """In words: `all_reduce #57 (sum of float32 x 4) of group world, called at train.py:88`."""
    count: int = 1
    """How many spans were merged into it."""
    mix: Mapping[str, float] = {}
    """Of merged ones: which share of the span is of which kind."""
    open: bool = False
    """Whether it had not ended when the last event was written."""


class Arrow(Struct, frozen=True):
    """A message, from its sending to its receipt; in logs, from a cause to its effect."""

    source: int
    """The lane where it begins."""
    target: int
    start: float
    stop: float
    label: str = ""
    count: int = 1
    """How many messages were merged into it."""


class Stay(Struct, frozen=True):
    """One member's time in a collective."""

    lane: int
    start: float
    stop: float
    open: bool = False
    """Whether the member has never left it."""


class Band(Struct, frozen=True):
    """A collective, joined over its members' lanes."""

    label: str
    stays: tuple[Stay, ...]
    """By lane; of several merged ones, from the first entry to the last exit."""
    last: int | None = None
    """The lane of whoever entered last; None of merged ones, and where not all have entered."""
    missing: tuple[int, ...] = ()
    """Lanes of members that have never entered."""
    count: int = 1
    """How many collectives were merged into it."""


class Moment(Struct, frozen=True):
    """Something that happened at one moment: a step, a checkpoint, a fault, an end, any event of a log."""

    lane: int
    kind: str
    """`step`, `end`, `fail`, `checkpoint`, `fault` …; `event` in logs."""
    time: float
    label: str = ""
    count: int = 1
    """How many were merged into it."""


class CutLine(Struct, frozen=True):
    """A cut: a line through all lanes; what is left of it is in the cut."""

    label: str
    counts: tuple[int, ...]
    """How many events of each lane are in it, from the run's beginning."""
    times: tuple[float, ...]
    """Where it crosses each lane: between the last event in it and the first behind it."""
    consistent: bool
    words: str = ""
    """If it is not consistent: which effect is in it without its cause."""


class Diagram(Struct, frozen=True):
    """A space-time diagram, or a window of one."""

    title: str
    axis: str
    """`seconds` or `logical`."""
    start: float
    """The window, on the axis."""
    stop: float
    names: tuple[str, ...]
    """One lane each, from top to bottom."""
    spans: tuple[Span, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    bands: tuple[Band, ...] = ()
    marks: tuple[Moment, ...] = ()
    cuts: tuple[CutLine, ...] = ()
    events: int = 0
    """How many events the window holds."""
    origin: float = 0.0
    """The time of the events' own clock at which this axis is 0."""
    notes: tuple[str, ...] = ()
    """What the picture leaves out or puts together, in words, to be shown with it."""
