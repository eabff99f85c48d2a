"""What workers exchange, as the description by which it is executed, counted and predicted; and whole steps of it.

An executed collective is described by an `Exchanged`: the operation, the algorithm, the bytes. Its schedule says what
each rank sends, and how long it takes on a network. So `bytes_sent` and the predicted step cannot differ from what ran.
A step is one schedule, too: computing, and exchanges after it or overlapping it, each with its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct

from offbeat.protocols.checker import cost
from offbeat.protocols.collectives import Collective, algorithm
from offbeat.protocols.gossip.mixing import mix, tell
from offbeat.protocols.schedule import Layout, Op, Round, Schedule, Stream, View

SMALL_GRADIENT = 1 << 14  # Gradients of up to this many elements are packed together.

Part = tuple[Schedule, Layout]  # An exchange and its layout: its ranges are counted in a buffer of its own.
Row = tuple[float, ...]
Matrix = tuple[Row, ...]


class Exchanged(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One exchange of all workers."""

    what: Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "mix", "mix_in_memory", "tell"]
    by: str  # The algorithm; between neighbours, the number of the matrix.
    nbytes: int  # Bytes of each worker's row; of an all-gather, of each worker's block.
    itemsize: int = 1  # Bytes of an element: rows are split between elements.
    root: int = 0  # The rank whose row is broadcast.

    @property
    def mixes(self) -> bool:
        """Whether it is made between neighbours only."""
        return self.what in ("mix", "mix_in_memory", "tell")

    def part(self, size: int, matrices: Sequence[Matrix] = ()) -> Part:
        """The schedule among `size` workers, and its layout."""
        whole = self.nbytes * size if self.what == "all_gather" else self.nbytes
        layout = Layout(whole // self.itemsize, self.itemsize, self.root)
        if self.what in ("mix", "mix_in_memory"):
            return mix(np.asarray(matrices[int(self.by)]), self.what == "mix_in_memory"), layout
        if self.what == "tell":
            matrix = np.asarray(matrices[int(self.by)])
            # The buffer of the rank with most neighbours: its own message, and one of each.
            longest = int((matrix != 0).sum(axis=1).max()) + 1
            return tell(matrix, np.full(size, self.nbytes)), Layout(longest * self.nbytes, 1)
        return algorithm(Collective(self.what), self.by).schedule, layout


def sum_in_memory(nbytes: int, itemsize: int, own_blocks: bool = False) -> Exchanged:
    """An in-place sum of rows in shared memory; or only of each worker's own block of them."""
    if own_blocks:
        return Exchanged(what="reduce_scatter", by="one_shot", nbytes=nbytes, itemsize=itemsize)
    return Exchanged(what="all_reduce", by="two_shot", nbytes=nbytes, itemsize=itemsize)


class GradientShape(NamedTuple):
    """The properties of a gradient that decide how it is summed."""

    kind: Hashable  # Gradients of one kind can share a row.
    length: int
    itemsize: int


class SumsInMemory(NamedTuple):
    """How the gradients of a step are summed by workers that share memory."""

    packed: tuple[tuple[int, ...], ...]  # Indices of small ones: side by side in a row for each kind.
    in_place: tuple[tuple[int, ...], ...]  # Indices of large ones: summed in place, those of a kind together.
    exchanges: tuple[Exchanged, ...]  # The exchanges, in the same order.


def sums_in_memory(gradients: Sequence[GradientShape], by: Callable[[int], str], own_blocks: bool) -> SumsInMemory:
    """Plan the sums of these gradients; `by` names the algorithm for a row of that many bytes."""
    groups: dict[tuple[bool, Hashable], list[int]] = {}
    for number, gradient in enumerate(gradients):
        groups.setdefault((gradient.length > SMALL_GRADIENT, gradient.kind), []).append(number)
    packed = [tuple(members) for (large, _), members in groups.items() if not large]
    in_place = [tuple(members) for (large, _), members in groups.items() if large]
    exchanges: list[Exchanged] = []
    for members in (*packed, *in_place):
        itemsize = gradients[members[0]].itemsize
        nbytes = sum(gradients[i].length for i in members) * itemsize
        if members in packed:
            exchanges.append(Exchanged(what="all_reduce", by=by(nbytes), nbytes=nbytes, itemsize=itemsize))
        else:
            exchanges.append(sum_in_memory(nbytes, itemsize, own_blocks))
    return SumsInMemory(tuple(packed), tuple(in_place), tuple(exchanges))


def sent_by(schedule: Schedule, layout: Layout, view: View, rank: int) -> int:
    """Bytes that a rank sends in a schedule."""
    return int(cost(schedule(view, layout), view, layout).bytes_sent[rank])


def in_turn(parts: Sequence[Part]) -> Schedule:
    """Exchanges that each begin when the previous one is done; each comes with its own layout."""

    def rounds(view: View, layout: Layout) -> Iterator[Round]:  # noqa: ARG001
        number, after = 0, ()
        for schedule, own in parts:
            first = number
            for each in schedule(view, own):
                yield _after(each, first, after)
                number += 1
            after = tuple(range(first, number)) or after

    return rounds


def beside(seconds: Sequence[float], parts: Sequence[tuple[float, Part]]) -> Schedule:
    """One step in which exchanges overlap computing, as gradients are summed during backward.

    Rank r computes for `seconds[r]`. Each part comes with the share of that which must be computed since the previous
    part; it begins when that is done, and the previous exchange is over. The rest of computing comes last.
    """

    def rounds(view: View, layout: Layout) -> Iterator[Round]:  # noqa: ARG001
        number, after = 0, ()
        computed: tuple[int, ...] = ()
        for share, (schedule, own) in (*parts, (1.0 - sum(share for share, _ in parts), (in_turn(()), Layout(0)))):
            begun = number
            for each in _computing([share * spent for spent in seconds], view, own):
                yield _after(each, 0, computed)
                number += 1
            computed = tuple(range(begun, number)) or computed
            first, before = number, (*after, *computed)
            for each in schedule(view, own):
                yield _after(each, first, before)
                number += 1
            after = tuple(range(first, number)) or after

    return rounds


def steps(seconds: Sequence[Sequence[float]], exchange: Callable[[int], Schedule | None]) -> Schedule:
    """Steps of computing, each followed by an exchange if there is one for its number.

    `seconds[k][r]` is how long rank r computes in step k. `local(H)` exchanges by an all-reduce in every H-th step,
    gossip by `mix` in every step.
    """

    def rounds(view: View, layout: Layout) -> Iterator[Round]:
        parts: list[Part] = []
        for step, durations in enumerate(seconds):
            schedules = (partial(_computing, durations), exchange(step))
            parts += [(schedule, layout) for schedule in schedules if schedule is not None]
        return in_turn(parts)(view, layout)

    return rounds


def _after(each: Round, first: int, before: tuple[int, ...]) -> Round:
    """A round renumbered to count from `first`; one that waits for no other round of its exchange follows `before`."""
    return replace(each, after=tuple(earlier + first for earlier in each.after) or before)


def _computing(seconds: Sequence[float], view: View, layout: Layout) -> Iterator[Round]:  # noqa: ARG001
    """A round for all ranks that compute for the same time; none for those that do not compute."""
    for duration in sorted({spent for spent in seconds if spent > 0}):
        ranks = np.flatnonzero(np.asarray(seconds) == duration).astype(np.int64)
        nothing = np.zeros_like(ranks)
        yield Round(Op.COMPUTE, ranks, ranks, nothing, nothing, nothing, (), Stream.COMPUTE, duration)
