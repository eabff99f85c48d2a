"""Workers and servers that die, stop or speak nonsense, on real processes: the run goes on, or says what was lost."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import write
from fault_runs import (
    STEPS,
    STEPS_OF_AN_EPOCH,
    Blow,
    Schedule,
    applied,
    assert_nothing_is_left,
    parameters,
    random_schedule,
    struck,
    survive,
)
from fit_tasks import Watched

from offbeat.errors import RunError, StrategyError, WorkerError
from offbeat.monitor import Verdict
from offbeat.run.drive import Result, drive, fit
from offbeat.run.job import Job, Script
from offbeat.runtime.launch import Launcher, Role
from offbeat.runtime.run.folder import RunFolder
from offbeat.runtime.run.settings import Goal
from offbeat.runtime.run.status import processes
from offbeat.tasks.mixture import Mixture

Fit = Callable[..., Result]
RULES = ("bsp", "ssp(2)", "asp")


@pytest.fixture
def learn(launcher: Launcher, tmp_path: Path) -> Fit:
    """Fit a small curve on three workers; each run notes what it sees in a folder of its own."""
    count = iter(range(100))

    def run(strategy: str, **options: Any) -> Result:
        folder = tmp_path / f"run-{next(count)}"
        folder.mkdir()
        task = Watched(str(folder), examples=48, batch=6)
        known: dict[str, Any] = {
            "workers": 3,
            "steps": 24,
            "seed": 5,
            "target": 1e9,
            "out": tmp_path / "runs",
            "timeout": 60.0,
        }
        result = fit(task, strategy, launcher=launcher, **(known | options))
        assert_nothing_is_left(result.run)
        return result

    return run


def equal(one: Result, other: Result, tolerance: float = 1e-6) -> None:
    """Fail unless two runs have left the same parameters."""
    ours, theirs = parameters(one), parameters(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def log_of(result: Result, name: str) -> str:
    return (result.run / "logs" / f"{name}.log").read_text()


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_the_others_go_on_when_a_worker_is_killed(launcher: Launcher, tmp_path: Path, rule: str, worker: int) -> None:
    step = random.Random(f"{rule} {worker}").randint(0, STEPS - STEPS_OF_AN_EPOCH - 1)
    disturb = [f"worker {worker}: kill at step {step}"]
    schedule = Schedule(f"server(consistency={rule})", 3, disturb, killed={worker: step}, aggregated=rule == "bsp")
    result = survive(schedule, launcher, tmp_path)
    assert result.died == [f"worker {worker}"]
    assert result.test_score == pytest.approx(result.score)


class Signals:
    """Told how a run goes, sends signals to some of its processes once it has made a few steps."""

    def __init__(self, wanted: dict[str, signal.Signals]) -> None:
        self._wanted = wanted
        self._folder: RunFolder | None = None

    def begin(self, job: Job, folder: RunFolder) -> None:
        del job
        self._folder = folder

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        del role
        if message.get("step", 0) >= 5 and self._folder is not None:
            for process in processes(self._folder):
                if process.role in self._wanted:
                    os.kill(process.pid, self._wanted.pop(process.role))

    def tick(self) -> None: ...

    def verdict(self, verdict: Verdict) -> None: ...


@pytest.mark.slow
def test_a_copy_and_a_worker_may_be_interrupted_like_any_death(learn: Fit) -> None:
    wanted = {"server 1.1": signal.SIGINT, "worker 1": signal.SIGINT}
    sent = Signals(dict(wanted))
    paced = ["worker *: pace 40ms"]
    result = learn("server(shards=2, replicas=1)", workers=3, steps=90, disturb=paced, watcher=sent)
    assert sorted(result.died) == sorted(wanted)
    assert result.steps == 90


@pytest.mark.slow
def test_two_of_three_may_die(launcher: Launcher, tmp_path: Path) -> None:
    disturb = ["worker 0: kill at step 3", "worker 1: kill at step 17"]
    result = survive(Schedule("server(shards=2)", 3, disturb, killed={0: 3, 1: 17}), launcher, tmp_path)
    assert result.died == ["worker 0", "worker 1"]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_worker_that_was_silent_too_long_leaves_and_the_run_goes_well(
    launcher: Launcher, tmp_path: Path, rule: str
) -> None:
    schedule = Schedule(
        f"server(consistency={rule})",
        3,
        ["worker 0: stop 2500ms at step 9"],
        killed={0: 9},
        aggregated=rule == "bsp",
    )
    result = survive(schedule, launcher, tmp_path)
    assert result.died == ["worker 0"]
    assert "worker 0 gave no sign of life for 1.5 s and was declared dead" in log_of(result, "worker-0")
    assert "Traceback" not in log_of(result, "worker-0")


@pytest.mark.slow
def test_a_short_stop_is_no_death(learn: Fit) -> None:
    plain = learn("server(shards=2)")
    stopped = learn("server(shards=2)", disturb=["worker 1: stop 400ms at step 5", "server 0: stop 400ms at step 9"])
    assert (stopped.died, stopped.disturbances) == ([], {"asked": 2, "fired": 2})
    equal(stopped, plain)


@pytest.mark.slow
def test_what_was_read_at_an_evaluation_is_fresh(learn: Fit) -> None:
    result = learn("server(consistency=ssp(50))", workers=2)
    assert (result.steps, result.epochs) == (24, 3)
    assert max(map(int, result.staleness)) <= 24 // 3, "the bound alone would let all steps go without a read"


@pytest.mark.slow
def test_the_last_worker_is_not_given_up_for_being_silent(learn: Fit) -> None:
    result = learn("server", disturb=["worker 0: kill at step 3", "worker 1: stop 2s at step 4"], workers=2)
    assert (result.died, result.disturbances["fired"]) == (["worker 0"], 2)


@pytest.mark.slow
def test_the_only_copy_of_a_shard_is_not_given_up_for_being_silent(learn: Fit) -> None:
    plain, stopped = learn("server"), learn("server", disturb=["server 0: stop 2500ms at step 9"])
    assert (stopped.died, stopped.disturbances["fired"]) == ([], 1)
    equal(stopped, plain)


@pytest.mark.slow
def test_a_run_that_nobody_finishes_has_not_gone_well(learn: Fit, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="was ended by SIGKILL"):
        learn("server", disturb=["worker 0: kill at step 3", "worker 1: kill at step 4"], workers=2)
    told = json.loads((tmp_path / "runs" / "latest" / "run.json").read_text())
    assert (told["state"], told["disturbances"]["fired"]) == ("failed", 2)


@pytest.mark.slow
def test_a_run_that_has_lost_a_worker_can_be_resumed_with_all(launcher: Launcher, learn: Fit, tmp_path: Path) -> None:
    lost = learn("server", disturb="worker 1: kill at step 5", steps=9)
    assert lost.died == ["worker 1"]
    task = Watched(str(tmp_path / "run-0"), examples=48, batch=6)
    again = fit(task, resume=lost.run, steps=15, launcher=launcher)
    assert (again.steps, again.died, again.workers) == (15, [], 3)


# -- servers -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shard", [0, 1])
def test_a_killed_server_loses_no_acknowledged_push_and_applies_none_twice(learn: Fit, shard: int) -> None:
    plain = learn("server(shards=2, replicas=1)")
    step = random.Random(shard).randint(0, 20)
    killed = learn("server(shards=2, replicas=1)", disturb=f"server {shard}: kill at step {step}")
    assert killed.disturbances == {"asked": 1, "fired": 1}
    assert killed.died == [f"server {shard}.0"]
    assert killed.servers[shard]["served_by"] == f"server {shard}.1"
    assert [applied(account) for account in killed.servers] == [3 * 24, 3 * 24]
    assert [account["version"] for account in killed.servers] == [24, 24]
    equal(killed, plain)


@pytest.mark.slow
@pytest.mark.parametrize("replica", [0, 1, 2])
def test_any_replica_may_be_killed_at_any_moment(launcher: Launcher, tmp_path: Path, replica: int) -> None:
    blow = Blow(f"server-0.{replica}", rank=1, lines=6, seconds=random.Random(replica).random() * 0.02)
    schedule = Schedule("server(replicas=2, consistency=asp)", 2, ["worker *: pace 20ms"], blow, aggregated=False)
    result = survive(schedule, launcher, tmp_path)
    assert result.died == [f"server 0.{replica}"]
    assert applied(result.servers[0]) == 2 * STEPS


@pytest.mark.slow
def test_two_copies_may_die_if_there_is_a_third(learn: Fit, tmp_path: Path) -> None:
    plain = learn("server(replicas=2)", workers=2)
    blow = Blow("server-0.1", rank=0, lines=3 * 15, seconds=0.0)
    with struck(blow, tmp_path / "run-1", tmp_path / "runs"):
        killed = learn("server(replicas=2)", workers=2, disturb=["server 0: kill at step 6", "worker *: pace 20ms"])
    assert sorted(killed.died) == ["server 0.0", "server 0.1"]
    assert applied(killed.servers[0]) == 2 * 24
    equal(killed, plain)


@pytest.mark.slow
def test_the_one_who_took_over_may_be_killed_too_because_a_new_copy_was_made(learn: Fit) -> None:
    plain = learn("server(shards=2, replicas=1)", workers=2, steps=90)
    sentences = ["worker *: pace 30ms", "server 0: kill at step 30", "server 0: kill at step 60"]
    killed = learn("server(shards=2, replicas=1)", workers=2, steps=90, disturb=sentences)
    assert killed.disturbances == {"asked": 4, "fired": 4}
    assert killed.died == ["server 0.0", "server 0.1"]
    assert killed.joined[0] == "server 0.2"
    assert [account["served_by"] for account in killed.servers] == ["server 0.2", "server 1.0"]
    assert [applied(account) for account in killed.servers] == [2 * 90, 2 * 90]
    assert [account["version"] for account in killed.servers] == [90, 90]
    equal(killed, plain)


@pytest.mark.slow
def test_gradients_from_before_a_takeover_are_corrected_after_it(learn: Fit) -> None:
    """One worker, which reads every few steps only: pushes come late, and always in the same order."""
    strategy = "server(replicas=1, consistency=ssp(3), delay_compensation={})"
    plain, off = (learn(strategy.format(strength), workers=1) for strength in (0.5, 0.0))
    killed = learn(strategy.format(0.5), workers=1, disturb="server 0: kill at step 10")
    assert killed.died == ["server 0.0"]
    equal(killed, plain)
    with pytest.raises(AssertionError):
        equal(off, plain, 1e-4)


@pytest.mark.slow
def test_a_server_that_was_stopped_and_goes_on_is_fenced(learn: Fit) -> None:
    plain = learn("server(shards=2, replicas=1)", workers=2, steps=130)
    sentences = ["worker *: pace 40ms", "server 0: stop 5s at step 5"]
    fenced = learn("server(shards=2, replicas=1)", workers=2, steps=130, disturb=sentences)
    assert fenced.disturbances == {"asked": 3, "fired": 3}
    assert fenced.died == ["server 0.0"]
    # It has gone on while the others still trained, and found that nobody needs it.
    assert "server 0.0 gave no sign of life for 1.5 s and was declared dead" in log_of(fenced, "server-0.0")
    assert [applied(account) for account in fenced.servers] == [2 * 130, 2 * 130]
    equal(fenced, plain)


@pytest.mark.slow
def test_without_a_copy_the_run_says_what_is_lost_and_is_resumed_from_its_checkpoint(
    launcher: Launcher, learn: Fit, tmp_path: Path
) -> None:
    plain = learn("server(shards=2)")
    said = json.loads((plain.run / "metrics.jsonl").read_text().splitlines()[-1])
    assert (said["pushes"], list(said["waits"])) == ({"applied": 3 * 2 * 24}, [f"worker {rank}" for rank in range(3)])
    assert all(link["sent"] and link["received"] for of_worker in said["links"].values() for link in of_worker.values())
    assert {name for of_worker in said["links"].values() for name in of_worker} == {"server 0.0", "server 1.0"}
    with pytest.raises(RunError, match=r"shard 1 is lost: .*server 1\.0 was ended by SIGKILL") as lost:
        learn("server(shards=2)", checkpoint_every=5, disturb="server 1: kill at step 13")
    assert "--resume" in str(lost.value)
    assert "replicas=1" in str(lost.value)
    run = (tmp_path / "runs" / "latest").resolve()
    assert_nothing_is_left(run)
    told = json.loads((run / "run.json").read_text())
    assert (told["state"], told["disturbances"]["fired"]) == ("failed", 1)
    task = Watched(str(tmp_path / "run-1"), examples=48, batch=6)
    resumed = fit(task, resume=run, launcher=launcher, disturb="server 0: kill at step 4")
    assert resumed.disturbances == {"asked": 1, "fired": 0}, "that step was done before"
    assert (resumed.steps, resumed.died, resumed.run) == (24, [], run)
    equal(resumed, plain)


@pytest.mark.slow
def test_the_part_of_a_dead_worker_is_taken_over_where_nothing_is_learned_by_gradients(
    launcher: Launcher, tmp_path: Path
) -> None:
    known: dict[str, Any] = {"steps": 30, "target": 0.0, "out": tmp_path / "runs", "launcher": launcher}
    alone = fit(Mixture(examples=600), "single", workers=1, **known)
    killed = ["worker 1: kill at step 2", "worker *: pace 5ms"]
    result = fit(Mixture(examples=600), "server(shards=2)", workers=3, disturb=killed, **known)
    assert (result.died, result.disturbances["fired"]) == (["worker 1"], 4)
    # With what the dead worker told last in the sum for ever, it would come to another place.
    assert result.score == pytest.approx(alone.score, abs=1e-7)


# -- numbers -----------------------------------------------------------------------------------------------------------

NOT_A_NUMBER = """\
import torch, offbeat

torch.manual_seed(1)
with offbeat.init(check_finite=False) as team:
    model = torch.nn.Linear(3, 1)
    model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        if team.rank == 1 and step == 4:
            model.weight.grad[0, 2] = float("nan")
        optimizer.step()
    with team.averaged(model):
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        team.report(bias=float(model.bias))
"""


@pytest.mark.parametrize("rule", ["bsp", "asp"])
def test_a_push_with_nan_is_refused_named_and_counted(launcher: Launcher, tmp_path: Path, rule: str) -> None:
    script = write(tmp_path / "loop.py", NOT_A_NUMBER)
    goal = Goal(strategy=f"server(consistency={rule})", timeout=60.0)
    result = drive(Job(Script(str(script)), goal, 2, 1, tmp_path / "runs"), launcher=launcher)
    (server,) = result.servers
    assert (server["pushes"]["refused"], applied(server)) == (1, 2 * 8 - 1)
    (refusal,) = server["refusals"]
    assert refusal["worker"] == 1
    assert refusal["reason"] == "1 of 4 numbers are NaN or inf"
    assert result.steps == 8
    assert result.died == []
    assert result.refusals == ["worker 1: 1 of 4 numbers are NaN or inf"], "not only worker 0's are told of"


TWO_TEAMS = """\
import torch, offbeat

for _ in range(2):
    with offbeat.init() as team:
        model = torch.nn.Linear(1, 1)
        model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
"""


def test_a_second_team_in_one_run_is_refused_with_the_reason(launcher: Launcher, tmp_path: Path) -> None:
    script = write(tmp_path / "loop.py", TWO_TEAMS)
    with pytest.raises(StrategyError, match="servers serve one team in a run"):
        drive(Job(Script(str(script)), Goal(strategy="server"), 2, 1, tmp_path / "runs"), launcher=launcher)


def test_a_script_that_trains_nothing_has_no_dead(launcher: Launcher, tmp_path: Path) -> None:
    script = write(tmp_path / "idle.py", "print('nothing to do')\n")
    result = drive(Job(Script(str(script)), Goal(strategy="server"), 2, 1, tmp_path / "runs"), launcher=launcher)
    assert (result.steps, result.died) == (0, [])


# -- all of it at random -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_faults_lose_double_and_leave_nothing(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    survive(random_schedule(seed), launcher, tmp_path)


def test_ten_schedules_have_faults_of_every_kind() -> None:
    said = " ".join(" ".join(random_schedule(seed).disturb) for seed in range(10))
    assert all(word in said for word in ("worker 0: ", "server 0: kill", ": stop 200ms", ": stop 2s", "worker 1: kill"))
