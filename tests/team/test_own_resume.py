"""A script that was killed and resumed ends bit for bit like one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from killed_scripts import compare, run_killed
from own_scripts.running import HERE, left, run_script, same

from conftest import clean_environment, wait_until
from offbeat.errors import RunError
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import METRICS_FILE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "style"), [("map", "range"), ("map", "epochs"), ("loading", "range"), ("stream", "epochs")]
)
def test_a_killed_worker_costs_nothing_but_time(launcher: Launcher, tmp_path: Path, data: str, style: str) -> None:
    compare(launcher, tmp_path, "1.4.1", data, style)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce + accumulate(3)", "ddp", "ddp + accumulate(3)"])
def test_every_strategy_goes_on_to_the_same_bits(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    compare(launcher, tmp_path, "1.2.0,2.2.1", "map", "range", strategy=strategy, checkpoint_every=1)


@pytest.mark.slow
def test_a_half_full_sum_of_gradients_is_kept(launcher: Launcher, tmp_path: Path) -> None:
    """A stream does not know its end, so an epoch of 5 batches leaves two for the next; reports write checkpoints."""
    compare(launcher, tmp_path, "1.2.1", "stream", "range", strategy="allreduce + accumulate(3)", checkpoint_every=None)


@pytest.mark.slow
def test_one_worker_alone_goes_on_too(launcher: Launcher, tmp_path: Path) -> None:
    compare(launcher, tmp_path, "1.1.0,2.5.0", "map", "epochs", workers=1, strategy="single")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_several_kills_at_random_steps_cost_nothing_but_time(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    places = sorted(chance.sample([(e, b) for e in range(3) for b in range(1, 6) if (e, b) > (0, 3)], 3))
    kills = ",".join(f"{epoch}.{batch}.{chance.randrange(3)}" for epoch, batch in places)
    compare(launcher, tmp_path, kills, "map", chance.choice(["range", "epochs"]), workers=3)


@pytest.mark.slow
def test_a_killed_launcher_costs_nothing_but_time(launcher: Launcher, tmp_path: Path) -> None:
    goal = {"checkpoint_every": 2, "strategy": "allreduce", "timeout": 30.0}
    expected = run_killed(launcher, tmp_path / "whole", "", "map", "range", **goal)
    out = tmp_path / "left"
    script = [HERE / "resuming.py", "--workers", "2", "--strategy", "allreduce", "--checkpoint-every", "2"]
    words = ["--timeout", "30", "--threads", "1", "--", out, "9.9.9", "map", "range"]
    command = [sys.executable, "-m", "offbeat", "run", *map(str, script + words)]
    with subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stderr=subprocess.DEVNULL) as run:
        folder = tmp_path / "runs" / "latest"
        wait_until(lambda: any(folder.glob("checkpoint/step-*/manifest.json")), "the first checkpoint", 60)
        os.kill(run.pid, signal.SIGKILL)
    run_script(
        launcher, tmp_path, "resuming.py", out, "9.9.9", "map", "range", workers=2, resume=folder.resolve(), **goal
    )
    for one, other in zip(expected, left(out, 2), strict=True):
        same(one["state"], other["state"], tolerance=0)


@pytest.mark.slow
def test_metrics_of_a_resumed_run_are_those_of_one_run(launcher: Launcher, tmp_path: Path) -> None:
    run_killed(launcher, tmp_path, "1.4.0", "map", "range", checkpoint_every=3, strategy="allreduce", timeout=30.0)
    lines = (tmp_path / "runs" / "latest" / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 10, 15]


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["0.first.3.1", "1.second.3.0", "1.first.1.1"])
def test_without_a_seed_a_resumed_run_still_sees_every_example_once(
    launcher: Launcher, tmp_path: Path, kill: str
) -> None:
    goal: dict[str, Any] = {"workers": 2, "checkpoint_every": 2, "timeout": 30.0}
    with pytest.raises(RunError):
        run_script(launcher, tmp_path, "unseeded.py", tmp_path, kill, **goal)
    result = run_script(launcher, tmp_path, "unseeded.py", tmp_path, kill, resume=tmp_path / "runs" / "latest", **goal)
    assert result.steps == 16
    for epoch in range(2):
        for name in ("first", "second"):
            files = sorted(tmp_path.glob(f"{epoch}.{name}.*.json"))
            assert len(files) == 8
            seen = sorted(number for file in files for number in json.loads(file.read_text()))
            assert seen == list(range(24))
    assert (tmp_path / "end-0.json").read_text() == (tmp_path / "end-1.json").read_text()
