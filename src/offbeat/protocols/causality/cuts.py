"""Cuts: a prefix of each history, and whether a run can ever have been at that point.

A cut is *consistent* iff e -> e' and e' in the cut imply that e is in it. By vector clocks: for all processes i and j,
the last event of j in the cut knows at most as many events of i as the cut holds. Unions and intersections of
consistent cuts are consistent, and so is the causal past of an event. Whatever is concluded about a run as a whole is
concluded on a consistent cut: on another, there are deadlocks that never were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from offbeat.errors import UsageError
from offbeat.protocols.causality.histories import Computation, Edge, EventPosition, Join

Cut = tuple[int, ...]
"""How many events of each process are in it."""


class Violation(NamedTuple):
    """Why a cut is not consistent: an effect that is in it, and its cause that is not."""

    edge: Edge
    words: str

    def __str__(self) -> str:
        return self.words


def violation(computation: Computation, cut: Sequence[int]) -> Violation | None:
    """The first effect in the cut whose cause is not in it, or None if the cut is consistent."""
    check(computation, cut)
    if is_consistent(computation, cut):
        return None
    wrong = (
        Edge(cause, effect)
        for join in computation.joins
        for effect in [effect for effect in join.effects if _holds(cut, effect)][:1]
        for cause in [cause for cause in join.causes if not _holds(cut, cause)][:1]
    )
    edge = min(wrong, key=lambda edge: (edge.effect.number, edge))
    effect, cause = computation.tell(edge.effect), computation.tell(edge.cause)
    return Violation(edge, f"{effect} is in the cut, but its cause is not: {cause}.")


def is_consistent(computation: Computation, cut: Sequence[int]) -> bool:
    """Whether everything in the cut has its causes in it."""
    held = np.asarray(cut)
    return all(bool((computation.clocks[j][number] <= held).all()) for j, number in enumerate(cut))


def union(one: Cut, other: Cut) -> Cut:
    """What is in either cut."""
    return tuple(map(max, one, other))


def causal_past(computation: Computation, place: EventPosition) -> Cut:
    """The smallest consistent cut with this event: everything that can have caused it, and itself."""
    return computation.vector(place)


def latest_consistent(computation: Computation, cut: Sequence[int]) -> Cut:
    """The largest consistent cut inside this one: what may be judged of what has been heard so far."""
    check(computation, cut)
    held = np.asarray(cut, np.int64).copy()
    shrinking = True
    while shrinking:
        shrinking = False
        for j in range(computation.size):
            while not (computation.clocks[j][held[j]] <= held).all():
                held[j] -= 1
                shrinking = True
    return tuple(held.tolist())


def between(computation: Computation, low: Cut, high: Cut) -> Computation:
    """The part of a run from one consistent cut to a later one, as a run of its own."""

    def inside(places: Sequence[EventPosition]) -> tuple[EventPosition, ...]:
        return tuple(EventPosition(i, k - low[i]) for i, k in places if low[i] < k <= high[i])

    joins = [Join(inside(join.causes), inside(join.effects)) for join in computation.joins]
    histories = (history[low[i] : high[i]] for i, history in enumerate(computation.histories))
    return Computation(
        computation.processes, tuple(histories), tuple(join for join in joins if join.causes and join.effects)
    )


def check(computation: Computation, cut: Sequence[int]) -> None:
    """Refuse what is not a cut through this computation."""
    if len(cut) != computation.size or any(
        not 0 <= k <= length for k, length in zip(cut, computation.lengths, strict=True)
    ):
        raise UsageError(
            f"{tuple(cut)} is not a cut through histories of {computation.lengths} events: give for each of the "
            f"{computation.size} processes how many of its events are in it."
        )


def _holds(cut: Sequence[int], place: EventPosition) -> bool:
    return place.number <= cut[place.process]
