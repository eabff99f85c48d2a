"""Logical clocks and histories: what happened before what, by clocks and by definition."""

from __future__ import annotations

import pytest
from causal_support import computations, lines, places, reaches
from hypothesis import given

from offbeat.errors import UsageError
from offbeat.protocols.causality.histories import (
    Call,
    Computation,
    Event,
    EventKind,
    EventPosition,
    computation,
    lamport,
    tick,
)

WORLD = ("worker 0", "worker 1", "worker 2")


@given(computations())
def test_vector_clocks_say_exactly_what_happened_before_what(run: Computation) -> None:
    for one in places(run):
        for other in places(run):
            reached = reaches(run, one, other)
            assert run.happened_before(one, other) == reached
            less = all(a <= b for a, b in zip(run.vector(one), run.vector(other), strict=True))
            assert (less and one != other) == reached


@given(computations())
def test_lamport_clocks_rise_from_cause_to_effect(run: Computation) -> None:
    for one in places(run):
        for other in places(run):
            if reaches(run, one, other):
                assert run.lamports[one.process][one.number] < run.lamports[other.process][other.number]


@given(computations())
def test_the_rules_that_processes_follow_give_the_same_clocks(run: Computation) -> None:
    vectors, numbers = {}, {}
    for place in run.order:
        before = EventPosition(place.process, place.number - 1)
        causes = run.causes(place)
        own = vectors.get(before, (0,) * run.size)
        vectors[place] = tick(own, place.process, *(vectors[cause] for cause in causes))
        numbers[place] = lamport(numbers.get(before, 0), *(numbers[cause] for cause in causes))
        assert vectors[place] == run.vector(place)
        assert numbers[place] == run.lamports[place.process][place.number]


def test_the_order_has_causes_first() -> None:
    run = lines(3, 2, 1, edges=[((1, 2), (0, 1)), ((2, 1), (1, 1))])
    assert run.order == ((2, 1), (1, 1), (1, 2), (0, 1), (0, 2), (0, 3))


@pytest.mark.parametrize(
    ("operation", "root", "needed"),
    [
        ("all_reduce", None, {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}),
        ("broadcast", "worker 1", {0: {1}, 1: set(), 2: {1}}),
        ("reduce", "worker 1", {0: set(), 1: {0, 2}, 2: set()}),
        ("scatter", "worker 0", {0: set(), 1: {0}, 2: {0}}),
        ("gather", "worker 0", {0: {1, 2}, 1: set(), 2: set()}),
    ],
)
def test_an_exit_has_seen_the_entries_that_its_collective_needs(operation: str, root: str, needed: dict) -> None:
    call = Call("world", 1, WORLD, operation, root=root)
    history = [Event(EventKind.ENTER, call=call), Event(EventKind.EXIT, call=call)]
    run = computation(dict.fromkeys(WORLD, history))
    for i, others in needed.items():
        assert {j for j in range(3) if run.happened_before(EventPosition(j, 1), EventPosition(i, 2))} == {i, *others}


def test_calls_of_different_groups_and_numbers_are_not_joined() -> None:
    calls = [Call("world", 1, WORLD[:2]), Call("world", 2, WORLD[:2]), Call("pair", 1, WORLD[:2])]
    histories = {
        "worker 0": [Event(EventKind.ENTER, call=calls[0])],
        "worker 1": [Event(EventKind.EXIT, call=call) for call in calls[1:]],
    }
    assert list(computation(histories).edges) == []


def test_a_message_to_oneself_is_no_edge() -> None:
    assert (
        computation({"a": [Event(EventKind.SEND, message=1), Event(EventKind.RECEIVE, message=1)]}).causes(
            EventPosition(0, 2)
        )
        == []
    )


@pytest.mark.parametrize(
    ("histories", "why"),
    [
        ({"a": [Event(EventKind.RECEIVE, message="m")]}, "event 1 of a receives message 'm', which nobody sent"),
        ({"a": [Event(EventKind.SEND, message=1)] * 2}, "message 1 is sent twice, by a and by a"),
    ],
)
def test_histories_that_cannot_be_joined_are_refused(histories: dict, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        computation(histories)


def test_an_event_that_would_cause_itself_is_refused_by_name() -> None:
    run = lines(2, 2, edges=[((0, 2), (1, 1)), ((1, 2), (0, 1))])
    with pytest.raises(UsageError, match=r"worker 0's event 1 \(local: 0.1\) would have to happen before itself"):
        _ = run.clocks


def test_an_edge_to_nowhere_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no event"):
        lines(2, 2, edges=[((0, 3), (1, 1))])


def test_an_unknown_process_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'worker 1'"):
        lines(1, 1).index("wroker 1")


def test_a_call_is_told_in_words() -> None:
    call = Call("world", 57, WORLD, "all_reduce", (1_204_224,), "float32", "sum", caller="train.py:88")
    assert str(call) == "all_reduce #57 (sum of float32 x 1,204,224) of group world, called at train.py:88"
    assert str(Call("world", 12, WORLD)) == "barrier #12 of group world"
    assert str(Call("g", 3, WORLD, "broadcast", root="worker 0")) == "broadcast #3 (root worker 0) of group g"
