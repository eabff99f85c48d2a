"""The first shape of a protocol: a schedule, for what is known beforehand, as rounds that describe all ranks at once.

A schedule is a sequence of rounds. Every rank has one buffer of `layout.count` elements, which holds its contribution
at first and the result in the end, and an inbox for what has reached it and is not yet used.

`SEND` (two-sided) and `FETCH` (one-sided, through shared memory) bring a range of the source's buffer into the target's
inbox. `REDUCE` adds what came from the source to the target's buffer, `COPY` puts it in its place; each entry of them
uses up one message, with the same source, target, range and place. A `COPY` from a rank to itself publishes the range:
what others fetch is then that copy, until it is published anew, and not the live buffer. So a schedule says where a
copy is needed, and one that needs none (zero copy) has none. What a rank sends to itself is only set aside: it passes
no port.

All transfers of a round read what was there when the round began. A rank begins its part of a round when it has done
its parts of the rounds in `after`; a part that is empty is done when it begins. A sender and a receiver must both have
begun, a reader only needs the source to have finished the rounds in `after`, or with none, to have come at all.

Entries may have weights: a `REDUCE` then adds what came times its weight, and a `SCALE`, which needs no message,
multiplies a range by it. So mixing with neighbours is a schedule, too.

Several entries may reduce into one range of a target: they do so in their order. `REDUCE` has the buffer on the left
and the message on the right, except where two ranks exchange the same range in one round: there the lower rank's is on
the left, so that both get the same bits.

In a pipeline, whose values are not summed, what a `SEND` brings is used by the `COMPUTE` rounds that name it in
`after`; `what` then says what is computed or brought (`protocols.pipelines`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import UsageError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Op(StrEnum):
    """What happens in a round."""

    SEND = "send"  # Two-sided: source and target both take part.
    FETCH = "fetch"  # One-sided: the target reads the source's published (or live) range.
    REDUCE = "reduce"  # The target combines what came from the source with what it has.
    COPY = "copy"  # The target puts what came from the source in its place; from itself to itself, it publishes.
    SCALE = "scale"  # The target multiplies what it has by a weight; source equals target.
    COMPUTE = "compute"  # Work that moves no data; source equals target.


class Stream(StrEnum):
    """What may overlap: rounds of different streams do, if neither comes after the other."""

    COMPUTE = "compute"
    COMMUNICATE = "communicate"


@dataclass(frozen=True)
class Member:
    """One rank of a view."""

    name: int  # Its identity outside of this view, such as its global rank.
    host: int = 0  # Which host it lives on; ranks of one host share memory.


@dataclass(frozen=True)
class View:
    """The members in this membership epoch, and their hosts. A rank is a position in `members`."""

    members: tuple[Member, ...]
    epoch: int = 0

    def __post_init__(self) -> None:
        """Refuse a view of nobody."""
        if not self.members:
            raise UsageError("a view has at least one member")

    @classmethod
    def of(cls, size: int, hosts: Sequence[int] | None = None) -> View:
        """`size` ranks, all on one host unless a host is given for each."""
        places = [0] * size if hosts is None else hosts
        if len(places) != size:
            raise UsageError(f"{len(places)} hosts were given for {size} ranks; give one for each")
        return cls(tuple(Member(name, host) for name, host in enumerate(places)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def hosts(self) -> IntArray:
        """The host of each rank."""
        return np.array([member.host for member in self.members], dtype=np.int64)


@dataclass(frozen=True)
class Layout:
    """What is exchanged."""

    count: int  # Elements in a rank's buffer: of the whole result, also where a rank brings only a block of it.
    itemsize: int = 4  # Bytes of an element.
    root: int = 0  # The rank that a broadcast starts from, and that a reduce, gather or scatter is about.

    def blocks(self, pieces: int) -> IntArray:
        """Boundaries that cut the buffer into `pieces` blocks, as even as can be, the longer ones first."""
        each, longer = divmod(self.count, pieces)
        numbers = np.arange(pieces + 1, dtype=np.int64)
        return numbers * each + np.minimum(numbers, longer)


@dataclass(frozen=True)
class Round:
    """One step of a schedule for all ranks: entry i moves [start, stop) of source's buffer to `place` at target."""

    op: Op
    source: IntArray
    target: IntArray
    start: IntArray
    stop: IntArray
    place: IntArray  # Where the range begins in the target's buffer; almost always where it begins in the source's.
    after: tuple[int, ...]  # Numbers of earlier rounds that a rank must have done its part of.
    stream: Stream = Stream.COMMUNICATE
    seconds: float = 0.0  # How long a COMPUTE takes; other rounds take what their bytes cost.
    weight: FloatArray | None = None  # By what each entry of a REDUCE or SCALE multiplies; None: by 1.
    what: object = None  # Of a pipeline: what a COMPUTE computes (`Action`), or a SEND brings (`Crossing`).

    @property
    def lengths(self) -> IntArray:
        """Elements that each entry moves."""
        return self.stop - self.start

    def used(self, op: Op, after: tuple[int, ...]) -> Round:
        """The round that uses what this one brings: the same entries under another operation."""
        return Round(op, self.source, self.target, self.start, self.stop, self.place, after, self.stream)


Schedule = Callable[[View, Layout], Iterator[Round]]  # The protocol itself: the rounds for a view and a layout.


def entries(
    op: Op,
    source: ArrayLike,
    target: ArrayLike,
    start: ArrayLike,
    stop: ArrayLike,
    after: tuple[int, ...],
    place: ArrayLike | None = None,
) -> Round:
    """A round from arrays or single numbers, broadcast to the same length; empty ranges are omitted."""
    columns: list[Any] = [source, target, start, stop, start if place is None else place]
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value, dtype=np.int64)) for value in columns))
    kept = arrays[3] > arrays[2]
    if kept.all():
        return Round(op, *arrays, after=after)
    return Round(op, *(array[kept] for array in arrays), after=after)
