"""`offbeat.fit` on real workers: tasks learn, every example counts once, the number of workers does not show."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paths
import pytest
import torch
from fit_tasks import Watched
from safetensors.torch import load_file

from offbeat.errors import StrategyError, UsageError
from offbeat.run.drive import Result, fit
from offbeat.runtime.launch import Launcher
from offbeat.tasks.lasso import Lasso
from offbeat.tasks.mixture import Mixture
from offbeat.tasks.mnist import Mnist

MNIST = paths.MNIST
Fit = Callable[..., Result]


@pytest.fixture
def learn(launcher: Launcher, tmp_path: Path) -> Fit:
    """`fit` with the session's launcher, its runs in the test's folder."""

    def run(task: Any, *args: Any, **options: Any) -> Result:
        return fit(task, *args, launcher=launcher, out=tmp_path / "runs", **options)

    return run


def seen(folder: Path, workers: int) -> tuple[Counter[int], list[float]]:
    """How often each example was seen over all workers, and worker 0's learning rates in their order."""
    rows = [
        [line.split() for line in (folder / f"seen-{rank}").read_text().splitlines()]
        for rank in range(workers)
        if (folder / f"seen-{rank}").exists()
    ]
    return Counter(int(row[0]) for part in rows for row in part), [float(row[1]) for row in rows[0]]


def parameters(result: Result) -> torch.Tensor:
    return torch.cat([value.flatten() for _, value in sorted(load_file(result.run / "model.safetensors").items())])


# --- bundled tasks


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "ddp"])
def test_two_workers_learn_the_digits(learn: Fit, strategy: str) -> None:
    result = learn("offbeat.tasks.digits", strategy, workers=2)
    assert result.reached_target is True
    assert result.score is not None
    assert result.score >= 0.97
    assert result.test_score is not None
    assert result.test_score > 0.93
    assert result.seconds_to_target is not None
    assert 0 < result.seconds_to_target <= result.seconds


@pytest.mark.parametrize("task", [Mixture(examples=600), Lasso(examples=600)], ids=["mixture", "lasso"])
def test_iterations_do_not_depend_on_the_workers(learn: Fit, task: Mixture | Lasso) -> None:
    options: dict[str, Any] = {"steps": 6, "target": 1e9}
    alone = learn(task, "single", **options)
    assert alone.steps == 6
    for workers in (2, 3):
        many = learn(task, "allreduce", workers=workers, **options)
        assert many.score == pytest.approx(alone.score, abs=1e-9)
        assert many.test_score == pytest.approx(alone.test_score, abs=1e-9)
        assert torch.allclose(parameters(many).double(), parameters(alone).double(), atol=1e-9)
    cut = learn(task, "allreduce", workers=2, steps=3, target=1e9)
    resumed = learn(task, resume=cut.run, steps=6)
    assert (resumed.steps, resumed.workers) == (6, 2)
    assert resumed.score == pytest.approx(alone.score, abs=1e-9)


def test_iterations_reach_their_target(learn: Fit) -> None:
    assert learn("offbeat.tasks.mixture", workers=2).reached_target is True
    assert learn("offbeat.tasks.lasso", workers=2).reached_target is True


def test_the_last_step_of_an_iteration_is_judged(learn: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    result = learn("offbeat.tasks.lasso", steps=5, target=1e9)
    whole = [json.loads(line)["step"] for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert whole == [1, 2, 3, 4, 5]
    with pytest.raises(StrategyError, match=r"accumulate\(2\) cannot be used with Lasso"):
        learn("offbeat.tasks.lasso", "allreduce + accumulate(2)", workers=2)


def test_a_logistic_regression_is_learned(learn: Fit) -> None:
    result = learn("offbeat.tasks.logistic", workers=2, epochs=3)
    lines = [json.loads(line)["score"] for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == result.epochs
    assert lines[-1] > lines[0]


@pytest.mark.slow
def test_a_transformer_takes_its_steps(learn: Fit) -> None:
    result = learn("offbeat.tasks.text", workers=2, steps=3)
    assert (result.steps, result.samples) == (3, 96)
    assert result.score is not None
    assert -6 < result.score < -2


@pytest.mark.slow
@pytest.mark.skipif(not MNIST.is_dir(), reason=f"the MNIST files are not at {MNIST}")
def test_mnist_takes_its_steps(launcher: Launcher, tmp_path: Path) -> None:
    result = fit(Mnist(str(MNIST)), workers=2, steps=40, launcher=launcher, out=tmp_path)
    assert result.steps == 40
    assert result.score is not None
    assert result.score > 0.3


# --- every example once


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"stream": True}, {"batch": 5, "examples": 23}], ids=str)
def test_every_example_is_seen_once_an_epoch(learn: Fit, tmp_path: Path, workers: int, options: dict[str, Any]) -> None:
    task = Watched(str(tmp_path), **options)
    result = learn(task, workers=workers, epochs=2)
    counts, _ = seen(tmp_path, workers)
    assert set(counts) == set(range(task.examples))
    assert result.samples == 2 * task.examples
    if task.examples % task.batch == 0:
        assert set(counts.values()) == {2}


@pytest.mark.parametrize("workers", [2, 3])
def test_parts_by_label_see_every_example(learn: Fit, tmp_path: Path, workers: int) -> None:
    result = learn(Watched(str(tmp_path)), workers=workers, epochs=1, parts="dirichlet(0.3)")
    counts, _ = seen(tmp_path, workers)
    assert set(counts) == set(range(24))
    assert result.samples == 24


def test_a_batch_that_cannot_be_divided_evenly_counts_rightly(learn: Fit, tmp_path: Path) -> None:
    task = Watched(str(tmp_path), examples=23, batch=5)
    alone = parameters(learn(task, epochs=3))
    for workers in (2, 3):
        assert torch.allclose(parameters(learn(task, workers=workers, epochs=3)), alone, atol=1e-6)


# --- scores and schedules


def test_scoring_by_parts_equals_scoring_the_whole(learn: Fit, tmp_path: Path) -> None:
    whole, parted = (
        learn(Watched(str(tmp_path), by_parts=by_parts, examples=23), workers=3, epochs=2) for by_parts in (False, True)
    )
    assert parted.score == pytest.approx(whole.score, abs=1e-6)
    assert parted.test_score == pytest.approx(whole.test_score, abs=1e-6)


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 8]), (4, [4, 8]), (100, [8]), (0, [4, 8])])
def test_evaluations_come_as_often_as_asked_and_at_the_end(
    learn: Fit, tmp_path: Path, every: int, steps: list[int]
) -> None:
    result = learn(Watched(str(tmp_path), every=every), workers=2, epochs=2)
    lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    assert lines[-1]["score"] == result.score


@pytest.mark.parametrize(("strategy", "every"), [("allreduce", 1), ("allreduce + accumulate(2)", 2)])
def test_a_schedule_is_advanced_once_an_update(learn: Fit, tmp_path: Path, strategy: str, every: int) -> None:
    result = learn(Watched(str(tmp_path), decay=0.5), strategy, workers=2, epochs=2)
    assert result.steps == 8 // every
    _, rates = seen(tmp_path, 1)
    per_batch = rates[:: len(rates) // 8]
    assert per_batch == pytest.approx([0.1 * 0.5 ** (batch // every) for batch in range(8)])


def test_a_target_ends_the_run_at_once(learn: Fit, tmp_path: Path) -> None:
    result = learn(Watched(str(tmp_path), every=1), workers=2, target=-100.0)
    assert (result.steps, result.reached_target, result.target) == (1, True, "score=-100")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("budget", [{"epochs": 2}, {"steps": 8}, {"steps": 6}], ids=str)
def test_a_resumed_run_that_has_nothing_left_to_do_says_the_same(
    learn: Fit, tmp_path: Path, budget: dict[str, int]
) -> None:
    task = Watched(str(tmp_path))
    first = learn(task, workers=2, **budget)
    again = learn(task, resume=first.run, **budget)
    assert (again.steps, again.score, again.samples) == (first.steps, first.score, first.samples)
    assert torch.equal(parameters(again), parameters(first))


# --- several at once


def test_one_launcher_runs_one_thing_at_a_time(launcher: Launcher, tmp_path: Path) -> None:
    def busy() -> None:
        with pytest.raises(UsageError, match="already running"):
            fit(Watched(str(tmp_path)), out=tmp_path / "second", launcher=launcher)

    class Intruder:
        def begin(self, *_: object) -> None: ...

        def tick(self) -> None: ...

        def message(self, _role: object, message: dict[str, Any]) -> None:
            if message["kind"] == "ready":
                busy()

    result = fit(Watched(str(tmp_path)), out=tmp_path / "first", epochs=1, launcher=launcher, watcher=Intruder())
    assert result.steps == 4


@pytest.mark.slow
def test_two_runs_in_two_threads_do_not_disturb_each_other(launcher: Launcher, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()

    def run(folder: Path, using: Launcher | None) -> Result:
        return fit(Watched(str(folder)), workers=2, epochs=3, out=folder / "runs", launcher=using)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, folders, [launcher, None])
    assert torch.equal(parameters(first), parameters(second))
    assert [sum(seen(folder, 2)[0].values()) for folder in folders] == [72, 72]
