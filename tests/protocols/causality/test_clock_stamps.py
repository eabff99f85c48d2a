"""Clocks that are made from the names of causes: the same as those of the whole run, whatever comes first."""

from __future__ import annotations

from random import Random

import pytest
from causal_support import computations, few, lines
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.causality import clock_stamps
from offbeat.protocols.causality.clock_stamps import Cause, ClockStamper, Occurrence
from offbeat.protocols.causality.delivery_rule import DeliveryRule
from offbeat.protocols.causality.histories import Computation, EventPosition


def occurrence(run: Computation, place: EventPosition) -> Occurrence:
    """An event that is called by its position."""
    needs = tuple(Cause(cause, run.processes[cause.process]) for cause in run.causes(place))
    return Occurrence((place,), needs, event=place)


def interleaved(run: Computation, seed: int) -> list[EventPosition]:
    """All events, each process's in order, processes mixed at random."""
    random, done = Random(seed), [0] * run.size
    order: list[EventPosition] = []
    while open_ := [i for i in range(run.size) if done[i] < run.lengths[i]]:
        process = random.choice(open_)
        done[process] += 1
        order.append(EventPosition(process, done[process]))
    return order


@few
@given(computations(), st.integers(0, 2**32))
def test_clocks_are_those_of_the_whole_run_and_come_in_a_possible_order(run: Computation, seed: int) -> None:
    stamper, seen = ClockStamper(run.processes), list[EventPosition]()
    for place in interleaved(run, seed):
        for name, report in stamper.add(run.processes[place.process], occurrence(run, place), 0.0):
            stamped: EventPosition = report.event.event
            assert name == run.processes[stamped.process]
            assert (report.lamport, tuple(report.vector)) == (
                run.lamports[stamped.process][stamped.number],
                run.vector(stamped),
            )
            assert set(run.causes(stamped)) <= set(seen)
            seen.append(stamped)
    assert sorted(seen) == sorted(run.order)
    assert (stamper.held, stamper.given_up) == (0, 0)


def test_a_cause_that_does_not_come_is_waited_for_only_so_long() -> None:
    run = lines(1, 2, edges=[((0, 1), (1, 1))])
    effect, after = (occurrence(run, EventPosition(1, number)) for number in (1, 2))
    stamper = ClockStamper(run.processes, patience=2.0)
    assert [*stamper.add("worker 1", effect, 0.0), *stamper.add("worker 1", after, 0.5), *stamper.expire(1.9)] == []
    assert stamper.waits(1.9) == {"worker 1": (1.9, EventPosition(0, 1))}
    assert [report.event for _, report in stamper.expire(2.1)] == [effect, after]
    assert stamper.given_up == 1


def test_nothing_is_waited_for_from_a_process_that_has_ended() -> None:
    run = lines(1, 1, edges=[((0, 1), (1, 1))])
    stamper = ClockStamper(run.processes)
    effect = occurrence(run, EventPosition(1, 1))
    assert not list(stamper.add("worker 1", effect, 0.0))
    assert [report.event for _, report in stamper.ended("worker 0", 0.0)] == [effect]


def test_a_process_that_joins_has_no_entry_in_earlier_clocks() -> None:
    stamper = ClockStamper(["a"])
    ((_, before),) = stamper.add("a", Occurrence(("sent",)), 0.0)
    stamper.join("b")
    ((_, after),) = stamper.add("b", Occurrence((), (Cause("sent", "a"),)), 0.0)
    assert (tuple(before.vector), tuple(after.vector)) == ((1,), (1, 1))


def test_after_a_probe_clocks_are_higher_than_all_that_were_known() -> None:
    stamper = ClockStamper("ab")
    for _ in range(3):
        ((_, report),) = stamper.add("a", Occurrence(), 0.0)
    answer = stamper.probed("b", 2)
    assert (answer.lamport, answer.reported) == (report.lamport + 1, 0)
    ((_, later),) = stamper.add("b", Occurrence(), 0.0)
    assert later.lamport > answer.lamport


def test_causes_that_nobody_asks_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_stamps, "MOST_CAUSES", 3)
    stamper = ClockStamper("ab")
    for number in range(5):
        list(stamper.add("a", Occurrence((number,)), 0.0))
    assert len(list(stamper.add("b", Occurrence((), (Cause(4, "a"),)), 0.0))) == 1
    assert not list(stamper.add("b", Occurrence((), (Cause(0, "a"),)), 0.0))


@pytest.mark.parametrize(
    ("name", "bound", "why"),
    [
        ("vectr", None, "Did you mean 'vector'"),
        ("time", -1.0, "--delivery-bound -1 cannot be"),
        ("lamport", 0.0, "--delivery-bound 0 cannot be"),
        ("time", float("nan"), "--delivery-bound nan cannot be"),
        ("fifo", 1.0, "waits for nothing"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(name: str, bound: float | None, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        DeliveryRule(name, bound)
