"""Waits for k of n: who can still be released, against every schedule of releases, and why the others cannot."""

from __future__ import annotations

import re
from itertools import chain, combinations

import paths
import pytest
from causal_support import computations
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.causality.cuts import consistent_cuts, latest_consistent
from offbeat.protocols.causality.deadlock import Matching, Wait, deadlock, natural, waits
from offbeat.protocols.causality.histories import Call, Computation, Event, EventKind, computation

NAMES = tuple(f"worker {i}" for i in range(5))


@st.composite
def some_waits(draw: st.DrawFn, processes: int = 4, only_all: bool = False) -> list[Wait]:
    names = NAMES[:processes]
    found = []
    for i in range(draw(st.integers(1, processes + 1))):
        of = draw(st.frozensets(st.sampled_from(names), min_size=1, max_size=3))
        needs = len(of) if only_all else draw(st.integers(1, len(of)))
        found.append(Wait(draw(st.sampled_from(names)) if i >= processes else names[i], needs, of, f"call {i}"))
    return found


def releasable(found: list[Wait], ended: frozenset[str]) -> set[str]:
    """Who goes on in some schedule: one free process after another does something that somebody waits for."""
    start = tuple(frozenset[str]() for _ in found)
    todo, seen, released = [start], {start}, set[str]()
    names = {name for wait in found for name in (wait.process, *wait.of)} - ended
    while todo:
        state = todo.pop()
        blocked = {wait.process for wait, done in zip(found, state, strict=True) if len(done) < wait.needs}
        released |= names - blocked
        for i, wait in enumerate(found):
            for helper in wait.of & (names - blocked) - state[i]:
                after = (*state[:i], state[i] | {helper}, *state[i + 1 :])
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
    return released


def stuck(found: list[Wait], ended: frozenset[str]) -> frozenset[str]:
    judged = deadlock(found, ended)
    return judged.stuck if judged else frozenset()


@given(some_waits(), st.frozensets(st.sampled_from(NAMES), max_size=1))
def test_stuck_are_those_that_no_schedule_releases(found: list[Wait], ended: frozenset[str]) -> None:
    waiting = {wait.process for wait in found} - ended
    assert stuck(found, ended) == waiting - releasable(found, ended)


def holds_alone(found: list[Wait], names: frozenset[str], ended: frozenset[str]) -> bool:
    """Whether these are all stuck although everybody else who has not ended runs."""
    return bool(names) and stuck([wait for wait in found if wait.process in names], ended) == names


@given(some_waits(), st.frozensets(st.sampled_from(NAMES), max_size=1))
def test_nobody_in_a_knot_can_be_left_out(found: list[Wait], ended: frozenset[str]) -> None:
    judged = deadlock(found, ended)
    if judged is None:
        return
    assert judged.knots
    for knot in judged.knots:
        told = list(knot.waits)
        assert len(told) == len(knot.processes)
        assert holds_alone(told, knot.processes, knot.ended)
        parts = chain.from_iterable(combinations(knot.processes, n) for n in range(1, len(told)))
        assert not any(stuck([wait for wait in told if wait.process in part], ended) for part in parts)
    everybody = frozenset[str]().union(*(knot.processes for knot in judged.knots))
    assert sum(len(knot.processes) for knot in judged.knots) == len(everybody)
    repaired = [wait for wait in found if wait.process not in everybody]
    assert not stuck(repaired, ended)


@given(some_waits(5, only_all=True), st.frozensets(st.sampled_from(NAMES), max_size=1))
def test_where_all_are_waited_for_the_knot_is_the_smallest(found: list[Wait], ended: frozenset[str]) -> None:
    judged = deadlock(found, ended)
    if judged is not None:
        groups = (frozenset(group) for n in range(1, 6) for group in combinations(judged.stuck, n))
        smallest = next(group for group in groups if holds_alone(found, group, ended))
        assert len(judged.knots[0].waits) == len(smallest)


def test_a_cycle_is_told_in_words() -> None:
    found = [
        Wait.on_all("worker 2", ["worker 0", "worker 1"], "all_reduce #57"),
        Wait.on_all("worker 0", ["worker 2"], "barrier #12"),
        Wait.on_all("worker 3", ["worker 2"], "a receipt"),
    ]
    assert str(deadlock(found)) == (
        "worker 0 waits for worker 2 in barrier #12; worker 2 waits for worker 0 in all_reduce #57. "
        "Held up by this: worker 3."
    )


def test_the_page_on_cause_and_effect_says_what_its_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (paths.ROOT / "docs/causality.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(example, "causality.md", "exec"), {})  # noqa: S102 - our own page
    assert capsys.readouterr().out == example.splitlines()[-1].removeprefix("# ") + "\n"


def test_an_orphan_is_told_in_words() -> None:
    found = [Wait.on_all("worker 1", ["worker 0", "worker 2"], "all_reduce #3")]
    assert deadlock(found) is None
    assert str(deadlock(found, {"worker 0"})) == "worker 1 waits for worker 0 in all_reduce #3; worker 0 has ended."


def test_two_deadlocks_are_told_apart() -> None:
    found = [
        Wait.on_all("worker 0", ["worker 1"], "A"),
        Wait.on_all("worker 1", ["worker 0"], "B"),
        Wait.on_all("worker 2", ["worker 3"], "C"),
    ]
    judged = deadlock(found, {"worker 3"})
    assert str(judged) == (
        "worker 2 waits for worker 3 in C; worker 3 has ended. "
        "worker 0 waits for worker 1 in A; worker 1 waits for worker 0 in B."
    )


def test_a_wait_for_any_needs_all_of_them_stuck() -> None:
    anybody = Wait("worker 1", 1, frozenset({"worker 0", "worker 2"}), "a receipt from anybody")
    one = Wait.on_all("worker 0", ["worker 1"], "X")
    other = Wait.on_all("worker 2", ["worker 1"], "Y")
    assert deadlock([anybody, one]) is None
    assert str(deadlock([anybody, one, other])) == (
        "worker 0 waits for worker 1 in X; worker 1 waits for any of worker 0, worker 2 in a receipt from anybody; "
        "worker 2 waits for worker 1 in Y."
    )


def test_backups_let_a_step_go_on_without_the_dead() -> None:
    step = Wait("server 0", 2, frozenset(NAMES[:3]), "step 7")
    assert deadlock([step], {"worker 0"}) is None
    assert str(deadlock([step], {"worker 0", "worker 1"})) == (
        "server 0 waits for 2 of worker 0, worker 1, worker 2 in step 7; worker 0 has ended; worker 1 has ended."
    )


@pytest.mark.parametrize("needs", [0, 3])
def test_a_wait_that_nothing_ends_is_refused(needs: int) -> None:
    with pytest.raises(UsageError, match=f"cannot wait for {needs} of 2"):
        Wait("a", needs, frozenset("bc"), "X")


def test_names_are_counted_as_people_count() -> None:
    assert natural(["worker 10", "worker 2", "server 1"]) == ["server 1", "worker 2", "worker 10"]


@given(computations(3, 14))
def test_a_run_that_goes_on_is_in_no_deadlock_at_any_consistent_cut(run: Computation) -> None:
    # A collective that the run's end cut short is still entered by whoever has not: they run.
    for cut in consistent_cuts(run):
        assert deadlock(waits(run, cut)) is None


def crossed(second_in_flight: bool) -> Computation:
    """Each awaits a message of the other; one of them has sent it, or not."""
    sent = [Event(EventKind.SEND, message="m", peer="b", tag="t")] if second_in_flight else [Event()]
    histories = {
        "a": [*sent, Event(EventKind.AWAIT, "recv at a.py:1", sources=frozenset("b"))],
        "b": [Event(EventKind.AWAIT, "recv at b.py:2", sources=frozenset("a"), tag="t")],
    }
    return computation(histories)


def test_a_message_under_way_is_no_deadlock() -> None:
    assert str(deadlock(waits(crossed(False), (2, 1)))) == (
        "a waits for b in recv at a.py:1; b waits for a in recv at b.py:2."
    )
    assert [wait.process for wait in waits(crossed(True), (2, 1))] == ["a"]
    assert deadlock(waits(crossed(True), (2, 1))) is None


def test_a_message_that_was_received_ends_no_later_wait() -> None:
    histories = {
        "a": [Event(EventKind.SEND, message="m", peer="b"), Event(EventKind.AWAIT, "recv 1", sources=frozenset("b"))],
        "b": [Event(EventKind.RECEIVE, message="m"), Event(EventKind.AWAIT, "recv 2", sources=frozenset("a"))],
    }
    assert str(deadlock(waits(computation(histories), (2, 2)))) == "a waits for b in recv 1; b waits for a in recv 2."


def test_a_message_with_another_mark_ends_no_wait() -> None:
    histories = {
        "a": [
            Event(EventKind.SEND, message="m", peer="b", tag="x"),
            Event(EventKind.AWAIT, "recv 1", sources=frozenset("b")),
        ],
        "b": [Event(EventKind.AWAIT, "recv 2", sources=frozenset("a"), tag="y")],
    }
    assert deadlock(waits(computation(histories), (2, 1))) is not None


def test_what_was_heard_in_a_wrong_order_is_no_phantom() -> None:
    """Client and server take turns. Heard so far: the answer's receipt and the next wait, but not the server's part."""
    histories = {
        "a": [
            Event(EventKind.SEND, message=1, peer="b"),
            Event(EventKind.AWAIT, "its answer", sources=frozenset("b")),
            Event(EventKind.RECEIVE, message=2),
            Event(EventKind.AWAIT, "a request", sources=frozenset("b")),
        ],
        "b": [
            Event(EventKind.AWAIT, "a request", sources=frozenset("a")),
            Event(EventKind.RECEIVE, message=1),
            Event(EventKind.SEND, message=2, peer="a"),
        ],
    }
    run = computation(histories)
    with pytest.raises(UsageError, match=r"on a consistent cut only.*b's event 3"):
        waits(run, (4, 1))
    assert latest_consistent(run, (4, 1)) == (2, 1)
    assert deadlock(waits(run, (2, 1))) is None


def entry(sequence: int, operation: str, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> Call:
    return Call("world", sequence, NAMES[:2], operation, shape, dtype, caller=f"a.py:{sequence}")


def test_collectives_in_different_order_are_a_cycle_and_a_mismatch() -> None:
    reduce, barrier = Call("world", 1, NAMES[:2], "all_reduce"), Call("other", 1, NAMES[:2], "barrier")
    histories = {"worker 0": [Event(EventKind.ENTER, call=reduce)], "worker 1": [Event(EventKind.ENTER, call=barrier)]}
    assert str(deadlock(waits(computation(histories), (1, 1)))) == (
        "worker 0 waits for worker 1 in all_reduce #1 of group world; "
        "worker 1 waits for worker 0 in barrier #1 of group other."
    )


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (entry(1, "barrier"), "different operation"),
        (entry(1, "all_reduce", (5,)), "different shape"),
        (entry(1, "all_reduce", dtype="int64"), "different dtype"),
        (Call("world", 1, NAMES[:2], "all_reduce", reduce="max"), "different reduce"),
        (Call("world", 1, NAMES[:3], "all_reduce"), "different members"),
        (Call("world", 1, NAMES[:2], "all_reduce", root="worker 1"), "different root"),
    ],
)
def test_a_mismatch_is_told_at_entry(call: Call, why: str) -> None:
    first = Call("world", 1, NAMES[:2], "all_reduce", (4,), "float32", "sum", caller="a.py:1")
    matching = Matching()
    assert matching.enter("worker 0", first) is None
    wrong = matching.enter("worker 1", call)
    assert str(wrong).startswith("worker 1 is in ")
    assert str(wrong).endswith(f"but worker 0 in {first}: {why}.")


def test_what_is_left_open_is_not_compared() -> None:
    matching = Matching()
    assert matching.enter("worker 0", Call("world", 1, NAMES[:2], "gather_object")) is None
    assert matching.enter("worker 1", Call("world", 1, NAMES[:2], "gather_object", (3,), caller="b.py")) is None


def test_a_different_order_is_told_as_such() -> None:
    matching = Matching()
    for number, operation in enumerate(("all_reduce", "broadcast"), 1):
        assert matching.enter("worker 0", entry(number, operation)) is None
    wrong = [matching.enter("worker 1", entry(*call)) for call in ((1, "broadcast"), (2, "all_reduce"))]
    assert [one is not None and one.order for one in wrong] == [True, True]
    assert "the same calls in a different order" in str(wrong[0])
