"""Cuts (a prefix of each history), whether a run can have been there, and what held in some or every path to the end.

A cut is *consistent* iff e -> e' and e' in the cut imply that e is in it. Conclusions about a run as a whole need a
consistent cut: on another, there are deadlocks that never were. Consistent cuts form a lattice, and each path through
it is a way that the run may have gone. A condition held *possibly* if some path has a cut where it holds, and
*definitely* if every path has.

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

Cut = tuple[int, ...]  # How many events of each process are in it.
CAP = 100_000  # Default limit on the consistent cuts that a search looks at.

Condition = Callable[[Cut], bool]  # A predicate on cuts.
Conjunction = Mapping[int, Sequence[bool]]  # Per process, whether its condition holds after 0, 1, 2 … events.


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


def latest_consistent(computation: Computation, cut: Sequence[int]) -> Cut:
    """The largest consistent cut inside this one: the part of the reports so far that can be judged."""
    check(computation, cut)
    held = np.array(cut, np.int64)
    while not is_consistent(computation, held.tolist()):
        lengths = zip(computation.clocks, held, strict=True)
        held = np.array([(clocks[: length + 1] <= held).all(axis=1).sum() - 1 for clocks, length in lengths])
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


def consistent_cuts(computation: Computation, avoided: Condition = lambda _: False) -> Iterator[Cut]:
    """Consistent cuts, smaller ones first, without what lies only behind `avoided` ones; perhaps exponentially many."""
    level = [(0,) * computation.size]
    while level:
        yield from level
        onward = (after for cut in level if not avoided(cut) for after in successors(computation, cut))
        level = list(dict.fromkeys(onward))


def possibly(computation: Computation, conjunction: Conjunction) -> Finding:
    """Whether all of the conditions may have held at once, and the smallest cut where they do.

    A state where a process's own condition fails, or that another's has overtaken, cannot be part of an answer: each in
    turn is moved on to its next that can, with all that this depends on.
    """
    _check(computation, conjunction)
    cut = np.zeros(computation.size, np.int64)
    while not all(states[cut[process]] for process, states in conjunction.items()):
        for process, states in conjunction.items():
            state = next((k for k in range(cut[process], len(states)) if states[k]), None)
            if state is None:
                return Finding(Answer.NO)
            cut = np.maximum(cut, computation.clocks[process][state])
    return Finding(Answer.YES, tuple(cut.tolist()))


def definitely(computation: Computation, conjunction: Conjunction) -> Finding:
    """Whether there was a moment when all of the conditions held, whichever way the run went.

    True if and only if there is an interval for each process such that every one begins before any other ends.
    """
    _check(computation, conjunction)
    left = {process: _intervals(states) for process, states in conjunction.items()}
    while all(left.values()):
        begun = np.array([left[process][0][0] for process in left])
        over = [
            process
            for process, end in ((process, ahead[0][1]) for process, ahead in left.items())
            if end <= computation.lengths[process] and (computation.clocks[process][end, [*left]] < begun).any()
        ]
        if not over:
            return Finding(Answer.YES)
        for process in over:
            left[process].pop(0)
    return Finding(Answer.NO)


def search_possibly(computation: Computation, condition: Condition, cap: int = CAP) -> Finding:
    """Whether a condition may have held, by looking at every consistent cut, up to the cap."""
    for seen, cut in enumerate(consistent_cuts(computation)):
        if seen == cap:
            return Finding(Answer.UNDECIDED)
        if condition(cut):
            return Finding(Answer.YES, cut)
    return Finding(Answer.NO)


def search_definitely(computation: Computation, condition: Condition, cap: int = CAP) -> Finding:
    """Whether every path through the consistent cuts has one where the condition holds: none leads around them."""
    for seen, cut in enumerate(consistent_cuts(computation, condition)):
        if seen == cap:
            return Finding(Answer.UNDECIDED)
        if cut == computation.lengths and not condition(cut):
            return Finding(Answer.NO)
    return Finding(Answer.YES)


def _intervals(states: Sequence[bool]) -> list[tuple[int, int]]:
    """The runs of states where the condition holds: after which event each begins, and with which it is over."""
    edges = [k for k in range(len(states) + 1) if (k > 0 and states[k - 1]) != (k < len(states) and states[k])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _check(computation: Computation, conjunction: Conjunction) -> None:
    for process, states in conjunction.items():
        if not 0 <= process < computation.size or len(states) != computation.lengths[process] + 1:
            raise UsageError(
                f"the condition of process {process} is given for {len(states)} states: give one for each event of "
                f"each process, and one for before them, for histories of {computation.lengths} events."
            )
