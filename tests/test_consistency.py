"""Who may start its next step: the predicate, the clocks, parked requests, and the machine that decides."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.machine import Effect, Ended, Event, Received, Send, SetTimer, Timer
from offbeat.protocols.servers.consistency import (
    Admitted,
    Clocks,
    Finished,
    Joined,
    PaceMachine,
    Parked,
    Rule,
    worker_name,
)

BSP, SSP, ASP = Rule(0), Rule(3), Rule(None)

# --- the rule


def test_the_predicate_is_that_of_the_papers() -> None:
    assert [BSP.may_start(clock, 5) for clock in (5, 6)] == [True, False]
    assert [SSP.may_start(clock, 5) for clock in (5, 8, 9)] == [True, True, False]
    assert ASP.may_start(10**9, 0)


@given(st.one_of(st.none(), st.integers(0, 5)), st.lists(st.integers(0, 20), min_size=1))
def test_somebody_may_always_start(bound: int | None, clocks: list[int]) -> None:
    rule = Rule(bound)
    assert any(rule.may_start(clock, min(clocks)) for clock in clocks)


@given(st.integers(0, 5), st.integers(0, 50), st.integers(0, 50))
def test_what_is_needed_is_what_the_predicate_asks(bound: int, clock: int, minimum: int) -> None:
    assert Rule(bound).may_start(clock, minimum) == (minimum >= Rule(bound).needed(clock))


def test_rules_say_how_they_are_written_and_whether_gradients_are_summed() -> None:
    rules = [BSP, SSP, Rule(3, eager=True), ASP, Rule(0, drop=2), Rule(0, deadline=0.5)]
    assert [str(rule) for rule in rules] == [
        "bsp",
        "ssp(3)",
        "ssp(3, eager)",
        "asp",
        "drop_slowest(2)",
        "deadline(0.5)",
    ]
    assert [rule.aggregated for rule in rules] == [True, False, False, False, True, True]
    assert [rule.closes for rule in rules] == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"bound": -1}, "lets nobody start"),
        ({"bound": 0, "drop": -1}, "makes no sense"),
        ({"bound": 0, "deadline": 0.0}, "above 0"),
        ({"bound": 0, "deadline": float("nan")}, "above 0"),
        ({"bound": 3, "drop": 1}, "need a bound of 0"),
        ({"bound": None, "deadline": 1.0}, "need a bound of 0"),
    ],
)
def test_rules_that_make_no_sense_are_refused(asked: dict[str, float], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Rule(**asked)  # type: ignore[arg-type]


# --- clocks and parked requests, against brute force


class BruteClocks:
    def __init__(self, workers: range, clock: int) -> None:
        self.clocks = dict.fromkeys(workers, clock)
        self.minimum = clock

    def settle(self) -> bool:
        before, self.minimum = self.minimum, min(self.clocks.values(), default=self.minimum)
        return self.minimum != before


Deeds = st.lists(
    st.one_of(
        st.tuples(st.just("tick"), st.integers(0, 5), st.one_of(st.none(), st.integers(0, 40))),
        st.tuples(st.just("join"), st.integers(0, 5), st.one_of(st.none(), st.integers(0, 40))),
        st.tuples(st.just("leave"), st.integers(0, 5), st.none()),
    ),
    max_size=60,
)


@given(st.integers(0, 5), st.integers(0, 3), Deeds)
def test_clocks_keep_the_minimum_that_looking_at_all_finds(
    workers: int, clock: int, deeds: list[tuple[str, int, int | None]]
) -> None:
    clocks, brute = Clocks(range(workers), clock), BruteClocks(range(workers), clock)
    for deed, worker, value in deeds:
        if deed == "tick" and worker in brute.clocks:
            now = brute.clocks[worker]
            brute.clocks[worker] = now + 1 if value is None else max(now, value)
            assert clocks.tick(worker, value) == brute.settle()
        elif deed == "join":
            brute.clocks.pop(worker, None)
            brute.settle()
            brute.clocks[worker] = brute.minimum if value is None else value
            brute.settle()
            clocks.join(worker, value)
        elif deed == "leave":
            brute.clocks.pop(worker, None)
            assert clocks.leave(worker) == brute.settle()
        assert clocks.minimum == brute.minimum
        assert {worker: clocks.of(worker) for worker in clocks.workers} == brute.clocks
        assert len(clocks) == len(brute.clocks)
        assert clocks.get(worker) == brute.clocks.get(worker)


def test_a_clock_that_leaps_does_not_walk_there() -> None:
    clocks = Clocks([0])
    assert clocks.tick(0, 10**15)
    assert clocks.minimum == 10**15


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_parked_items_come_back_once_the_minimum_suffices_and_in_order(deeds: list[tuple[bool, int]]) -> None:
    parked: Parked[int] = Parked()
    waiting: list[tuple[int, int]] = []
    for number, (park, value) in enumerate(deeds):
        if park:
            parked.park(value, number)
            waiting.append((value, number))
        else:
            assert parked.release(value) == [item for needed, item in sorted(waiting) if needed <= value]
            waiting = [(needed, item) for needed, item in waiting if needed > value]
        assert len(parked) == len(waiting)


# --- the machine


class Team:
    """Workers as the machine sees them: each is running a step, or has asked for the next."""

    def __init__(self, rule: Rule, workers: int) -> None:
        self.machine = PaceMachine(rule, range(workers))
        self.running: dict[int, int] = {}
        self.timers: list[SetTimer] = []
        self.take(self.machine.begin(0.0))

    def take(self, effects: object) -> list[int]:
        admitted: list[int] = []
        for effect in effects:  # type: ignore[attr-defined]
            if isinstance(effect, SetTimer):
                self.timers.append(effect)
                continue
            worker, step = told(effect)
            self.running[worker] = step
            admitted.append(worker)
        return admitted

    def tell(self, event: Event) -> list[int]:
        return self.take(self.machine.on(event, 0.0))

    def finish(self, worker: int) -> list[int]:
        clock = self.running.pop(worker) + 1
        return self.tell(Received(worker_name(worker), Finished(worker, clock)))

    def again(self, worker: int, clock: int) -> list[int]:
        return self.tell(Received(worker_name(worker), Finished(worker, clock)))


def told(effect: Effect) -> tuple[int, int]:
    assert isinstance(effect, Send)
    message = effect.message
    assert isinstance(message, Admitted)
    assert effect.to == worker_name(message.worker)
    return message.worker, message.step


def test_bsp_lets_all_go_when_the_last_has_come() -> None:
    team = Team(BSP, 3)
    assert team.running == {0: 0, 1: 0, 2: 0}
    assert team.finish(1) == []
    assert team.finish(0) == []
    assert team.finish(2) == [1, 0, 2]
    assert team.running == {0: 1, 1: 1, 2: 1}


def test_a_copy_goes_its_own_way() -> None:
    team = Team(BSP, 2)
    team.finish(0)
    copied = copy.deepcopy(team)
    assert copied.finish(1) == [0, 1]
    assert team.machine.clocks.of(1) == 0
    assert team.finish(1) == [0, 1]


def test_asp_holds_nobody_up() -> None:
    team = Team(ASP, 2)
    for step in range(1, 50):
        assert team.finish(0) == [0]
        assert team.running == {0: step, 1: 0}


@given(st.one_of(st.none(), st.integers(0, 4)), st.integers(1, 5), st.lists(st.integers(0, 99), max_size=200))
def test_the_bound_is_never_broken_and_nobody_waits_without_need(
    bound: int | None, workers: int, order: list[int]
) -> None:
    rule = Rule(bound)
    team = Team(rule, workers)
    clocks = dict.fromkeys(range(workers), 0)
    for choice in order:
        assert team.running, "everybody waits: a deadlock"
        worker = sorted(team.running)[choice % len(team.running)]
        clocks[worker] = team.running[worker] + 1
        team.finish(worker)
        minimum = min(clocks.values())
        allowed = {one for one, clock in clocks.items() if rule.may_start(clock, minimum)}
        assert set(team.running) == allowed
        assert all(team.running[one] == clocks[one] for one in allowed)
        if bound is not None:
            assert max(clocks.values()) - minimum <= bound + 1


def test_what_comes_twice_is_answered_again_and_counted_once() -> None:
    team = Team(Rule(1), 2)
    assert team.finish(0) == [0]
    assert team.again(0, 1) == [0]
    assert team.machine.clocks.of(0) == 1
    assert team.finish(0) == []
    assert team.again(0, 2) == [], "it is parked, and stays so"
    assert team.finish(1) == [0, 1], "once each"


def test_a_dead_worker_is_waited_for_no_more_and_a_new_one_starts_at_once() -> None:
    team = Team(BSP, 3)
    team.finish(0)
    team.finish(1)
    assert team.tell(Ended("worker 2")) == [0, 1]
    assert team.again(2, 1) == [], "it is no longer of the team"
    assert team.tell(Received("worker 7", Joined(7))) == [7]
    assert team.running[7] == 1
    team.finish(0)
    team.finish(1)
    assert team.finish(7) == [0, 1, 7]


def test_one_that_was_parked_left_and_came_again_is_not_let_go_too_early() -> None:
    team = Team(Rule(1), 2)
    team.finish(0)
    team.finish(0)
    assert team.tell(Ended("worker 0")) == []
    assert team.tell(Received("worker 0", Joined(0))) == [0]
    assert team.running[0] == 0
    team.finish(0)
    team.finish(0)
    assert team.machine.clocks.of(0) == 2
    assert len(team.machine._parked) == 1, "what it had asked for before it left is forgotten"
    assert set(team.finish(1)) == {0, 1}
    assert team.running == {0: 2, 1: 1}


def test_backup_workers_complete_a_step_without_the_slowest_whose_answer_is_late() -> None:
    team = Team(Rule(0, drop=1), 3)
    assert team.finish(0) == []
    assert team.finish(2) == [0, 2]
    assert team.machine.step == 1
    assert team.finish(1) == [1], "late: it begins the step that is open"
    assert (team.machine.late, team.running[1]) == (1, 1)
    assert team.finish(1) == []
    assert team.again(1, 2) == [], "its answer is counted once"
    assert team.finish(0) == [1, 0]
    assert team.machine.late == 1


def test_a_deadline_completes_a_step_with_what_has_come_and_waits_for_one() -> None:
    team = Team(Rule(0, deadline=0.5), 3)
    assert team.timers == [SetTimer(0.5, 0)]
    team.finish(0)
    assert team.tell(Timer(0)) == [0]
    assert team.timers[-1] == SetTimer(0.5, 1)
    assert team.tell(Timer(0)) == [], "of a step that is long complete"
    assert team.tell(Timer(1)) == [], "nobody has answered"
    assert team.finish(1) == [1], "late"
    assert team.finish(1) == [1], "the first answer completes an overdue step"
    assert team.machine.step == 2
    assert team.finish(0) == [0], "late"
    assert team.finish(2) == [2], "late"
    for worker in (0, 1):
        assert team.finish(worker) == []
    assert team.finish(2) == [0, 1, 2], "all have answered: no need to wait for the deadline"


def test_dropping_goes_on_when_a_worker_dies() -> None:
    team = Team(Rule(0, drop=1), 3)
    team.finish(0)
    assert team.tell(Ended("worker 1")) == [0], "one of two is enough now"
    assert team.finish(2) == [2]
    assert team.machine.late == 1
