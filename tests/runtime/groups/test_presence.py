"""Which waits can never end, and that a run ends when it has one: a worker has left, or two wait for each other."""

from __future__ import annotations

import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from launch_support import wait_until

from offbeat.errors import WaitError
from offbeat.protocols.attendance import FAILED, LEAVING, LEFT, WAITING, Attendance, hopeless, in_words, same_place
from offbeat.run.drive import WARM, Result, drive
from offbeat.run.job import Job, target_of
from offbeat.runtime.groups import presence
from offbeat.runtime.groups.presence import Presence, Waiting
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal


def waits(lane: str, number: int, what: str = "a sum", spare: int = 0, **counts: int) -> Attendance:
    return Attendance(WAITING, what=what, lane=lane, number=number, spare=spare, counts=counts)


def at(state: str, **counts: int) -> Attendance:
    return Attendance(state, counts=counts)


@pytest.mark.parametrize(
    ("team", "expected"),
    [
        ([waits("a", 3, a=3), at("here", a=2)], {}),
        ([waits("a", 3, a=3), at(LEAVING, a=2)], {0: (1,)}),
        ([waits("a", 3, a=3), at(LEAVING, a=3)], {}),
        ([waits("a", 3, a=3), at(LEFT, a=2), at(FAILED, a=1)], {0: (1, 2)}),
        ([waits("a", 3, spare=1, a=3), at(LEAVING, a=2), at("here", a=3)], {}),
        ([at(LEAVING, a=2), at(LEAVING, a=3)], {}),
        # Each has begun what the other has not.
        ([waits("a", 3, a=3, b=5), waits("b", 6, a=2, b=6)], {0: (1,), 1: (0,)}),
        # The second waits for one who is at work, and may then come to what the first waits in.
        ([waits("a", 3, a=3, b=5), waits("b", 6, a=2, b=6), at("here", a=2, b=5)], {0: (1,), 1: (0,)}),
        ([waits("a", 3, a=3, b=6), waits("b", 6, a=2, b=6), at("here", a=3, b=5)], {}),
        ([waits("a", 3, "a report", a=3), waits("a", 3, "a sum", a=3)], {0: (1,), 1: (0,)}),
        ([waits("a", 3, a=3), waits("a", 3, a=3)], {}),
    ],
)
def test_a_wait_is_hopeless_if_whoever_is_missing_can_never_come(
    team: list[Attendance], expected: dict[int, tuple[int, ...]]
) -> None:
    assert hopeless(dict(enumerate(team))) == expected


def test_a_worker_was_at_a_place_between_two_times_that_it_told_so() -> None:
    first = Attendance(WAITING, lane="a", number=3, counts={"a": 3}, look=4)
    later = Attendance(WAITING, lane="a", number=3, counts={"a": 3}, look=5)
    moved = Attendance(WAITING, lane="a", number=4, counts={"a": 4}, look=6)
    assert same_place(first, later)
    assert not same_place(first, first)
    assert not same_place(later, moved)
    assert same_place(Attendance(LEFT, look=2), Attendance(LEFT, look=2))


def test_the_words_name_who_waits_where_and_for_whom() -> None:
    waiting = Attendance(WAITING, step=12, what="the sum of gradients", lane="a", number=9)
    said = in_words(0, (2,), {0: waiting, 2: Attendance(LEAVING, step=11)})
    assert said.startswith(
        "worker 0 waits in the sum of gradients, after step 12, for worker 2; worker 2 has left its loop after step 11."
    )
    other = Attendance(WAITING, step=13, what="a report", lane="b", number=4)
    said = in_words(0, (2,), {0: waiting, 2: other})
    assert "for worker 2, but worker 2 waits in a report, after step 13. Neither wait can ever end." in said


def test_a_worker_that_leaves_waits_for_the_others_and_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "YIELD", 0.0)
    store = dist.HashStore()
    first, second = (Presence(store, rank, 2, dict) for rank in range(2))
    try:
        first.leave()
        with pytest.raises(WaitError, match=r"worker 0 has come to the end of the run and waited 0\.05 s for worker 1"):
            first.await_others(0.05)
        second.gone(failed=True)
        with pytest.raises(WaitError, match="worker 1 has failed: see its log"):
            first.await_others(20.0)
    finally:
        first.close()
        second.close()


def test_a_wait_for_a_worker_that_has_left_is_broken_off_or_given_up() -> None:
    store, given_up = dist.HashStore(), threading.Event()
    waiting, leaving = Presence(store, 0, 2, lambda: {"0": 3}), Presence(store, 1, 2, lambda: {"0": 2})
    broken: list[WaitError] = []
    waiting.break_off, waiting.give_up = broken.append, lambda _: given_up.set()
    try:
        waiting.waiting = Waiting("a sum", "0", 3)
        leaving.leave()
        wait_until(given_up.is_set, "the worker to be given up")
        assert waiting.verdict is broken[0]
        assert "worker 0 waits in a sum, after step 0, for worker 1" in str(broken[0])
    finally:
        waiting.close()
        leaving.close()


SCRIPT = """
    import os, sys, torch, offbeat
    RANK, HOW = int(os.environ["RANK"]), sys.argv[1]
    with offbeat.init() as team:
        model = torch.nn.Linear(2, 1)
        model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for step in range(5 if HOW == "leaves" and RANK == 1 else 8):
            optimizer.zero_grad()
            model(torch.ones(1, 2) * (RANK + 1)).sum().backward()
            optimizer.step()
        if HOW == "well" or RANK == 0:
            team.report(loss=1.0)
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(WARM) as made:
        yield made


def run(launcher: Launcher, folder: Path, strategy: str, how: str) -> Result:
    script = folder / "loop.py"
    script.write_text(textwrap.dedent(SCRIPT))
    goal = Goal(strategy=strategy, timeout=300.0)
    return drive(Job(target_of(str(script), (how,)), goal, 2, 1, folder / "runs"), launcher=launcher)


STRATEGIES = [
    "allreduce",
    "ddp",
    "local(4)",
    "server",
    "server(consistency=asp)",
    "gossip",
    "gossip(asynchronous=True)",
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_worker_that_leaves_its_loop_early_is_named_at_once(
    launcher: Launcher, tmp_path: Path, strategy: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(
        WaitError, match=r"worker 0 waits in .* for worker 1; worker 1 has left its loop after step 5\."
    ):
        run(launcher, tmp_path, strategy, "leaves")
    assert time.monotonic() - begun < 150  # Of the 300 that a wait may take.


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "ddp", "server", "gossip"])
def test_a_report_that_one_worker_makes_alone_is_named_at_once(
    launcher: Launcher, tmp_path: Path, strategy: str
) -> None:
    with pytest.raises(WaitError, match=r"worker 0 waits in a report.* for worker 1; worker 1 has left its loop"):
        run(launcher, tmp_path, strategy, "reports")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_team_whose_workers_make_the_same_calls_ends_well(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    assert run(launcher, tmp_path, strategy, "well").steps == 8
