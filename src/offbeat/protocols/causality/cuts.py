"""Cuts (a prefix of each history), whether a run can have been there, and what held in some or every path to the end.

A cut is *consistent* iff e -> e' and e' in the cut imply that e is in it. By vector clocks: for all processes i and j,
the last event of j in the cut knows at most as many events of i as the cut holds. Unions and intersections of
consistent cuts are consistent, and so is the causal past of an event. Conclusions about a run as a whole need a
consistent cut: on another, there are deadlocks that never were.

Consistent cuts form a lattice. From the empty cut to the full one, event by event, each path through it is a way that
the run may have gone; nobody can tell which it was. A condition held *possibly* if some path has a cut where it holds,
and *definitely* if every path has.

For a conjunction of one condition for each process, both are found without going through the cuts, which may be
exponentially many: Garg and Waldecker, "Detection of Weak Unstable Predicates in Distributed Programs" (1994) and
"Detection of Strong Unstable Predicates in Distributed Programs" (1996). Any other condition is searched for up to a
cap; a search that meets it answers `UNDECIDED`, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from offbeat.errors import UsageError
from offbeat.protocols.causality.histories import Computation, Edge, EventPosition, Join

Cut = tuple[int, ...]
"""How many events of each process are in it."""
CAP = 100_000
"""Default limit on the consistent cuts that a search looks at."""

Condition = Callable[[Cut], bool]
"""A predicate on cuts."""
Conjunction = Mapping[int, Sequence[bool]]
"""For some processes, whether their condition holds after none of its events, after the first, … after the last."""


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
        for effect in [effect for effect in join.effects if effect.number <= cut[effect.process]][:1]
        for cause in [cause for cause in join.causes if cause.number > cut[cause.process]][:1]
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
    """The largest consistent cut inside this one: the part of the reports so far that can be judged."""
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
    """The part of a run from one consistent cut to a later one, as a separate run."""

    def inside(places: Sequence[EventPosition]) -> tuple[EventPosition, ...]:
        return tuple(EventPosition(i, k - low[i]) for i, k in places if low[i] < k <= high[i])

    joins = [Join(inside(join.causes), inside(join.effects)) for join in computation.joins]
    histories = (history[low[i] : high[i]] for i, history in enumerate(computation.histories))
    return Computation(
        computation.processes, tuple(histories), tuple(join for join in joins if join.causes and join.effects)
    )


def check(computation: Computation, cut: Sequence[int]) -> None:
    """Refuse anything that is not a cut through this computation."""
    if len(cut) != computation.size or any(
        not 0 <= k <= length for k, length in zip(cut, computation.lengths, strict=True)
    ):
        raise UsageError(
            f"{tuple(cut)} is not a cut through histories of {computation.lengths} events: give for each of the "
            f"{computation.size} processes how many of its events are in it."
        )


# -- all the ways that a run may have gone -----------------------------------------------------------------------------


class Answer(Enum):
    """Result of a search."""

    YES = "yes"
    NO = "no"
    UNDECIDED = "undecided"


class Finding(NamedTuple):
    """Whether a condition held, and, if it possibly did, a cut where it holds."""

    answer: Answer
    cut: Cut | None = None


def successors(computation: Computation, cut: Cut) -> Iterator[Cut]:
    """The consistent cuts with one more event."""
    for process, number in enumerate(cut):
        if number < computation.lengths[process]:
            knows = computation.clocks[process][number + 1]
            if all(knows[i] <= cut[i] for i in range(computation.size) if i != process):
                yield (*cut[:process], number + 1, *cut[process + 1 :])


def consistent_cuts(computation: Computation) -> Iterator[Cut]:
    """All consistent cuts, smaller ones first. There may be exponentially many: take only as many as needed."""
    level = [(0,) * computation.size]
    while level:
        yield from level
        level = list(dict.fromkeys(after for cut in level for after in successors(computation, cut)))


def possibly(computation: Computation, conjunction: Conjunction) -> Finding:
    """Whether all of the conditions may have held at once, and the smallest cut where they do.

    Each process offers its next state where its own condition holds. A state that is over before another's has begun
    cannot be part of an answer, and is dropped for the next.
    """
    _check(computation, conjunction)
    chosen = dict.fromkeys(conjunction, -1)
    todo = dict.fromkeys(conjunction, 0)
    while todo:
        process, least = todo.popitem()
        if chosen[process] >= least:
            continue
        state = next((k for k in range(least, computation.lengths[process] + 1) if conjunction[process][k]), None)
        if state is None:
            return Finding(Answer.NO)
        chosen[process] = state
        for other, number in chosen.items():
            # A state of `other` that was overtaken is dropped; one that overtakes this state moves this one on.
            knows = int(computation.clocks[process][state, other])
            if 0 <= number < knows:
                todo[other] = max(todo.get(other, 0), knows)
            elif number >= 0 and (known := int(computation.clocks[other][number, process])) > state:
                todo[process] = max(todo.get(process, 0), known)
    cut: Cut = (0,) * computation.size
    for process, number in chosen.items():
        cut = union(cut, computation.vector(EventPosition(process, number)))
    return Finding(Answer.YES, cut)


class _Interval(NamedTuple):
    """A run of states of a process where its condition holds: after the event `first`, until the event `over`."""

    first: int
    over: int


def definitely(computation: Computation, conjunction: Conjunction) -> Finding:
    """Whether there was a moment when all of the conditions held, whichever way the run went.

    True if and only if there is an interval for each process such that every one begins before any other ends.
    """
    _check(computation, conjunction)
    left = {process: _intervals(states) for process, states in conjunction.items()}
    todo = list(left)
    while todo and all(left.values()):
        one = todo.pop()
        for other in left.keys() - {one}:
            if not _begins_before(computation, one, left[one][0], other, left[other][0]):
                left[other].pop(0)
                todo.append(other)
            elif not _begins_before(computation, other, left[other][0], one, left[one][0]):
                left[one].pop(0)
                todo.append(one)
            if not left[one] or not left[other]:
                return Finding(Answer.NO)
            if todo and todo[-1] == one:
                break
    return Finding(Answer.YES if all(left.values()) else Answer.NO)


def search_possibly(computation: Computation, condition: Condition, cap: int = CAP) -> Finding:
    """Whether a condition may have held, by looking at every consistent cut, up to the cap."""
    for seen, cut in enumerate(consistent_cuts(computation)):
        if seen == cap:
            return Finding(Answer.UNDECIDED)
        if condition(cut):
            return Finding(Answer.YES, cut)
    return Finding(Answer.NO)


def search_definitely(computation: Computation, condition: Condition, cap: int = CAP) -> Finding:
    """Whether every path through the consistent cuts has one where the condition holds.

    Continues only from cuts where it does not. If the last cut is reached so, there is a path without it.
    """
    level, seen = [(0,) * computation.size], 0
    while level:
        kept: list[Cut] = []
        for cut in level:
            if seen == cap:
                return Finding(Answer.UNDECIDED)
            seen += 1
            if not condition(cut):
                kept.append(cut)
                if cut == computation.lengths:
                    return Finding(Answer.NO)
        level = list(dict.fromkeys(after for cut in kept for after in successors(computation, cut)))
    return Finding(Answer.YES)


def _intervals(states: Sequence[bool]) -> list[_Interval]:
    edges = [k for k in range(len(states) + 1) if (k > 0 and states[k - 1]) != (k < len(states) and states[k])]
    return [_Interval(first, over) for first, over in zip(edges[::2], edges[1::2], strict=True)]


def _begins_before(computation: Computation, early: int, one: _Interval, late: int, other: _Interval) -> bool:
    # What begins with event 0, before all events, begins before any of them.
    if other.over > computation.lengths[late]:
        return True
    return computation.happened_before(EventPosition(early, one.first), EventPosition(late, other.over))


def _check(computation: Computation, conjunction: Conjunction) -> None:
    for process, states in conjunction.items():
        if not 0 <= process < computation.size or len(states) != computation.lengths[process] + 1:
            raise UsageError(
                f"the condition of process {process} is given for {len(states)} states: give one for each event of "
                f"each process, and one for before them, for histories of {computation.lengths} events."
            )
