"""Cuts and the lattice of consistent ones, against their definitions."""

from __future__ import annotations

import itertools
from functools import reduce
from random import Random

import pytest
from causal_support import all_cuts, closed, computations, lines, places
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.causality.cuts import (
    Answer,
    Cut,
    Finding,
    between,
    consistent_cuts,
    definitely,
    is_consistent,
    latest_consistent,
    possibly,
    search_definitely,
    search_possibly,
    successors,
    violation,
)
from offbeat.protocols.causality.histories import Computation

SMALL = computations(3, 14)


def union(one: Cut, other: Cut) -> Cut:
    return tuple(map(max, one, other))


def intersection(one: Cut, other: Cut) -> Cut:
    return tuple(map(min, one, other))


@given(SMALL)
def test_a_cut_is_consistent_if_and_only_if_no_cause_is_missing(run: Computation) -> None:
    for cut in all_cuts(run):
        assert is_consistent(run, cut) == closed(run, cut)
        wrong = violation(run, cut)
        assert (wrong is None) == closed(run, cut)
        if wrong is not None:
            cause, effect = wrong.edge
            assert wrong.edge in list(run.edges)
            assert cause.number > cut[cause.process]
            assert effect.number <= cut[effect.process]


@given(SMALL)
def test_unions_and_intersections_of_consistent_cuts_are_consistent(run: Computation) -> None:
    cuts = list(itertools.islice(consistent_cuts(run), 60))
    for one, other in itertools.combinations(cuts, 2):
        assert closed(run, union(one, other))
        assert closed(run, intersection(one, other))


@given(SMALL)
def test_the_causal_past_is_the_smallest_consistent_cut_with_an_event(run: Computation) -> None:
    consistent = [cut for cut in all_cuts(run) if closed(run, cut)]
    for place in places(run):
        past = run.vector(place)
        assert past == reduce(intersection, (cut for cut in consistent if cut[place.process] >= place.number))


@given(SMALL, st.data())
def test_the_latest_consistent_cut_is_the_largest_inside(run: Computation, data: st.DataObject) -> None:
    cut = tuple(data.draw(st.integers(0, length)) for length in run.lengths)
    inside = [other for other in all_cuts(run) if closed(run, other) and union(other, cut) == cut]
    assert latest_consistent(run, cut) == reduce(union, inside)


@given(SMALL)
def test_the_lattice_has_every_consistent_cut_once(run: Computation) -> None:
    cuts = list(consistent_cuts(run))
    assert len(set(cuts)) == len(cuts)
    assert set(cuts) == {cut for cut in all_cuts(run) if closed(run, cut)}
    assert [sum(cut) for cut in cuts] == sorted(sum(cut) for cut in cuts)


@given(SMALL, st.data())
def test_the_part_between_two_cuts_has_the_cuts_between_them(run: Computation, data: st.DataObject) -> None:
    ends = [latest_consistent(run, [data.draw(st.integers(0, length)) for length in run.lengths]) for _ in range(2)]
    low, high = intersection(*ends), union(*ends)
    inside = {cut for cut in consistent_cuts(run) if union(cut, low) == cut and union(cut, high) == high}
    part = consistent_cuts(between(run, low, high))
    assert {tuple(map(sum, zip(cut, low, strict=True))) for cut in part} == inside


def on_every_way(run: Computation, where: set[Cut]) -> bool:
    """Whether one of these cuts is on every way from the empty cut to the full one."""
    consistent = [cut for cut in all_cuts(run) if closed(run, cut)]
    reached = {(0,) * run.size} - where
    for cut in sorted(consistent, key=sum)[1:]:
        before = {(*cut[:i], cut[i] - 1, *cut[i + 1 :]) for i in range(run.size)}
        if cut not in where and before & reached:
            reached.add(cut)
    return run.lengths not in reached


def conditions(run: Computation, seed: int) -> dict[int, list[bool]]:
    """A condition for most processes, by chance."""
    random = Random(seed)
    often = random.choice([0.3, 0.5, 0.8])
    tables = ([random.random() < often for _ in range(length + 1)] for length in run.lengths)
    return {i: table for i, table in enumerate(tables) if random.random() < 0.9}


@given(computations(3, 10), st.integers(0, 2**32))
def test_possibly_and_definitely_are_what_holds_on_some_and_on_every_way(run: Computation, seed: int) -> None:
    conjunction = conditions(run, seed)

    def holds(cut: Cut) -> bool:
        return all(states[cut[i]] for i, states in conjunction.items())

    where = [cut for cut in all_cuts(run) if closed(run, cut) and holds(cut)]
    smallest = reduce(intersection, where) if where else None
    assert possibly(run, conjunction) == Finding(Answer.YES if where else Answer.NO, smallest)
    always = on_every_way(run, set(where))
    assert definitely(run, conjunction).answer is (Answer.YES if always else Answer.NO)
    assert search_possibly(run, holds).answer is (Answer.YES if where else Answer.NO)
    assert search_definitely(run, holds).answer is (Answer.YES if always else Answer.NO)


@given(computations(4, 40), st.integers(0, 2**32))
def test_in_larger_runs_both_ways_of_looking_agree(run: Computation, seed: int) -> None:
    conjunction = conditions(run, seed)

    def holds(cut: Cut) -> bool:
        return all(states[cut[i]] for i, states in conjunction.items())

    for searched, found in (
        (search_possibly(run, holds, 2000), possibly(run, conjunction)),
        (search_definitely(run, holds, 2000), definitely(run, conjunction)),
    ):
        assert searched.answer in (found.answer, Answer.UNDECIDED)


def never(cut: Cut) -> bool:
    return False


def test_a_capped_search_is_undecided_and_one_that_just_fits_is_not() -> None:
    run = lines(3, 3)
    assert len(list(consistent_cuts(run))) == 16
    assert search_possibly(run, never, 15).answer is Answer.UNDECIDED
    assert search_possibly(run, never, 16).answer is Answer.NO
    assert search_possibly(run, lambda cut: sum(cut) == 2, 15).answer is Answer.YES
    assert search_definitely(run, never, 15).answer is Answer.UNDECIDED
    assert search_definitely(run, never, 16).answer is Answer.NO
    assert search_definitely(run, lambda cut: sum(cut) == 6, 15).answer is Answer.UNDECIDED
    assert search_definitely(run, lambda cut: sum(cut) == 6, 16).answer is Answer.YES


def test_two_leaders_at_once_are_possible_but_not_certain() -> None:
    leading = {0: [False, True, False], 1: [False, True, False]}
    assert possibly(lines(2, 2), leading) == Finding(Answer.YES, (1, 1))
    assert definitely(lines(2, 2), leading).answer is Answer.NO
    handed_over = lines(2, 2, edges=[((0, 2), (1, 1))])
    assert possibly(handed_over, leading).answer is Answer.NO
    both_told = lines(2, 2, edges=[((0, 1), (1, 2)), ((1, 1), (0, 2))])
    assert definitely(both_told, leading).answer is Answer.YES


def test_a_violation_is_told_in_words() -> None:
    run = lines(2, 2, edges=[((0, 2), (1, 1))])
    assert str(violation(run, (1, 2))) == (
        "worker 1's event 1 (local: 1.1) is in the cut, but its cause is not: worker 0's event 2 (local: 0.2)."
    )
    assert set(successors(run, (1, 0))) == {(2, 0)}


@pytest.mark.parametrize("cut", [(1,), (3, 0), (-1, 0)])
def test_what_is_no_cut_is_refused(cut: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="is not a cut"):
        violation(lines(2, 2), cut)


def test_a_condition_that_misses_a_state_is_refused() -> None:
    with pytest.raises(UsageError, match="for 2 states"):
        possibly(lines(2, 2), {0: [True, False]})
