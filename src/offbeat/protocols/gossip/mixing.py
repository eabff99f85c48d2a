"""Steps that workers make by themselves, and what they exchange in between, as schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from offbeat.errors import UsageError
from offbeat.protocols.schedule import FloatArray, IntArray, Layout, Op, Round, Schedule, Stream, View, entries


def mix(matrix: FloatArray) -> Schedule:
    """Everybody hears its neighbours and takes the mean of all by the matrix's weights: one hop.

    Neighbours at one distance go together, so that every port is used by one message at a time.
    """
    size = len(matrix)
    ranks = np.arange(size)
    own = np.diag(matrix).copy()
    heard: list[tuple[IntArray, IntArray]] = []
    for shift in range(1, size):
        target = np.flatnonzero(matrix[ranks, (ranks + shift) % size])
        if len(target):
            heard.append(((target + shift) % size, target))

    def rounds(view: View, layout: Layout) -> Iterator[Round]:
        if view.size != size:
            raise UsageError(f"the matrix mixes {size} workers, and there are {view.size}")
        brought = [entries(Op.SEND, source, target, 0, layout.count, ()) for source, target in heard]
        yield from brought
        yield _weighed(entries(Op.SCALE, ranks, ranks, 0, layout.count, tuple(range(len(heard)))), own)
        for number, (one, (source, target)) in enumerate(zip(brought, heard, strict=True), len(heard)):
            yield _weighed(one.used(Op.REDUCE, (number,)), matrix[target, source])

    return rounds


def tell(matrix: FloatArray, lengths: IntArray) -> Schedule:
    """Everybody's message, as long as `lengths` says, reaches its neighbours in one hop, for them to make use of.

    In a rank's buffer its own message comes first, then those of its neighbours in the order of their ranks.
    """
    size = len(matrix)
    near = (matrix != 0) & ~np.eye(size, dtype=np.bool_)
    places = lengths[:, np.newaxis] + np.cumsum(near * lengths, axis=1) - near * lengths
    ranks = np.arange(size)

    def rounds(view: View, layout: Layout) -> Iterator[Round]:
        del layout
        if view.size != size:
            raise UsageError(f"the matrix has {size} workers, and there are {view.size}")
        brought: list[Round] = []
        for shift in range(1, size):
            target = np.flatnonzero(near[ranks, (ranks + shift) % size])
            source = (target + shift) % size
            if len(target):
                brought.append(entries(Op.SEND, source, target, 0, lengths[source], (), places[target, source]))
        yield from brought
        for number, each in enumerate(brought):
            yield each.used(Op.COPY, (number,))

    return rounds


def _weighed(one: Round, weight: FloatArray) -> Round:
    """With these weights; a row of no elements has no entries, and so none."""
    return replace(one, weight=weight[: len(one.source)])


def steps(seconds: Sequence[Sequence[float]], exchange: Callable[[int], Schedule | None]) -> Schedule:
    """Steps of computing, each followed by an exchange if there is one for its number.

    `seconds[k][r]` is how long rank r computes in step k. `local(H)` exchanges by an all-reduce in every H-th step,
    gossip by `mix` in every step.
    """

    def rounds(view: View, layout: Layout) -> Iterator[Round]:
        number, after = 0, ()
        for step, durations in enumerate(seconds):
            begun = number
            for duration in sorted(set(durations)):
                ranks = np.flatnonzero(np.asarray(durations) == duration).astype(np.int64)
                nothing = np.zeros_like(ranks)
                places = ranks, ranks, nothing, nothing, nothing
                yield Round(Op.COMPUTE, *places, after, Stream.COMPUTE, duration)
                number += 1
            after = tuple(range(begun, number))
            schedule = exchange(step)
            first = number
            for one in () if schedule is None else schedule(view, layout):
                later = tuple(earlier + first for earlier in one.after) or after
                yield replace(one, after=later)
                number += 1
            after = tuple(range(begun, number))

    return rounds
