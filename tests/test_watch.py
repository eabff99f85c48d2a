"""`offbeat run --watch` and `offbeat explain` on sick and healthy programs, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_support import Offbeat, in_process, write
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
SUM = "all_reduce #1 (sum of float32 x 4)"
SICK = {
    "early": (
        DDP + "for number in range(20):\n    if rank == 1 and number == 7:\n        break\n    step()\n",
        12,
        ["worker 0 waits for worker 1 in all_reduce #", "called at early.py:10", "worker 1 has ended its program"],
    ),
    "order": (
        "if rank == 0:\n    dist.all_reduce(t)\n    dist.broadcast(t, 0)\n"
        "else:\n    dist.broadcast(t, 0)\n    dist.all_reduce(t)\n",
        11,
        [f"worker 0 in {SUM} of group world, called at order.py:6", "worker 1", "broadcast #1", "order.py:9"],
    ),
    "size": (
        "dist.all_reduce(torch.ones(4 + rank))\n",
        11,
        ["all_reduce #1 (sum of float32 x 5)", SUM, "called at size.py:5", "different shape"],
    ),
    "cycle": (
        "dist.recv(t, 1 - rank)\ndist.send(t, 1 - rank)\n",
        10,
        [
            "worker 0 waits for worker 1 in receive from worker 1 #1 of group world, called at cycle.py:5",
            "worker 1 waits for worker 0 in receive from worker 0 #1 of group world, called at cycle.py:5",
            'cycle.py", line 5 in <module>',
        ],
    ),
    "groups": (
        "both = [dist.new_group([0, 1]), dist.new_group([0, 1])]\n"
        "for group in both if rank == 0 else both[::-1]:\n    dist.all_reduce(t, group=group)\n",
        10,
        [f"worker 0 waits for worker 1 in {SUM} of group 1", f"worker 1 waits for worker 0 in {SUM} of group 2"],
    ),
}


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", SICK)
def test_what_can_never_go_on_is_named_and_ended(name: str, offbeat_: Offbeat, tmp_path: Path) -> None:
    program, code, words = SICK[name]
    said = offbeat_("run", write(tmp_path / f"{name}.py", BEGIN + program), "--workers", "2", "--watch")
    assert said.code == code, said.err
    explained = offbeat_("explain", "runs/latest")
    assert explained.code == code
    for word in words:
        assert word in said.err
        assert word in explained.out


def test_a_worker_that_does_something_else_is_said_with_its_stack_and_the_run_goes_on(
    offbeat_: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.monitor.looking.PATIENCE", 0.5)
    nap = """\
def nap():
    deadline = time.monotonic() + 60
    while '"verdict"' not in Path("runs/latest/run.json").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
if rank == 1:
    nap()
dist.barrier()
"""
    said = offbeat_("run", write(tmp_path / "asleep.py", BEGIN + nap), "--workers", "2", "--watch")
    assert said.code == 0, said.err
    assert "silent: worker 0 has waited" in said.err
    assert "for worker 1 in barrier #1 of group world, called at asleep.py:11" in said.err
    assert "in nap" in said.err
    assert offbeat_("explain", "runs/latest").code == 0


def test_a_worker_that_is_slow_in_every_step_is_the_straggler(offbeat_: Offbeat, tmp_path: Path) -> None:
    slow = DDP + "for _ in range(20):\n    time.sleep(0.08 if rank == 1 else 0.01)\n    step()\n"
    assert offbeat_("run", write(tmp_path / "slow.py", BEGIN + slow), "--workers", "2", "--watch").code == 0
    explained = offbeat_("explain", "runs/latest", "--format", "json")
    told = json.loads(explained.out)
    assert (explained.code, told["verdict"], told["stragglers"]) == (0, None, ["worker 1"])
    worst = told["blame"][0]
    assert worst["worker"] == "worker 1"
    assert worst["without"] < 0.7 * worst["seconds"]
    drawn = offbeat_("explain", "runs/latest", "--draw", "slow.svg", "--cut", "latest", "--export", "slow.shiviz")
    assert "straggler: worker 1 was last in" in drawn.out
    assert drawn.out.count("): consistent.") == 1
    assert "called at slow.py" in (tmp_path / "slow.svg").read_text()
    assert offbeat_("explain", "slow.shiviz").out.startswith("2 processes, ")


def test_an_error_of_its_own_stays_the_reason(offbeat_: Offbeat, tmp_path: Path) -> None:
    wrong = "if rank == 1:\n    raise ValueError('out of range')\ndist.barrier()\n"
    said = offbeat_("run", write(tmp_path / "wrong.py", BEGIN + wrong), "--workers", "2", "--watch")
    assert said.code == 1
    assert "worker 1 failed with ValueError: out of range" in said.err
    explained = offbeat_("explain", "runs/latest")
    assert explained.code == 0
    assert "worker 0 waits for worker 1 in barrier #1" in explained.out


@pytest.mark.parametrize("strategy", ["ddp", "allreduce", "server", "local(4)"])
def test_healthy_runs_get_no_verdict(strategy: str, offbeat_: Offbeat) -> None:
    options = ("--strategy", strategy, "--workers", "2", "--steps", "12", "--watch")
    said = offbeat_("run", "offbeat.tasks.digits", *options)
    assert said.code == 0, said.err
    explained = offbeat_("explain", "runs/latest", "--format", "json")
    told = json.loads(explained.out)
    assert (explained.code, told["verdict"], told["waiting"], told["dropped"]) == (0, None, [], 0)
    assert all(count > 12 for count in told["events"].values())


def test_gloo_under_the_backend_of_ours_is_watched_too(offbeat_: Offbeat, tmp_path: Path) -> None:
    program, code, _ = SICK["groups"]
    script = write(tmp_path / "groups.py", BEGIN + program)
    said = offbeat_("run", script, "--workers", "2", "--watch", "--backend", "offbeat")
    assert said.code == code, said.err


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
    said = offbeat_("run", write(tmp_path / "cases.py", CASES), "--workers", "2", "--watch")
    assert said.code == 0, said.err
    assert said.out.count("did case_") > 20


def test_a_group_may_be_destroyed_before_the_model_that_uses_it(offbeat_: Offbeat, tmp_path: Path) -> None:
    program = BEGIN + DDP + "for _ in range(20):\n    step()\ndist.destroy_process_group()\n"
    script = write(tmp_path / "alive.py", program)
    for _ in range(3):
        assert offbeat_("run", script, "--workers", "2", "--watch").code == 0


def test_a_run_without_events_says_how_to_get_them(offbeat_: Offbeat, tmp_path: Path) -> None:
    assert offbeat_("run", write(tmp_path / "calm.py", "print('calm')\n"), "--workers", "1").code == 0
    said = offbeat_("explain", "runs/latest")
    assert said.code == 2
    assert "has no events" in said.err
    assert "offbeat run --watch" in said.err
