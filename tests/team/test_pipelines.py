"""A model in stages: clipping, accumulation, layouts, faults, tasks, refusals. Equality: test_split_equality.py."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from own_scripts.running import left, run_script, same
from safetensors.torch import load_file

from offbeat.errors import StrategyError, UsageError, WaitError, WorkerError
from offbeat.run.drive import drive
from offbeat.run.job import Job, resolve, target_of
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE, RUN_FILE
from offbeat.runtime.run.settings import Goal

pytestmark = pytest.mark.slow
SCRIPT = "splitting.py"
HELD = ("parameters", "gradients", "optimizer")


def trained(launcher: Launcher, folder: Path, strategy: str, workers: int, *words: str, **goal: Any) -> list[Any]:
    """What each worker has left: losses of steps times examples, the model in the end, the score."""
    out = folder / "out"
    folder.mkdir(exist_ok=True)
    run_script(launcher, folder, SCRIPT, out, *words, workers=workers, strategy=strategy, **goal)
    return left(out, workers)


@cache
def alone(launcher: Launcher, folder: Path, *words: str) -> dict[str, Any]:
    """The same training in one process."""
    return trained(launcher, folder / "-".join(["alone", *words]), "single", 1, *words)[0]


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-10) -> None:
    """Two runs with the same losses and the same model."""
    assert other["losses"] == pytest.approx(one["losses"], abs=tolerance, rel=tolerance)
    assert other["score"] == pytest.approx(one["score"], abs=tolerance)
    same(one["model"], other["model"], tolerance)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize(("strategy", "workers"), [("pipeline(2)", 2), ("pipeline(2) + tensor(2)", 4)])
def test_all_workers_of_a_replica_read_the_same_random_data(
    launcher: Launcher, tmp_path: Path, shared: Path, strategy: str, workers: int
) -> None:
    words = ["--model", "flipped"]
    for result in trained(launcher, tmp_path, strategy, workers, *words):
        assert_same(alone(launcher, shared, *words) | {"score": result["score"]}, result)


def test_an_update_may_have_several_batches(launcher: Launcher, tmp_path: Path) -> None:
    words = ["--model", "mlp", "--optimizer", "AdamW"]
    [expected] = trained(launcher, tmp_path / "alone", "single + accumulate(2)", 1, *words)
    for result in trained(launcher, tmp_path / "split", "allreduce + accumulate(2) + pipeline(2)", 2, *words):
        assert_same(expected, result)


def test_a_stage_has_memory_for_little_more_than_half_of_a_transformers_training(
    launcher: Launcher, tmp_path: Path, shared: Path
) -> None:
    words = ["--model", "halves", "--optimizer", "AdamW", "--steps", "6"]
    whole = alone(launcher, shared, *words)
    stages = trained(launcher, tmp_path, "pipeline(2)", 2, *words)
    for stage in stages:
        assert_same(whole, stage)
        assert stage["held"] <= 0.6 * whole["held"]
    assert sum(stage["held"] for stage in stages) > whole["held"], "the embedding is in both"


@pytest.mark.parametrize(("strategy", "counted"), [("pipeline(2)", 136), ("pipeline(2, gpipe, microbatches=5)", 94)])
def test_batch_norm_has_two_examples_in_each_microbatch_of_the_smaller_last_batch(
    launcher: Launcher, tmp_path: Path, strategy: str, counted: int
) -> None:
    results = trained(launcher, tmp_path, strategy, 2, "--model", "normed")
    for result in results:  # 16, 16 and 8 examples, six times, and 16 twice.
        assert {int(result["model"][f"{layer}.num_batches_tracked"]) for layer in (1, 4, 7)} == {counted}
        same(results[0]["model"], result["model"], 0)
        assert sum(result["losses"][-3:]) < sum(result["losses"][:3])


def test_a_run_moves_from_stages_to_one_process_and_back(launcher: Launcher, tmp_path: Path, shared: Path) -> None:
    words = ["--model", "words", "--optimizer", "AdamW"]
    expected = alone(launcher, shared, *words)
    losses: list[float] = []
    run: Path | None = None
    result: dict[str, Any] = {}
    for strategy, workers, steps in (("pipeline(2)", 2, 7), ("single", 1, 13), ("pipeline(2)", 2, 20)):
        result = trained(launcher, tmp_path, strategy, workers, *words, steps=steps, resume=run)[0]
        losses += result["losses"]
        run = run or next((tmp_path / "runs").glob("2*"))
    assert_same(expected, result | {"losses": losses})


def test_clipping_by_the_global_norm_sees_all_stages(launcher: Launcher, tmp_path: Path, shared: Path) -> None:
    words = ["--model", "words", "--optimizer", "SGD", "--clip"]
    for result in trained(launcher, tmp_path, "pipeline(2)", 2, *words):
        assert_same(alone(launcher, shared, *words), result)


@pytest.mark.parametrize("split", ["pipeline(2)", "pipeline(2) + tensor(2)"])
def test_clipping_sees_all_stages_where_one_has_the_parameters_of_all(
    launcher: Launcher, tmp_path: Path, split: str
) -> None:
    words = ["--model", "tied", "--optimizer", "SGD", "--clip"]
    [expected] = trained(launcher, tmp_path / "alone", "single", 1, *words)
    for result in trained(launcher, tmp_path / "split", split, 2 * split.count("2"), *words):
        assert_same(expected, result)


def test_a_killed_stage_is_named_and_the_run_can_be_resumed(launcher: Launcher, tmp_path: Path, shared: Path) -> None:
    goal = {"disturb": ("worker 1: kill at step 9",), "checkpoint_every": 4}
    with pytest.raises(WorkerError, match=r"(?s)worker 1 .*It had stage 1 of replica 0"):
        trained(launcher, tmp_path / "killed", "pipeline(2)", 2, **goal)
    run = next((tmp_path / "killed" / "runs").glob("2*"))
    results = trained(launcher, tmp_path / "killed", "pipeline(2)", 2, resume=run)
    expected = alone(launcher, shared, "--model", "mlp", "--optimizer", "SGD")
    for result in results:
        assert_same(expected | {"losses": expected["losses"][8:]}, result)


def test_a_stage_that_stops_is_named_within_the_deadline_and_the_run_can_be_resumed(
    launcher: Launcher, tmp_path: Path, shared: Path
) -> None:
    goal = {"disturb": ("worker 1: stop 60s at step 9",), "checkpoint_every": 4, "timeout": 3.0}
    begun = time.monotonic()
    with pytest.raises(WaitError, match=r"worker 1 was stopped .* for longer than 3 s .*It had stage 1 of replica 0"):
        trained(launcher, tmp_path / "stopped", "pipeline(2)", 2, **goal)
    assert time.monotonic() - begun < 45, "the run ends long before the stage would have gone on"
    run = next((tmp_path / "stopped" / "runs").glob("2*"))
    results = trained(launcher, tmp_path / "stopped", "pipeline(2)", 2, resume=run)
    expected = alone(launcher, shared, "--model", "mlp", "--optimizer", "SGD")
    for result in results:
        assert_same(expected | {"losses": expected["losses"][8:]}, result)


def test_a_task_learns_in_stages_as_it_does_alone(launcher: Launcher, tmp_path: Path) -> None:
    what = target_of("offbeat.tasks.text")
    results = [
        drive(Job(what, Goal(strategy=strategy, steps=6), workers, 1, tmp_path / strategy), launcher=launcher)
        for strategy, workers in (("single", 1), ("pipeline(2)", 2))
    ]
    scores = [result.score for result in results]
    assert scores[1] == pytest.approx(scores[0], rel=1e-3)
    folders = [next((tmp_path / strategy).glob("2*")) for strategy in ("single", "pipeline(2)")]
    models = [load_file(folder / MODEL_FILE) for folder in folders]
    same(models[0], models[1], 1e-3)
    split = json.loads((folders[1] / RUN_FILE).read_text())["result"]["split"]
    assert len(split["stages"]) == 2
    assert 0.2 < split["evenness"] <= 1
    whole = sum(tensor.nbytes for tensor in models[0].values())
    assert sum(stage["bytes"]["parameters"] for stage in split["stages"]) == whole
    everything = sum(stage["bytes"][kind] for stage in split["stages"] for kind in HELD)
    assert everything > 3.9 * whole, "gradients and both moments of Adam count, too"
    for stage in split["stages"]:
        assert sum(stage["bytes"][kind] for kind in HELD) <= 0.6 * everything
        assert stage["compute_seconds"] > 0
        assert stage["bytes"]["parameters"] < 0.6 * whole
        assert stage["bytes"]["activations"] > 0
        assert all(0 < part["forward_seconds"] < part["backward_seconds"] * 9 for part in stage["parts"])
    predicted = results[1].predicted
    # Close on a quiet machine, as benchmarks/predicted_pipelines.py shows.
    assert 0 < predicted["predicted_seconds"] < 20 * predicted["step_seconds"]
    assert max(predicted["idle"]) > 0
    kinds = results[1].seconds_by_kind or {}
    assert kinds["bubble"] > 0
    assert sum(kinds.values()) == pytest.approx(results[1].seconds, rel=0.01)


@pytest.mark.parametrize(
    ("words", "strategy", "message"),
    [
        (["--optimizer", "LBFGS"], "pipeline(2)", "LBFGS steps with a closure"),
        (["--called"], "pipeline(2)", r"the model was called, but under .*team\.pipeline\(model, criterion\)"),
        (["--summed"], "pipeline(2)", "the criterion is not a mean over the examples"),
        (["--batches", "divided"], "pipeline(2)", "workers 0 and 1 have different batches, but under .*pipeline"),
        (["--batches", "divided"], "tensor(2)", "workers 0 and 1 have different batches, but under .*tensor"),
        ([], "pipeline(2, microbatches=17)", "16 examples cannot be cut into microbatches=17"),
    ],
)
def test_what_cannot_be_trained_in_stages_is_refused(
    launcher: Launcher, tmp_path: Path, words: list[str], strategy: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        trained(launcher, tmp_path, strategy, 2, *words)


def test_replicas_with_the_same_batches_are_noticed_and_workers_of_one_replica_are_not(
    launcher: Launcher, tmp_path: Path
) -> None:
    noticed = list[list[str]]()
    for strategy, workers in (("pipeline(2)", 2), ("allreduce + pipeline(2)", 4)):
        folder = tmp_path / str(workers)
        trained(launcher, folder, strategy, workers, "--model", "tied", "--batches", "own", steps=10)
        [file] = (folder / "runs").glob(f"2*/{RUN_FILE}")
        noticed.append(json.loads(file.read_text(encoding="utf-8"))["result"]["warnings"])
    alone, [warning] = noticed
    assert alone == [], "two stages have the gradient of their common weight"
    assert "all 2 replicas had the same gradients" in warning


def test_a_stage_that_raises_is_named_with_its_own_traceback(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"worker 1 failed with ZeroDivisionError: .*stage 1 of replica 0") as failure:
        trained(launcher, tmp_path, "pipeline(2)", 2, "--model", "failing")
    assert (failure.value.role, failure.value.rank) == ("worker", 1)
    assert "split_nets.py" in failure.value.remote_traceback


def test_batches_and_layers_that_are_too_few_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from offbeat.tasks.digits import Digits\n\nclass Own(Digits):\n"
        "    global_batch = 30\n"
        "    def stages(self, model):\n        return [model]\n"
    )
    task = target_of(f"{tmp_path / 'own.py'}:Own")
    for strategy, workers, message in (
        ("allreduce + pipeline(2, microbatches=16)", 4, "each of 2 replicas gets 15 of global_batch=30 examples"),
        ("pipeline(2)", 2, r"its stages\(model\) names 1 modules, too few for 2 parts"),
    ):
        with pytest.raises(StrategyError, match=message):
            resolve(Job(task, Goal(strategy=strategy), workers))


def test_a_task_with_a_loss_of_its_own_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from offbeat.tasks.digits import Digits\n\nclass Own(Digits):\n"
        "    def loss(self, model, batch):\n        return model(batch[0]).mean()\n"
    )
    job = Job(target_of(f"{tmp_path / 'own.py'}:Own"), Goal(strategy="pipeline(2)"), 2)
    with pytest.raises(StrategyError, match="overrides loss"):
        resolve(job)


def test_a_step_sends_the_bytes_of_the_rounds_that_are_predicted(launcher: Launcher, tmp_path: Path) -> None:
    sent: list[int] = []
    planned = 0
    for steps in (1, 2):  # The first step also shares the model and the shapes of what crosses.
        trained(launcher, tmp_path / str(steps), "pipeline(2)", 2, "--model", "words", steps=steps)
        [file] = (tmp_path / str(steps) / "runs").glob(f"2*/{RUN_FILE}")
        result = json.loads(file.read_text(encoding="utf-8"))["result"]
        sent.append(result["bytes_sent"])
        planned = (result["predicted"] or {"message_bytes": 0})["message_bytes"]
    assert sent[1] - sent[0] == planned > 0
