"""All the ways that a run may have gone: the lattice of consistent cuts, and what held in some or in every one of them.

From the empty cut to the full one, event by event, each way through consistent cuts is a way in which the run may have
gone; nobody can tell which it was. A condition held *possibly* if some of these ways has a cut where it holds, and
*definitely* if every way has.

For conditions that are a conjunction of one condition for each process, both are found without going through the cuts,
which may be exponentially many: Garg and Waldecker, "Detection of Weak Unstable Predicates in Distributed Programs"
(1994) and "Detection of Strong Unstable Predicates in Distributed Programs" (1996). Any other condition is searched
for up to a cap; a search that meets it answers `UNDECIDED`, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from offbeat.errors import UsageError
from offbeat.protocols.causality.cuts import Cut, union
from offbeat.protocols.causality.histories import Computation, EventPosition

CAP = 100_000
"""Consistent cuts that a search looks at, unless told otherwise."""

Condition = Callable[[Cut], bool]
"""Something that holds on a cut, or not."""
Conjunction = Mapping[int, Sequence[bool]]
"""For some processes, whether their condition holds after none of its events, after the first, … after the last."""


class Answer(Enum):
    """What is known."""

    YES = "yes"
    NO = "no"
    UNDECIDED = "undecided"


class Finding(NamedTuple):
    """Whether a condition held, and a cut that shows it: where it holds, if it does so possibly."""

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
    """All consistent cuts, smaller ones first. There may be exponentially many: take as many as you can use."""
    level = [(0,) * computation.size]
    while level:
        yield from level
        level = list(dict.fromkeys(after for cut in level for after in successors(computation, cut)))


def possibly(computation: Computation, conjunction: Conjunction) -> Finding:
    """Whether all of the conditions may have held at once, and the smallest cut where they do.

    Each process offers its next state where its own condition holds. One that is over before another's has begun can
    be part of no answer, and is given up for the next.
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
            # A state of `other` that has been overtaken must go; one that overtakes this state sends this one on.
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

    It is so if and only if there is an interval for each process such that every one begins before any other ends.
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
    """Whether any condition may have held, by looking at every consistent cut, up to the cap."""
    for seen, cut in enumerate(consistent_cuts(computation)):
        if seen == cap:
            return Finding(Answer.UNDECIDED)
        if condition(cut):
            return Finding(Answer.YES, cut)
    return Finding(Answer.NO)


def search_definitely(computation: Computation, condition: Condition, cap: int = CAP) -> Finding:
    """Whether every way through the consistent cuts has one where the condition holds.

    Goes on only from cuts where it does not. If the last cut is reached so, there is a way without it.
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
    """Whether the event that begins one interval happened before the one that ends the other, if any does.

    What begins with event 0, before all events, begins before any of them.
    """
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
