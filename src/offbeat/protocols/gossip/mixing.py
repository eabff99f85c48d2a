"""Mixing with neighbours, as schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from offbeat.errors import UsageError
from offbeat.protocols.schedule import FloatArray, IntArray, Layout, Op, Round, Schedule, View, entries


def mix(matrix: FloatArray, in_memory: bool = False) -> Schedule:
    """Every rank gets its neighbours' rows and takes the mean by the matrix's weights: one hop.

    Neighbours at one distance go together, so that every port carries one message at a time. With `in_memory`, all
    ranks live on one host: each publishes its row, and reads those of its neighbours there.
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
        bring, published = (Op.FETCH, (0,)) if in_memory else (Op.SEND, ())
        if in_memory:
            yield entries(Op.COPY, ranks, ranks, 0, layout.count, ())
        brought = [entries(bring, source, target, 0, layout.count, published) for source, target in heard]
        yield from brought
        number = len(published) + len(brought)
        yield _weighed(entries(Op.SCALE, ranks, ranks, 0, layout.count, tuple(range(number))), own)
        for each, (source, target) in zip(brought, heard, strict=True):
            yield _weighed(each.used(Op.REDUCE, (number,)), matrix[target, source])
            number += 1

    return rounds


def tell(matrix: FloatArray, lengths: IntArray) -> Schedule:
    """Every rank's message, of the given length, reaches its neighbours in one hop.

    In a rank's buffer its own message comes first, then those of its neighbours in the order of their ranks.
    """
    size = len(matrix)
    near = (matrix != 0) & ~np.eye(size, dtype=np.bool_)
    places = lengths[:, np.newaxis] + np.cumsum(near * lengths, axis=1) - near * lengths
    ranks = np.arange(size)

    def rounds(view: View, layout: Layout) -> Iterator[Round]:  # noqa: ARG001
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


def _weighed(each: Round, weight: FloatArray) -> Round:
    # A row of no elements has no entries, and so no weights.
    return replace(each, weight=weight[: len(each.source)])
