"""Runs of asynchronous gossip whose workers are killed, stopped and continued, on one host and on several."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import Offbeat, in_process, write
from fault_runs import (
    EXAMPLES,
    WHOLE,
    Blow,
    Tally,
    assert_nothing_is_left,
    parameters,
    random_gossip,
    seen_in_last_epoch,
    struck,
    survive_gossip,
)

from offbeat.errors import WorkerError
from offbeat.run.drive import Result, drive, fit
from offbeat.run.job import Job, Script
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal

STRATEGY = "gossip(complete, asynchronous=True)"
LOOP = """\
import hashlib, json, sys
from pathlib import Path
import torch, offbeat
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
with offbeat.init() as team:
    middle = nn.Linear(90, 60)
    model = nn.Sequential(nn.Linear(1, 90), nn.Tanh(), middle, nn.Tanh(), nn.Linear(60, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = TensorDataset(torch.arange(48.0)[:, None])
    model, optimizer, batches = team.prepare(model, optimizer, DataLoader(points, batch_size=12, shuffle=True))
    done = False
    while not done:
        seen = []
        for (x,) in batches:
            seen += x.flatten().int().tolist()
            optimizer.zero_grad()
            (model(x / 48) - x / 48).square().mean().backward()
            optimizer.step()
        with team.averaged(model):
            held = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
            done = team.report(loss=float(seen[0]))
        line = {"seen": seen, "model": hashlib.sha256(held).hexdigest(), "done": done, "step": team.step}
        with (Path(sys.argv[1]) / f"seen-{team.rank}").open("a") as file:
            file.write(json.dumps(line) + "\\n")
"""


def lines_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a worker has written, an epoch in each line."""
    return [json.loads(line) for line in (folder / f"seen-{rank}").read_text().splitlines()]


def log_of(result: Result, rank: int) -> str:
    """What a worker has said."""
    return (result.run / "logs" / f"worker-{rank}.log").read_text()


@pytest.fixture(scope="module")
def survived(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A loop of one's own, of whose four workers the first is killed, and another stopped and continued."""
    folder = tmp_path_factory.mktemp("survived")
    faults = ("worker *: pace 40ms", "worker 0: kill at step 9", "worker 1: stop 2s at step 14")
    goal = Goal(strategy=STRATEGY, steps=48, seed=3, timeout=60.0, disturb=faults, watch=True)
    script = write(folder / "loop.py", LOOP)
    return drive(Job(Script(str(script), (str(folder),)), goal, 4, 1, folder / "runs"), launcher=launcher), folder


@pytest.mark.slow
def test_the_others_go_on_when_one_is_killed_and_one_is_stopped(survived: tuple[Result, Path]) -> None:
    result, folder = survived
    assert (result.steps, sorted(result.died)) == (48, ["worker 0", "worker 1"])
    assert result.disturbances["fired"] == result.disturbances["asked"] == 6
    assert [lines_of(folder, rank)[-1]["step"] for rank in (2, 3)] == [48, 48]
    told = json.loads((result.run / "run.json").read_text())
    assert told["state"] == "finished"
    assert told["result"]["died"] == result.died
    assert told["verdict"]["kind"] == "dead"
    assert "worker 0 was ended by signal 9 after step 9, and the run went on without it" in told["verdict"]["message"]
    assert_nothing_is_left(result.run)


@pytest.mark.slow
def test_one_that_was_stopped_for_long_ends_as_fenced(survived: tuple[Result, Path]) -> None:
    assert "worker 1 gave no sign of life for 1.5 s and was declared dead" in log_of(survived[0], 1)
    assert "Traceback" not in log_of(survived[0], 1)


@pytest.mark.slow
def test_all_hold_the_same_mean_and_hear_the_same_verdict(survived: tuple[Result, Path]) -> None:
    """Whoever was in an evaluation, in each epoch: four workers at first, two in the end."""
    written = [lines_of(survived[1], rank) for rank in range(4)]
    assert [len(lines) for lines in written] == [2, 3, 12, 12]
    for epoch in range(12):
        there = [lines[epoch] for lines in written if epoch < len(lines)]
        assert len({(line["model"], line["done"]) for line in there}) == 1, f"epoch {epoch}"


@pytest.mark.slow
def test_the_living_have_the_data_of_the_dead(survived: tuple[Result, Path]) -> None:
    last = [lines_of(survived[1], rank)[-1]["seen"] for rank in (2, 3)]
    assert sorted(last[0] + last[1]) == list(range(48))
    assert {len(seen) for seen in last} == {24}
    first = [lines_of(survived[1], rank)[0]["seen"] for rank in range(4)]
    assert sorted(itertools.chain(*first)) == list(range(48))


@pytest.mark.slow
def test_digits_are_learned_although_a_worker_is_killed(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offbeat_: Offbeat = in_process(launcher, tmp_path, monkeypatch, capsys)
    words = ("--strategy", "gossip(asynchronous=True)", "--workers", "4", "--format", "json")
    said = offbeat_("run", "offbeat.tasks.digits", *words, "--disturb", "worker 0: kill at step 30")
    assert said.code == 0, said.err
    result = json.loads(said.out)
    assert (result["reached_target"], result["died"]) == (True, ["worker 0"])
    assert result["disturbances"] == {"asked": 1, "fired": 1}


@pytest.mark.slow
def test_a_short_stop_costs_nobody_its_place(launcher: Launcher, tmp_path: Path) -> None:
    faults = ["worker *: pace 10ms", "worker 0: stop 400ms at step 6", "worker 1: stop 400ms at step 9"]
    task = Tally(str(tmp_path))
    result = fit(task, STRATEGY, workers=2, steps=24, target=1e9, disturb=faults, out=tmp_path, launcher=launcher)
    assert (result.died, result.steps, result.score) == ([], 24, pytest.approx(WHOLE))
    # Both have counted to the end, and no move was lost on the way.
    torch.testing.assert_close(parameters(result)["weight"], torch.full((7,), 24.0), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_new_worker_takes_the_place_of_the_dead_one(launcher: Launcher, tmp_path: Path) -> None:
    faults = ["worker *: pace 25ms", "worker 0: kill at step 9"]
    options: dict[str, Any] = {"steps": 120, "target": 1e9, "replace": 1, "timeout": 60.0}
    result = fit(
        Tally(str(tmp_path)), STRATEGY, workers=3, disturb=faults, out=tmp_path / "runs", launcher=launcher, **options
    )
    assert (result.died, result.joined, result.steps) == (["worker 0"], ["worker 0"], 120)
    assert seen_in_last_epoch(tmp_path, range(3)) == list(range(EXAMPLES))
    assert_nothing_is_left(result.run)


@pytest.mark.slow
def test_a_run_whose_workers_all_die_says_so(launcher: Launcher, tmp_path: Path) -> None:
    faults = ["worker 0: kill at step 3", "worker 1: kill at step 4"]
    with pytest.raises(WorkerError, match="was ended by SIGKILL"):
        fit(Tally(str(tmp_path)), STRATEGY, workers=2, steps=24, disturb=faults, out=tmp_path, launcher=launcher)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_kills_and_stops_lose_and_leave_nothing(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    survive_gossip(random_gossip(seed), launcher, tmp_path)


@pytest.mark.slow
def test_one_may_be_killed_in_the_middle_of_an_evaluation(launcher: Launcher, tmp_path: Path) -> None:
    """A kill from outside, just when a worker has seen the last batch of an epoch, and goes to meet the others."""
    with struck(Blow("worker-0", rank=0, lines=8, seconds=0.002), tmp_path, tmp_path / "runs"):
        result = fit(
            Tally(str(tmp_path)),
            STRATEGY,
            workers=3,
            steps=40,
            target=1e9,
            timeout=60.0,
            disturb="worker *: pace 10ms",
            out=tmp_path / "runs",
            launcher=launcher,
        )
    assert (result.died, result.steps, result.score) == (["worker 0"], 40, pytest.approx(WHOLE))
    assert seen_in_last_epoch(tmp_path, (1, 2)) == list(range(EXAMPLES))


@pytest.mark.slow
@pytest.mark.usefixtures("networks")
def test_workers_of_several_hosts_meet_in_pairs_and_one_may_die(launcher: Launcher, tmp_path: Path) -> None:
    faults = ["worker *: pace 10ms", "worker 0: kill at step 20"]
    result = fit(
        Tally(str(tmp_path)),
        "gossip(asynchronous=True)",
        hosts=Hosts.alike(4, "100Mbit"),
        steps=60,
        target=1e9,
        timeout=60.0,
        disturb=faults,
        out=tmp_path / "runs",
        launcher=launcher,
    )
    assert (result.died, result.steps, result.score) == (["worker 0"], 60, pytest.approx(WHOLE))
    assert len({host["address"] for host in result.hosts}) == 4
    assert result.gossip["pairs"] > 20
    assert seen_in_last_epoch(tmp_path, range(1, 4)) == list(range(EXAMPLES))
    assert_nothing_is_left(result.run)
