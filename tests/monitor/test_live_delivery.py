"""What is read while a run goes is judged on consistent cuts, in whatever order it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from offbeat.monitor import Judge, LiveWatch, live
from offbeat.monitor.intake.order import CausalOrder
from offbeat.monitor.intake.sources import EventBatch
from offbeat.protocols.causality.clock_stamps import Cause, Occurrence
from offbeat.protocols.causality.delivery_rule import BOUNDS, DeliveryRule
from offbeat.runtime.events.recorder import About, Mark, Recorder, Stamp, events_file
from offbeat.runtime.launch import Role, RoleOutcome

WORLD = About("world", "barrier", 2)
OTHER = About("other", "barrier", 2)


PAIR = {sender: About("world", "send to", 2, peer=1 - sender) for sender in range(2)}
RECEIPT = {receiver: About("world", "receive from", 2, peer=1 - receiver) for receiver in range(2)}


class Posted:
    """Events that come when the test says so, as over links with delays of their own."""

    def __init__(self) -> None:
        self.arrived: list[EventBatch] = []
        self.complete = set[str]()

    def batches(self) -> Iterator[EventBatch]:
        while self.arrived:
            yield self.arrived.pop(0)

    def state(self, process: str) -> None: ...
    def without_core(self, process: str) -> None: ...

    def stacks(self, processes: Sequence[str]) -> dict[str, str]:
        return {}

    def known_until(self, process: str, now: float) -> float:
        return now if process in self.complete else 0.0

    def is_complete(self, process: str) -> bool:
        return process in self.complete


def ping_pong(rounds: int) -> dict[int, list[Stamp]]:
    """Two workers that send each other a message in turn, and end; times say nothing."""
    run: dict[int, list[Stamp]] = {0: [], 1: []}
    for number in range(1, rounds + 1):
        for sender in range(2):
            run[1 - sender].append(Stamp(Mark.ENTER, RECEIPT[1 - sender], number, 0.0))
            run[sender].append(Stamp(Mark.START, PAIR[sender], number, 0.0))
            run[1 - sender].append(Stamp(Mark.EXIT, RECEIPT[1 - sender], number, 0.0))
    for own in run.values():
        own.append(Stamp(Mark.END, None, 0, 0.0))
    return run


def ended(rank: int) -> RoleOutcome:
    return RoleOutcome(Role("worker", rank, entry="a:b", config={}, environment={}, log=Path()), 0, None, None)


def phantoms(rule: str, seed: int, folder: Path, now: list[float]) -> list[str]:
    """Of a healthy run, what who judges each event at once reports; the watch may report nothing."""
    random, source, run = Random(seed), Posted(), ping_pong(20)
    watch, naive = LiveWatch(folder, 2, DeliveryRule(rule), source), Judge()
    watch.ended(ended(1))
    naive.ended[1] = "has ended"
    reported: list[str] = []
    while any(run.values()):
        rank = random.choice([rank for rank in range(2) if run[rank]])
        some = [run[rank].pop(0) for _ in range(min(len(run[rank]), random.randrange(1, 9)))]
        source.arrived.append(EventBatch(f"worker {rank}", some))
        naive.feed(rank, some)
        source.complete |= {f"worker {rank}"} if not run[rank] else set()
        phantom = naive.final()
        reported += [] if phantom is None else [phantom.kind]
        for _ in range(2):
            now[0] += live.EVERY
            assert watch.look() is None
    assert watch.after_failure()[0] is None
    assert watch.order.held == 0
    return reported


@pytest.mark.parametrize("rule", BOUNDS)
def test_a_healthy_run_gets_no_verdict_however_late_its_events_come(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher sees a worker's end at once, and its last events come later: who judges by that reports phantoms."""
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    assert "ended" in [kind for seed in range(10) for kind in phantoms(rule, seed, tmp_path, now)]


@pytest.mark.parametrize("rule", BOUNDS)
def test_a_true_deadlock_is_reported_whichever_half_comes_first(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, source, run = [100.0], Posted(), ping_pong(3)
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    watch = LiveWatch(tmp_path, 2, DeliveryRule(rule), source)
    for rank, about in enumerate((WORLD, OTHER)):
        run[rank][-1] = Stamp(Mark.ENTER, about, 1, 0.0)
    source.arrived.append(EventBatch("worker 1", run[1]))
    for _ in range(4):
        now[0] += live.EVERY
        assert watch.look() is None
    source.arrived.append(EventBatch("worker 0", run[0]))
    kinds: list[str] = []
    for _ in range(3):
        now[0] += live.EVERY
        verdict = watch.look()
        kinds += [] if verdict is None else [verdict.kind]
    assert kinds[0] == "deadlock"


def test_an_effect_whose_cause_is_still_on_its_way_is_not_judged_under_fifo(tmp_path: Path) -> None:
    order = CausalOrder(["a", "b"], DeliveryRule("fifo"))
    order.hear("b", Occurrence((), (Cause("m", "a"),), event="effect"), 0.0)
    assert list(order.due(0.0)) == [("b", "effect")]
    assert not order.is_consistent(0.1)
    order.hear("a", Occurrence(("m",), event="cause"), 0.2)
    assert order.is_consistent(0.2)


class Watched:
    """A run of two workers that this process writes the events of."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(live.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(LiveWatch, "_with_stacks", lambda _, verdict: verdict)
        self.watch = LiveWatch(folder, 2)
        self._workers = [Recorder(events_file(folder, rank), rank) for rank in range(2)]

    def does(self, rank: int, mark: Mark, about: About, number: int = 1) -> None:
        worker = self._workers[rank]
        worker.stamp(int(mark), worker.name(about, lambda: about), number)
        self.now += 0.01

    def looks(self, after: float) -> str | None:
        self.now += after
        found = self.watch.look()
        return None if found is None else found.kind


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_a_deadlock_is_reported_once_its_workers_have_not_moved_between_two_looks(run: Watched) -> None:
    run.does(0, Mark.ENTER, WORLD)
    run.does(1, Mark.ENTER, OTHER)
    assert run.looks(0.01) is None, "both have just moved"
    assert run.looks(live.EVERY) == "deadlock"


def test_who_has_ended_is_not_missed_where_its_last_entry_is_still_held_back(run: Watched) -> None:
    run.does(0, Mark.ENTER, WORLD)
    assert run.looks(live.EVERY) is None
    assert run.looks(live.EVERY) is None
    run.now += live.EVERY
    run.does(1, Mark.ENTER, WORLD)
    role = Role("worker", 1, entry="a:b", config={}, environment={}, log=Path())
    run.watch.ended(RoleOutcome(role, 0, signal=None, error=None))
    assert run.looks(0.0) is None
    assert run.looks(live.EVERY) is None, "it had come"
    run.does(0, Mark.EXIT, WORLD)
    run.does(0, Mark.ENTER, WORLD, 2)
    assert run.looks(live.EVERY) is None
    assert run.looks(live.EVERY) == "ended"


def test_after_a_failure_everything_is_judged_at_once(run: Watched) -> None:
    run.does(0, Mark.ENTER, WORLD)
    run.does(1, Mark.ENTER, OTHER)
    verdict, _ = run.watch.after_failure()
    assert verdict is not None
    assert verdict.kind == "deadlock"
