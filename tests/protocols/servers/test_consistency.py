"""Who may start its next step: the predicate, the clocks, parked requests, and the object that decides."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.machine import Done, Effect, Payload, Received, Send, SetTimer, Start, Timer
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import ClusterView, Fresh, Pull, PullReply, Push, PushReply, worker_name
from offbeat.protocols.servers.pacing import Clocks, Pacing, Parked
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.replica.works import Inspect
from offbeat.protocols.servers.worker.rhythm import (
    EveryStep,
    Lazily,
    PushAndFetch,
    RhythmAction,
    RhythmOf,
    Spring,
    StepActions,
    rhythm_of,
)
from offbeat.simulate.queues import Times
from offbeat.simulate.servers.events import Drive, Worker

BSP, SSP, ASP = Rule(0), Rule(3), Rule(None)

# --- the rule


def test_the_predicate_is_that_of_the_papers() -> None:
    assert [BSP.needed(clock) <= 5 for clock in (5, 6)] == [True, False]
    assert [SSP.needed(clock) <= 5 for clock in (5, 8, 9)] == [True, True, False]
    assert ASP.needed(10**9) == 0


@given(st.one_of(st.none(), st.integers(0, 5)), st.lists(st.integers(0, 20), min_size=1))
def test_somebody_may_always_start(bound: int | None, clocks: list[int]) -> None:
    rule = Rule(bound)
    assert any(rule.needed(clock) <= min(clocks) for clock in clocks)


@given(st.integers(0, 5), st.integers(0, 50), st.integers(0, 50))
def test_what_is_needed_is_what_the_predicate_asks(bound: int, clock: int, minimum: int) -> None:
    assert (clock - minimum <= bound) == (minimum >= Rule(bound).needed(clock))


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


# --- who may start


class Team:
    """Workers as a server's pacing sees them: each is running a step, or has asked for the next."""

    def __init__(self, rule: Rule, workers: int) -> None:
        self.pacing: Pacing[int] = Pacing(rule, range(workers))
        self.running = dict.fromkeys(range(workers), 0)
        self.clocks = dict.fromkeys(range(workers), 0)

    def settle(self) -> list[int]:
        while self.pacing.is_complete():
            self.pacing.close()
        return self.start(self.pacing.released())

    def start(self, workers: list[int]) -> list[int]:
        for worker in workers:
            self.clocks[worker] = max(self.clocks[worker], self.pacing.minimum if self.pacing.rule.closes else 0)
            self.running[worker] = self.clocks[worker]
        return workers

    def finish(self, worker: int) -> list[int]:
        self.clocks[worker] = self.running.pop(worker) + 1
        if self.clocks[worker] > self.pacing.minimum or not self.pacing.rule.aggregated:
            self.pacing.contribute(worker)
            self.pacing.finish(worker, self.clocks[worker])
        started = self.settle()
        if self.pacing.admits(self.pacing.rule.needed(self.clocks[worker]), worker):
            started += self.start([worker])
        return started

    def leave(self, worker: int) -> list[int]:
        self.running.pop(worker, None)
        self.pacing.leave(worker)
        return self.settle()


def test_bsp_lets_all_go_when_the_last_has_come() -> None:
    team = Team(BSP, 3)
    assert team.finish(1) == []
    assert team.finish(0) == []
    assert team.finish(2) == [1, 0, 2]
    assert team.running == {0: 1, 1: 1, 2: 1}


def test_a_copy_goes_its_own_way() -> None:
    team = Team(BSP, 2)
    team.finish(0)
    copied = copy.deepcopy(team)
    assert copied.finish(1) == [0, 1]
    assert team.pacing.clocks.of(1) == 0
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
        allowed = {one for one, clock in clocks.items() if rule.needed(clock) <= minimum}
        assert set(team.running) == allowed
        assert all(team.running[one] == clocks[one] for one in allowed)
        if bound is not None:
            assert max(clocks.values()) - minimum <= bound + 1


def test_a_dead_worker_is_waited_for_no_more_and_a_new_one_starts_with_the_others() -> None:
    team = Team(BSP, 3)
    team.finish(0)
    team.finish(1)
    assert team.leave(2) == [0, 1]
    assert team.pacing.enter(7, 0) == 1, "it begins with the step that is open"
    team.clocks[7] = team.running[7] = 1
    team.finish(0)
    team.finish(1)
    assert team.finish(7) == [0, 1, 7]


def test_a_step_closes_without_the_slowest_who_goes_on_with_the_others() -> None:
    team = Team(Rule(0, drop=1), 3)
    assert team.finish(0) == []
    assert team.finish(2) == [0, 2]
    assert (team.pacing.completed, team.pacing.clocks.of(1)) == (1, 1)
    assert team.finish(1) == [1], "late: it begins the step that is open"
    assert team.running[1] == 1
    assert team.finish(1) == []
    assert team.finish(0) == [1, 0]


def test_a_deadline_runs_from_the_first_gradient_then_from_when_a_step_is_opened() -> None:
    team = Team(Rule(0, deadline=0.5), 3)
    assert team.pacing.timed is None, "nothing has come yet"
    team.finish(0)
    assert team.pacing.timed == 0
    team.pacing.expire(0)
    assert team.settle() == [0]
    assert team.pacing.timed == 1, "it runs from when the step was opened"
    team.pacing.expire(0)
    assert team.settle() == [], "of a step that is long complete"
    team.pacing.expire(1)
    assert team.settle() == [], "nobody has answered"
    assert team.finish(1) == [1], "late"
    assert team.finish(1) == [1], "the first answer completes an overdue step"
    assert team.pacing.completed == 2
    assert team.finish(0) == [0], "late"
    assert team.finish(2) == [2], "late"
    for worker in (0, 1):
        assert team.finish(worker) == []
    assert team.finish(2) == [0, 1, 2], "all have answered: no need to wait for the deadline"


def test_what_a_worker_sent_before_it_died_still_counts_when_the_deadline_passes() -> None:
    team = Team(Rule(0, deadline=0.5), 2)
    team.pacing.contribute(0)
    team.leave(0)
    team.pacing.expire(0)
    assert team.pacing.is_complete()


def test_dropping_goes_on_when_a_worker_dies() -> None:
    team = Team(Rule(0, drop=1), 3)
    team.finish(0)
    assert team.leave(1) == [0], "one of two is enough now"
    assert team.finish(2) == [2]


def test_a_coded_step_is_complete_with_answers_that_give_the_whole_sum() -> None:
    team = Team(Rule(0, coded=1), 4)
    assert team.finish(0) == []
    assert team.finish(2) == [], "these two have computed the same slice"
    assert team.finish(1) == [0, 2, 1]


# --- the simulator and the servers start the same workers at the same moments

Case = tuple[Rule, RhythmOf]
CASES: dict[str, Case] = {
    **{
        str(rule): (rule, rhythm_of(rule))
        for rule in (
            Rule(0),
            Rule(1),
            Rule(3),
            Rule(1, eager=True),
            Rule(3, eager=True),
            Rule(None),
            Rule(0, drop=1),
            Rule(0, drop=2),
            Rule(0, deadline=0.7),
            Rule(0, deadline=2.0),
            Rule(0, coded=1),
            Rule(0, coded=1, cyclic=True),
        )
    },
    "downpour(2, 3)": (Rule(None), lambda _: PushAndFetch(2, 3)),
    "downpour(warm=2)": (Rule(None), lambda worker: PushAndFetch(1, 2, warm=2, leads=worker == 0)),
    "elastic(2)": (Rule(0), lambda _: Spring(2, asynchronous=False)),
    "elastic(3, asynchronous)": (Rule(None), lambda _: Spring(3, asynchronous=True)),
}
Starts = list[tuple[float, int, int]]
"""When which worker started which step."""


class Recorded(Drive):
    """Who started which step when, in the simulator."""

    def __init__(self, case: Case, durations: Times) -> None:
        super().__init__(case[0], durations, case[1], None, None)
        self.starts: Starts = []

    def _begin(self, number: int, worker: Worker, now: float) -> None:
        step = worker.clock if self.rule.closes else worker.steps
        if step < self.steps:
            self.starts.append((now, number, step))
        super()._begin(number, worker, now)


class Served:
    """The same on the server machine that processes run: what rhythms say, in order of time, answered at once."""

    def __init__(self, case: Case, durations: Times) -> None:
        self.steps, self.workers = durations.shape
        self.durations, self.rule = durations, case[0]
        self.machine = ServerMachine("server 0.0", 0, self.rule, ClusterView.of(self.workers, 1))
        self.rhythms = [case[1](worker) for worker in range(self.workers)]
        self.starts: Starts = []
        self.events: list[tuple[float, int, int]] = []
        self.todo: list[list[RhythmAction]] = [[] for _ in self.rhythms]
        self.computed, self.clocks, self.asks, self.pushes, self.written = ([0] * self.workers for _ in range(5))
        self.asked, self.here, self.blocked = ([False] * self.workers for _ in range(3))
        self.fresh: dict[int, Fresh] = {}
        self.met: list[int] = []

    def run(self) -> Starts:
        for worker in range(self.workers):
            self.begin(worker, 0.0)
        while self.events and not (self.rule.closes and self.machine.shard.minimum >= self.steps):
            now, worker, step = heappop(self.events)
            if worker < 0:
                self.handle(self.machine.on(Timer(("deadline", step)), now), now)
            else:
                self.computed[worker] += 1
                self.todo[worker] = list(self.rhythms[worker].computed(self.clocks[worker]).actions)
                self.go_on(worker, now)
        return self.starts

    def begin(self, worker: int, now: float) -> None:
        step = self.clocks[worker] if self.rule.closes else self.computed[worker]
        if step < self.steps:
            self.starts.append((now, worker, step))
            seconds = float(self.durations[step, worker]) if self.rhythms[worker].trains() else 0.0
            heappush(self.events, (now + seconds, worker, step))

    def go_on(self, worker: int, now: float) -> None:
        todo = self.todo[worker]
        while todo:
            action = todo.pop(0)
            if action in (RhythmAction.PUSH, RhythmAction.PUSH_AND_PULL):
                self.push(worker, action is RhythmAction.PUSH_AND_PULL, now)
            elif action is RhythmAction.PULL:
                self.pull(worker, now)
            elif action is RhythmAction.TAKE_FRESH:
                fresh = self.fresh.get(worker)
                needed = self.rule.needed(self.clocks[worker])
                if fresh is None or fresh.version < self.written[worker] or fresh.clock < needed:
                    todo[:0] = [RhythmAction.PULL, RhythmAction.AWAIT]
            elif action is RhythmAction.AWAIT and self.asked[worker] and not self.here[worker]:
                self.blocked[worker] = True
                return
            elif action is RhythmAction.AWAIT:
                self.asked[worker] = self.here[worker] = False
            elif action is RhythmAction.MEET:
                self.met.append(worker)
                if len(self.met) == self.workers:
                    together, self.met = self.met, []
                    for other in together:
                        self.go_on(other, now)
                return
        self.begin(worker, now)

    def tell(self, worker: int, message: Push | Pull, now: float) -> None:
        payload = Payload(1) if isinstance(message, Push) else Payload(0)
        self.handle(self.machine.on(Received(worker_name(worker), message, payload), now), now)

    def push(self, worker: int, pulls: bool, now: float) -> None:
        clock, number = self.clocks[worker], self.pushes[worker]
        self.clocks[worker], self.pushes[worker] = clock + 1, number + 1
        self.asks[worker] += pulls
        self.asked[worker] |= pulls
        then_pull = self.asks[worker] if pulls else 0
        self.tell(worker, Push(worker=worker, number=number, clock=clock, then_pull=then_pull), now)

    def pull(self, worker: int, now: float) -> None:
        self.asks[worker] += 1
        self.asked[worker] = True
        after = self.pushes[worker] - 1
        self.tell(worker, Pull(worker=worker, number=self.asks[worker], clock=self.clocks[worker], after=after), now)

    def handle(self, effects: Sequence[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, Start) and effect.token is not None:
                result = "" if isinstance(effect.work, Inspect) else Payload(1)
                self.handle(self.machine.on(Done(effect.token, result), now), now)
            elif isinstance(effect, SetTimer) and isinstance(effect.token, tuple):
                heappush(self.events, (now + effect.after, -1, effect.token[1]))
            elif isinstance(effect, Send):
                self.hear(int(effect.to.removeprefix("worker ")), effect.message, now)

    def hear(self, worker: int, reply: object, now: float) -> None:
        pushed = reply.pushed if isinstance(reply, PullReply) else reply
        if isinstance(pushed, PushReply):
            self.written[worker] = max(self.written[worker], pushed.version)
        if isinstance(reply, Fresh):
            self.fresh[worker] = reply
        elif isinstance(reply, PullReply):
            if reply.pushed is not None and reply.pushed.status == "late":
                self.clocks[worker] = max(self.clocks[worker], reply.clock)
            self.rhythms[worker].read(reply.clock)
            self.here[worker] = True
            if self.blocked[worker]:
                self.blocked[worker] = self.asked[worker] = self.here[worker] = False
                self.go_on(worker, now)


def both(case: Case, durations: Times) -> tuple[Starts, Starts]:
    """Who started when: in the simulator, and on the server machine."""
    simulated = Recorded(case, durations)
    simulated.run()
    return sorted(simulated.starts), sorted(Served(case, durations).run())


@given(st.sampled_from(sorted(CASES)), st.sampled_from([2, 4, 6]), st.integers(1, 12), st.integers(0, 10**6))
def test_the_simulator_and_the_server_machine_start_the_same_workers_at_the_same_moments(
    name: str, workers: int, steps: int, seed: int
) -> None:
    assume(CASES[name][0].drop < workers)
    durations = np.random.default_rng(seed).exponential(1.0, (steps, workers)) + 0.01
    simulated, served = both(CASES[name], durations)
    assert simulated == served


@pytest.mark.parametrize(
    ("name", "owner", "method", "wrong"),
    [
        ("ssp(1)", Pacing, "admits", lambda self, needed, item, real=Pacing.admits: real(self, needed + 1, item)),
        ("drop_slowest(1)", Pacing, "released", lambda self, real=Pacing.released: real(self)[1:]),
        ("drop_slowest(1)", Pacing, "is_complete", lambda self: self.clocks.minimum > self.completed),
        ("ssp(1)", Lazily, "computed", lambda *_: StepActions((RhythmAction.PUSH, RhythmAction.REUSE), own_step=True)),
        ("bsp", EveryStep, "computed", lambda *_: StepActions((RhythmAction.PUSH,))),
        ("elastic(2)", Spring, "computed", lambda *_: StepActions(own_step=True)),
    ],
)
def test_a_line_that_is_wrong_is_wrong_in_the_simulator_and_on_the_server(
    name: str, owner: type, method: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    durations = np.random.default_rng(3).exponential(1.0, (8, 4)) + 0.01
    right = both(CASES[name], durations)
    monkeypatch.setattr(owner, method, wrong)
    assert right[0] == right[1]
    assert all(one != other for one, other in zip(right, both(CASES[name], durations), strict=True))
