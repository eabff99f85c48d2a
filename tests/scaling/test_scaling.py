"""Speed-ups and noise measured in real runs: what is said of them, what is refused, and how the commands print it."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
from cli_support import in_process

import offbeat
from offbeat.cli.commands.scale import print_batch_size, print_scaling
from offbeat.errors import OffbeatError, StrategyError, TaskError, UsageError
from offbeat.run.drive import Result
from offbeat.runtime.launch import Launcher
from offbeat.scaling import BatchSize, Scaling, batch_size, scale
from offbeat.scaling._batch_size import RunStage
from offbeat.scaling._scale import _conclude  # pyright: ignore[reportPrivateUsage]
from offbeat.simulate.laws import gunther
from offbeat.statistics import Estimate
from offbeat.strategies import combined, parse

LOOP = """
import sys
import torch, offbeat
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x @ torch.randn(8) + 0.5 * torch.randn(256)).unsqueeze(1)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model = torch.nn.Linear(8, 1)
every = 2 if "several" in sys.argv else 1
twice = "twice" in sys.argv
with offbeat.init() as team:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = team.prepare(model, optimizer)
    train = loader if "own" in sys.argv else team.prepare(loader)
    for epoch in range(20):
        for i, (a, b) in enumerate(train):
            if i % every == 0:
                optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(a), b)
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if i % every == every - 1:
                optimizer.step()
        if team.report(loss=float(loss.detach())):
            break
"""


def ran(workers: int, samples: int, seconds: float, steps: int = 100) -> Result:
    kinds = {"input": 0.0, "compute": seconds, "communicate": 0.0, "wait": 0.0, "evaluate": 9.0, "other": 9.0}
    return Result("allreduce", workers, "t", Path(), steps=steps, samples=samples, seconds_by_kind=kinds)


def concluded(seconds: dict[int, list[float]], *, weak: bool = False, grows: bool = False, threads: int = 1) -> Scaling:
    """What would be said of runs that took these times."""
    found = {
        count: [ran(count, 6400 * (count if weak or grows else 1), one) for one in each]
        for count, each in seconds.items()
    }
    return _conclude("t", combined(parse("allreduce")), "single", weak, 100, threads, found)


def followed(sigma: float, kappa: float, *counts: int) -> dict[int, list[float]]:
    return {count: [jitter / float(gunther(count, sigma, kappa)) for jitter in (1, 1.01, 0.99)] for count in counts}


def test_runs_that_follow_a_law_give_it_back_and_say_what_is_extrapolated() -> None:
    found = concluded(followed(0.05, 0.01, 1, 2, 4, 8))
    assert found.gunther is not None
    assert found.gunther.sigma.value == pytest.approx(0.05, abs=0.01)
    assert found.gunther.kappa.value == pytest.approx(0.01, abs=0.002)
    assert found.points[2].rate == pytest.approx(6400 * float(gunther(4, 0.05, 0.01)), rel=0.02)
    assert [point.plain()["kind"] for point in found.points] == ["measured"] * 4
    assert [(one.workers, one.plain()["kind"]) for one in found.predicted] == [
        (16, "extrapolated"),
        (32, "extrapolated"),
    ]
    assert found.plain()["gunther"]["peak_is"] == "extrapolated"
    assert any("peak is extrapolated" in said for said in found.warnings)
    inside = concluded(followed(0.05, 0.05, 1, 2, 4, 8))
    assert inside.plain()["gunther"]["peak_is"] == "fitted"
    assert not any("peak is extrapolated" in said for said in inside.warnings)
    json.dumps(found.plain(), allow_nan=False)


def test_superlinear_points_too_few_cores_and_growing_batches_are_said() -> None:
    found = concluded({1: [1, 1.01], 2: [0.4, 0.41], 64: [0.01, 0.0101]})
    assert [point.superlinear for point in found.points] == [False, True, True]
    assert any("superlinear: on 2" in said for said in found.warnings)
    assert [point.crowded for point in found.points] == [False, False, True]
    assert any("64 workers" in said and "cores" in said for said in found.warnings)
    grown = concluded(followed(0.1, 0, 1, 2), grows=True)
    assert any("12" in said or "128 examples on 2" in said for said in grown.warnings)
    assert not any("not the same work" in said for said in concluded(followed(0.1, 0, 1, 2), weak=True).warnings)


def test_a_law_that_misses_what_was_measured_is_called_so() -> None:
    slower = concluded({1: [1, 1.01, 0.99], 2: [2, 2.01, 1.99]})
    assert any("does not fit" in said for said in slower.warnings)
    assert not any("does not fit" in said for said in concluded(followed(0.1, 0.0, 1, 2, 4)).warnings)


def test_one_run_of_each_is_not_trusted() -> None:
    found = concluded({1: [1], 2: [0.6]})
    assert found.points[1].plain()["speedup"] == {"value": pytest.approx(1 / 0.6), "low": 0.0, "high": None}
    assert any("--repeats" in said for said in found.warnings)


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"workers": (1,)}, UsageError, "Give several"),
        ({"workers": (0, 2)}, UsageError, "1 or more"),
        ({"strategy": "allreduc"}, StrategyError, "allreduce"),
        ({"strategy": "single"}, StrategyError, "one worker"),
        ({"repeats": 0}, UsageError, "repeats"),
        ({"steps": 0}, UsageError, "--steps 0"),
        ({"seconds": -1.0}, UsageError, "--seconds"),
        ({"target": "offbeat.tasks.mixture", "weak": True}, UsageError, "--weak"),
    ],
)
def test_what_cannot_be_scaled_is_refused(
    asked: dict[str, object], error: type[OffbeatError], said: str, launcher: Launcher
) -> None:
    given: dict[str, object] = {"target": "offbeat.tasks.digits", "workers": (1, 2)} | asked
    with pytest.raises(error, match=said):
        scale(**given, launcher=launcher)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"workers": 1}, "Give 2 or more"),
        ({"times": 0}, "--times 0"),
        ({"delta": 0.0}, "--delta 0"),
        ({"target": "offbeat.tasks.mixture"}, "not gradient descent"),
        ({"target": __file__, "check": True}, "Omit --per-example"),
    ],
)
def test_what_has_no_noise_to_measure_is_refused(asked: dict[str, object], said: str, launcher: Launcher) -> None:
    given: dict[str, object] = {"target": "offbeat.tasks.digits"} | asked
    with pytest.raises((UsageError, TaskError), match=said):
        batch_size(**given, launcher=launcher)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def checked(launcher: Launcher) -> BatchSize:
    small = ("--examples", "1000", "--features", "50")
    return batch_size("offbeat.tasks.logistic", arguments=small, steps=100, times=4, check=True, launcher=launcher)


@pytest.mark.slow
def test_noise_by_workers_is_near_that_of_single_examples(checked: BatchSize) -> None:
    assert (checked.batch, checked.usual, checked.examples) == (128, 32, 800)
    assert [(stage.first, stage.last) for stage in checked.stages] == [(1, 20), (21, 40), (41, 60), (61, 80), (81, 100)]
    first = checked.stages[0]
    assert first.checked is not None
    assert first.noise.value == pytest.approx(first.checked, rel=0.5)
    held = [
        stage.checked is not None and stage.noise.low <= stage.checked <= stage.noise.high for stage in checked.stages
    ]
    assert sum(held) >= 3
    assert checked.largest(first).value == pytest.approx(1 + 0.25 * (1 + first.noise.value))
    diversity = checked.diversity(first)
    assert diversity is not None
    assert diversity.value == pytest.approx((1 + first.noise.value) / 800)


@pytest.mark.slow
def test_ways_to_raise_diversity_are_compared_with_the_plain_one(checked: BatchSize) -> None:
    names = [way.name for way in checked.ways]
    assert names == ["as it is", "dropout 0.2", "dropout 0.5", "largest 10 %", "random 10 %"]
    assert checked.ways[0].cosine == 1
    last = checked.stages[-1].checked
    assert last is not None
    assert 1 + last / 4 < checked.ways[0].diversity < 1 + 4 * last
    assert all(abs(way.cosine) < 1 for way in checked.ways[1:])


@pytest.mark.slow
def test_an_own_loop_is_measured_though_it_clips_and_what_cannot_be_is_refused(
    tmp_path: Path, launcher: Launcher
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    found = batch_size(str(script), steps=60, launcher=launcher)
    assert (found.steps, found.batch, found.examples) == (60, 32, 256)
    assert found.stages[0].noise.value < 200  # Clipped to next to nothing, gradients would seem to be all noise.
    for word, said in (("several", "several batches"), ("twice", "backward several times"), ("own", "not come from a")):
        with pytest.raises(UsageError, match=said):
            batch_size(str(script), steps=60, arguments=[word], launcher=launcher)


@pytest.mark.slow
def test_the_command_measures_weak_scaling_of_a_script(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offbeat.scaling._runs.Launcher", lambda _preload: nullcontext(launcher))
    (tmp_path / "loop.py").write_text(LOOP)
    asked = ("-w", "2", "--weak", "--steps", "20", "--repeats", "1", "--format", "json")
    done = in_process(launcher, tmp_path, monkeypatch, capsys)("scale", "loop.py", *asked)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [point["workers"] for point in found["points"]] == [1, 2]
    assert [len(point["rates"]) for point in found["points"]] == [1, 1]
    assert not any("same work" in said for said in found["warnings"])
    assert found["amdahl"]["f"]["low"] <= found["amdahl"]["f"]["value"] <= 1
    assert "run 2 of 2" in done.err
    assert not (tmp_path / "runs").exists()


def test_the_tables_say_what_was_measured_and_what_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_scaling(concluded(followed(0.05, 0.01, 1, 2, 4)))
    said = capsys.readouterr().out
    assert said.count("measured") >= 3
    assert said.count("extrapolated") >= 2
    assert "sigma = 0.05" in said
    stages = (
        RunStage(1, 50, Estimate(30.0, 20.0, 50.0), 31.0),
        RunStage(51, 100, Estimate(300.0, 90.0, math.inf), None),
    )
    found = BatchSize("t", 2, 100, 64, 64, 1197, 0.25, stages)
    print_batch_size(found)
    said = capsys.readouterr().out
    assert "30 [20, 50]" in said
    assert "76 [24, 1,197]" in said  # No batch is larger than all data.
    assert "2 [1, 37] workers with 32 examples each" in said
    json.dumps(found.plain(), allow_nan=False)


def test_the_package_has_both_as_functions() -> None:
    assert offbeat.scale is scale
    assert offbeat.batch_size is batch_size
