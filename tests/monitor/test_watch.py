"""`offbeat run --monitor` and `offbeat explain` on sick and healthy programs, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import paths
import pytest
from cli_support import Offbeat, in_process, write
from sick_scripts.cases import SICK, script_of

from offbeat.monitor import EXIT_CODES, LASTING
from offbeat.runtime.launch import Launcher

pytestmark = pytest.mark.slow

BEGIN = """\
import time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
rank, t = dist.get_rank(), torch.ones(4)
"""
DDP = """\
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(100, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.ones(8, 100)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


TRIED = ("early", "order", "starving", "dead_worker", "dead_server", "nan_ddp", "nan_push")
"""Sick runs that are soon over; all of them are in `benchmarks/sick_runs.py`."""


@pytest.mark.parametrize("name", TRIED)
def test_a_sick_run_is_named_at_once_and_after_the_fact(name: str, offbeat_: Offbeat) -> None:
    case, code = SICK[name], EXIT_CODES[SICK[name].kind]
    strategy = ("--strategy", case.strategy) if case.strategy else ()
    faults = [word for sentence in case.disturb for word in ("--disturb", sentence)]
    said = offbeat_("run", script_of(name), "--workers", str(case.workers), "--monitor", *strategy, *faults)
    survives = case.kind in LASTING
    assert said.code == (0 if survives else code), said.err
    explained = offbeat_("explain", "runs/latest")
    assert explained.code == code
    for word in (f"{case.kind}: ", *case.words):
        assert word in said.err
        assert word in explained.out


def test_a_wait_inside_ddp_is_part_of_a_deadlock(offbeat_: Offbeat) -> None:
    script = paths.ROOT / "examples" / "hanging_ddp.py"
    said = offbeat_("run", script, "--workers", "2", "--monitor")
    assert said.code == EXIT_CODES["deadlock"], said.err
    assert "deadlock: worker 0 waits for worker 1 in receive from worker 1 #1 of group world, called at" in said.err
    assert "worker 1 waits for worker 0 in all_reduce" in said.err


def test_a_worker_that_does_something_else_is_said_with_its_stack_and_the_run_goes_on(
    offbeat_: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.monitor.live.PATIENCE", 0.5)
    nap = """\
def nap():
    deadline = time.monotonic() + 60
    while '"verdict"' not in Path("runs/latest/run.json").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
if rank == 1:
    nap()
dist.barrier()
"""
    said = offbeat_("run", write(tmp_path / "asleep.py", BEGIN + nap), "--workers", "2", "--monitor")
    assert said.code == 0, said.err
    assert "silent: worker 0 has waited" in said.err
    assert "for worker 1 in barrier #1 of group world, called at asleep.py:11" in said.err
    assert "in nap" in said.err
    assert offbeat_("explain", "runs/latest").code == 0


def test_a_worker_that_is_paused_now_and_then_is_named_by_the_time_it_costs(offbeat_: Offbeat) -> None:
    sentences = ("worker 1: pause 300ms every 600ms", "worker *: pace 25ms")
    disturbed = [word for sentence in sentences for word in ("--disturb", sentence)]
    goal = ("--workers", "2", "--steps", "170", "--target", "2")
    said = offbeat_("run", "offbeat.tasks.digits", "--strategy", "allreduce", *goal, "--monitor", *disturbed)
    assert said.code == 0, said.err
    told = json.loads(offbeat_("explain", "runs/latest", "--format", "json").out)
    assert (told["verdict"]["kind"], told["stragglers"]) == ("straggler", ["worker 1"]), told["blame"]
    worst = told["blame"][0]
    assert worst["run_seconds_lost"] > 0.1 * worst["wall_seconds"]
    assert worst["queued_seconds"] is not None
    assert "straggler: worker 1 was last in" in said.err


def test_a_worker_whose_input_is_slow_is_the_straggler_and_said_to_be(offbeat_: Offbeat, tmp_path: Path) -> None:
    said = offbeat_("run", script_of("slow_input"), "--workers", "2", "--monitor")
    assert said.code == 0
    assert "straggler: worker 1 was last in" in said.err
    explained = offbeat_("explain", "runs/latest", "--format", "json")
    told = json.loads(explained.out)
    assert (explained.code, told["verdict"]["kind"], told["stragglers"]) == (0, "straggler", ["worker 1"])
    worst = told["blame"][0]
    assert (worst["worker"], worst["cause"]) == ("worker 1", "input")
    assert worst["without"] < 0.8 * worst["seconds"]
    drawn = offbeat_("explain", "runs/latest", "--picture", "slow.svg", "--cut", "latest", "--export", "slow.shiviz")
    assert "straggler: worker 1 was last in" in drawn.out
    assert drawn.out.count("): consistent.") == 1
    assert "called at helping.py" in (tmp_path / "slow.svg").read_text()
    assert offbeat_("explain", "slow.shiviz").out.startswith("2 processes, ")


def test_an_error_of_its_own_stays_the_reason(offbeat_: Offbeat, tmp_path: Path) -> None:
    wrong = """\
if rank == 1:
    deadline = time.monotonic() + 60
    while not Path("there").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    raise ValueError("out of range")
Path("there").touch()
dist.barrier()
"""
    said = offbeat_("run", write(tmp_path / "wrong.py", BEGIN + wrong), "--workers", "2", "--monitor")
    assert said.code == 1
    assert "worker 1 failed with ValueError: out of range" in said.err
    explained = offbeat_("explain", "runs/latest")
    assert explained.code == 0
    assert "worker 0 waits for worker 1 in barrier #1" in explained.out


@pytest.mark.parametrize("strategy", ["ddp", "allreduce", "server(shards=2)", "gossip(asynchronous=True)"])
def test_healthy_runs_get_no_verdict(strategy: str, offbeat_: Offbeat) -> None:
    options = ("--strategy", strategy, "--workers", "2", "--steps", "12", "--monitor")
    said = offbeat_("run", "offbeat.tasks.digits", *options)
    assert said.code == 0, said.err
    explained = offbeat_("explain", "runs/latest", "--format", "json")
    told = json.loads(explained.out)
    assert (explained.code, told["verdict"], told["waiting"], told["dropped"]) == (0, None, [], 0)
    assert all(count > 12 for count in told["events"].values())
    assert bool(told["staleness"]) == strategy.startswith("server")


def test_gloo_under_the_backend_of_ours_is_watched_too(offbeat_: Offbeat) -> None:
    said = offbeat_("run", script_of("groups"), "--workers", "2", "--monitor", "--backend", "offbeat")
    assert said.code == EXIT_CODES["deadlock"], said.err


CASES = """\
from backend_cases import features, groups
from backend_cases.running import BEYOND, PREFIX, World
world = World("gloo")
world.open()
for module in (features, groups):
    for name in [name for name in vars(module) if name.startswith(PREFIX) and not name.startswith(BEYOND)]:
        vars(module)[name](world)
        print("did", name)
"""


def test_what_torch_builds_on_gloo_runs_unchanged_under_watch(offbeat_: Offbeat, tmp_path: Path) -> None:
    said = offbeat_("run", write(tmp_path / "cases.py", CASES), "--workers", "2", "--monitor")
    assert said.code == 0, said.err
    assert said.out.count("did case_") > 20


def test_a_group_may_be_destroyed_before_the_model_that_uses_it(offbeat_: Offbeat, tmp_path: Path) -> None:
    program = BEGIN + DDP + "for _ in range(20):\n    step()\ndist.destroy_process_group()\n"
    script = write(tmp_path / "alive.py", program)
    for _ in range(3):
        assert offbeat_("run", script, "--workers", "2", "--monitor").code == 0


def test_a_run_without_events_says_how_to_get_them(offbeat_: Offbeat, tmp_path: Path) -> None:
    assert offbeat_("run", write(tmp_path / "calm.py", "print('calm')\n"), "--workers", "1").code == 0
    said = offbeat_("explain", "runs/latest")
    assert said.code == 2
    assert "has no events" in said.err
    assert "offbeat run --monitor" in said.err
