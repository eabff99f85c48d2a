"""A whole step as one schedule: computing, and exchanges after it or beside it, each with a size of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from offbeat.protocols.schedule import Layout, Op, Round, Schedule, Stream, View

Part = tuple[Schedule, Layout]
"""An exchange, and what it exchanges: its ranges are counted in a buffer of its own."""


def in_turn(parts: Sequence[Part]) -> Schedule:
    """Exchanges that each begin when the one before is done; what they exchange is said with each of them."""

    def rounds(view: View, layout: Layout) -> Iterator[Round]:
        del layout
        number, after = 0, ()
        for schedule, own in parts:
            first = number
            for one in schedule(view, own):
                yield _after(one, first, after)
                number += 1
            after = tuple(range(first, number)) or after

    return rounds


def beside(seconds: Sequence[float], parts: Sequence[tuple[float, Part]]) -> Schedule:
    """One step in which exchanges begin while computing goes on, as gradients are summed during backward.

    Rank r computes for `seconds[r]`. Each part comes with the share of that which must be done since the part before;
    it begins when that is, and when the exchange before it is over. What is left of computing comes last.
    """

    def rounds(view: View, layout: Layout) -> Iterator[Round]:
        del layout
        number, after = 0, ()
        computed: tuple[int, ...] = ()
        for share, (schedule, own) in (*parts, (1.0 - sum(share for share, _ in parts), (_nothing, Layout(0)))):
            begun = number
            for one in _computing([share * spent for spent in seconds], computed):
                yield one
                number += 1
            computed = tuple(range(begun, number)) or computed
            first, before = number, (*after, *computed)
            for one in schedule(view, own):
                yield _after(one, first, before)
                number += 1
            after = tuple(range(first, number)) or after

    return rounds


def _after(one: Round, first: int, before: tuple[int, ...]) -> Round:
    """A round of an exchange whose own are counted from `first`; one that waits for none of them waits for `before`."""
    return replace(one, after=tuple(earlier + first for earlier in one.after) or before)


def _computing(seconds: Sequence[float], after: tuple[int, ...]) -> Iterator[Round]:
    """A round for all ranks that compute for the same time; none for those that do not."""
    for duration in sorted({one for one in seconds if one > 0}):
        ranks = np.flatnonzero(np.asarray(seconds) == duration).astype(np.int64)
        nothing = np.zeros_like(ranks)
        yield Round(Op.COMPUTE, ranks, ranks, nothing, nothing, nothing, after, Stream.COMPUTE, duration)


def _nothing(_view: View, _layout: Layout) -> Iterator[Round]:
    yield from ()
