"""Whole steps as one schedule: computing, and exchanges after it or overlapping it, each with its own size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from offbeat.protocols.schedule import Layout, Op, Round, Schedule, Stream, View

Part = tuple[Schedule, Layout]
"""An exchange and its layout: its ranges are counted in a buffer of its own."""


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
            for each in _computing([share * spent for spent in seconds], computed):
                yield each
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
        number, after = 0, ()
        for step, durations in enumerate(seconds):
            begun = number
            for each in _computing(durations, after):
                yield each
                number += 1
            after = tuple(range(begun, number)) or after
            schedule, first = exchange(step), number
            for each in () if schedule is None else schedule(view, layout):
                yield _after(each, first, after)
                number += 1
            after = tuple(range(begun, number)) or after

    return rounds


def _after(each: Round, first: int, before: tuple[int, ...]) -> Round:
    """A round renumbered to count from `first`; one that waits for no other round of its exchange follows `before`."""
    return replace(each, after=tuple(earlier + first for earlier in each.after) or before)


def _computing(seconds: Sequence[float], after: tuple[int, ...]) -> Iterator[Round]:
    """A round for all ranks that compute for the same time; none for those that do not compute."""
    for duration in sorted({spent for spent in seconds if spent > 0}):
        ranks = np.flatnonzero(np.asarray(seconds) == duration).astype(np.int64)
        nothing = np.zeros_like(ranks)
        yield Round(Op.COMPUTE, ranks, ranks, nothing, nothing, nothing, after, Stream.COMPUTE, duration)
