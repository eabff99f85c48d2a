"""Verdicts on events: what can never go on is told, in words, and nothing else is."""

from __future__ import annotations

import pytest

from offbeat.monitor import Judge, blame
from offbeat.runtime.stamps import About, Mark, Stamp

WORLD = About("world", "all_reduce", 2, 4, "float32", "sum", caller="a.py:1")
OTHER = About("1", "barrier", 2, caller="a.py:2")


def at(mark: Mark, about: About | None = WORLD, sequence: int = 1, time: float = 0.0) -> Stamp:
    return Stamp(mark, about, sequence, time)


def fed(*histories: list[Stamp]) -> Judge:
    judge = Judge()
    for rank, history in enumerate(histories):
        judge.feed(rank, history)
    return judge


def test_two_who_wait_for_each_other_in_two_groups_are_deadlocked() -> None:
    judge = fed([at(Mark.ENTER, WORLD, 57)], [at(Mark.ENTER, OTHER, 12)])
    verdict = judge.final()
    assert verdict is not None
    assert verdict.kind == "deadlock"
    assert verdict.message == (
        "worker 0 waits for worker 1 in all_reduce #57 (sum of float32 x 4) of group world, called at a.py:1; "
        "worker 1 waits for worker 0 in barrier #12 of group 1, called at a.py:2."
    )
    assert verdict.missing == (0, 1)


@pytest.mark.parametrize("mover", [0, 1])
def test_who_has_moved_between_two_looks_is_not_judged(mover: int) -> None:
    judge = fed([at(Mark.ENTER, WORLD)], [at(Mark.ENTER, OTHER)])
    assert judge.final(moved={mover}) is None


def test_who_is_waited_for_and_does_not_wait_is_no_deadlock() -> None:
    assert fed([at(Mark.ENTER)], [at(Mark.STEP, None)]).final() is None
    assert fed([at(Mark.ENTER)], [at(Mark.START, OTHER)]).final() is None


def test_a_collective_that_all_have_entered_is_none_even_if_an_entry_was_lost() -> None:
    assert fed([at(Mark.ENTER, WORLD, 5)], [at(Mark.ENTER, WORLD, 6)]).final() is None


def test_an_operation_that_torch_waits_for_inside_is_told_when_the_other_has_ended() -> None:
    judge = fed([at(Mark.START, WORLD, 3)], [at(Mark.END, None)])
    verdict = judge.final()
    assert verdict is not None
    assert verdict.kind == "ended"
    assert "worker 0 waits for worker 1 in all_reduce #3" in verdict.message
    assert verdict.message.endswith("worker 1 has ended its program.")


def test_a_wait_that_failed_holds_until_the_worker_goes_on() -> None:
    failed = [at(Mark.ENTER, WORLD, 3), at(Mark.FAIL, WORLD, 3)]
    verdict = fed(failed, [at(Mark.END, None)]).final()
    assert verdict is not None
    assert verdict.kind == "ended"
    assert fed([*failed, at(Mark.STEP, None)], [at(Mark.END, None)]).final() is None


def test_nobody_waits_for_others_in_a_broadcast_that_it_is_the_root_of() -> None:
    shared = About("world", "broadcast", 2, 4, "float32", root=0)
    assert fed([at(Mark.ENTER, shared)], [at(Mark.END, None)]).final() is None
    verdict = fed([at(Mark.END, None)], [at(Mark.ENTER, shared)]).final()
    assert verdict is not None
    assert "worker 1 waits for worker 0 in broadcast #1" in verdict.message


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (About("world", "barrier", 2), "operation"),
        (About("world", "all_reduce", 2, 5, "float32", "sum"), "shape"),
        (About("world", "all_reduce", 2, 4, "float64", "sum"), "dtype"),
        (About("world", "all_reduce", 2, 4, "float32", "max"), "reduce"),
    ],
)
def test_calls_that_differ_are_told_at_entry(other: About, why: str) -> None:
    verdict = fed([at(Mark.START, WORLD)], [at(Mark.START, other)]).final()
    assert verdict is not None
    assert verdict.kind == "desync"
    assert verdict.message.endswith(f"different {why}.")


def message(what: str, peer: int, mark: Mark = Mark.WAIT, sequence: int = 1, tag: int = 0) -> Stamp:
    return at(mark, About("world", what, peer=peer, tag=tag), sequence)


def test_a_message_under_way_ends_a_wait() -> None:
    waits, answers = message("receive from", 1), message("receive from", 0)
    both = fed([waits], [answers]).final()
    assert both is not None
    assert both.kind == "deadlock"
    assert fed([message("send to", 1, Mark.START), waits], [answers]).final() is None
    other_tag = fed([message("send to", 1, Mark.START, tag=7), waits], [answers]).final()
    assert other_tag is not None


def test_two_who_wait_until_what_they_sent_is_taken_are_deadlocked() -> None:
    assert fed([message("send to", 1)], [message("send to", 0)]).final() is not None
    taken = [message("receive from", 0, Mark.START), message("send to", 0)]
    assert fed([message("send to", 1)], taken).final() is None
    from_anybody = [message("receive from", -1, Mark.START), message("send to", 0)]
    assert fed([message("send to", 1)], from_anybody).final() is None


def test_who_is_silent_is_told_only_after_a_while() -> None:
    judge = fed([at(Mark.START, WORLD, 1, time=100.0)], [at(Mark.STEP, None)])
    assert judge.silent(now=105.0, patience=10.0) is None
    verdict = judge.silent(now=111.0, patience=10.0)
    assert verdict is not None
    assert (verdict.kind, verdict.missing) == ("silent", (1,))
    assert "worker 0 has waited 11 s for worker 1 in all_reduce #1" in verdict.message


def steps(delay: float) -> list[Stamp]:
    """Twenty steps of a worker that computes for `delay`, beside one that takes 0.3 s; an exchange takes 0.1 s."""
    found: list[Stamp] = []
    for number in range(20):
        began = number * 0.4
        found += [
            at(Mark.START, WORLD, number + 1, began + delay),
            at(Mark.EXIT, WORLD, number + 1, began + 0.4),
            at(Mark.STEP, None, number + 1, began + 0.4),
        ]
    return found


def test_the_straggler_is_named_and_what_a_step_would_take_without_it() -> None:
    first, second = blame({0: steps(0.1), 1: steps(0.3)})
    assert (first.worker, first.straggler, second.straggler) == ("worker 1", True, False)
    assert first.last == first.collectives
    assert first.seconds == pytest.approx(0.4, rel=0.1)
    assert first.without == pytest.approx(0.2, rel=0.15)


def test_equals_are_no_stragglers() -> None:
    assert not any(one.straggler for one in blame({0: steps(0.299), 1: steps(0.3)}))
    assert blame({0: [at(Mark.STEP, None)], 1: [at(Mark.STEP, None)]}) == []
