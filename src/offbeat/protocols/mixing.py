"""Steps that workers make by themselves, and what they exchange in between, as schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from offbeat.protocols.schedule import FloatArray, Layout, Op, Round, Schedule, Stream, View, entries


def mix(matrix: FloatArray) -> Schedule:
    """Everybody hears its neighbours and takes the mean of all by the matrix's weights: one hop."""
    target, source = np.nonzero(matrix * (1 - np.eye(len(matrix))))
    weight = matrix[target, source]
    own = np.diag(matrix).copy()

    def rounds(view: View, layout: Layout) -> Iterator[Round]:
        brought = entries(Op.SEND, source, target, 0, layout.count, ())
        yield brought
        ranks = np.arange(view.size)
        scaled = entries(Op.SCALE, ranks, ranks, 0, layout.count, (0,))
        yield replace(scaled, weight=own[: len(scaled.source)])
        yield brought.used(Op.REDUCE, (1,), weight[: len(brought.source)])

    return rounds


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
