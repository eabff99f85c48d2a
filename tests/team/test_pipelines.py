"""A model in stages ends like the whole model in one process, under every schedule."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from own_scripts.running import left, run_script, same
from safetensors.torch import load_file

from offbeat.errors import StrategyError, UsageError, WorkerError
from offbeat.run.drive import drive
from offbeat.run.job import Job, resolve, target_of
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE, RUN_FILE
from offbeat.runtime.run.settings import Goal

pytestmark = pytest.mark.slow
SCRIPT = "splitting.py"


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


SCHEDULES = [
    *("pipeline(2)", "pipeline(2, naive)", "pipeline(2, gpipe, microbatches=3)"),
    *("pipeline(2, interleaved, microbatches=4, chunks=2)", "pipeline(2, zero_bubble, microbatches=3)"),
]
CASES = [
    *product(("mlp", "skips", "words"), ("SGD", "AdamW"), SCHEDULES, (2,)),
    ("mlp", "AdamW", "allreduce + accumulate(2) + pipeline(2)", 2),
    ("mlp", "SGD", "allreduce + pipeline(2, naive)", 4),
    ("words", "AdamW", "pipeline(4)", 4),
    ("words", "SGD", "pipeline(4, zero_bubble)", 4),
]
"""All but a few run in `make chaos` only; see tests/wide.py."""


@pytest.mark.parametrize(("model", "optimizer", "strategy", "workers"), CASES)
def test_stages_end_like_one_process(
    launcher: Launcher, tmp_path: Path, shared: Path, model: str, optimizer: str, strategy: str, workers: int
) -> None:
    words = ["--model", model, "--optimizer", optimizer]
    if "accumulate" in strategy:
        expected = trained(launcher, tmp_path / "alone", "single + accumulate(2)", 1, *words)[0]
    else:
        expected = alone(launcher, shared, *words)
    for result in trained(launcher, tmp_path / "split", strategy, workers, *words):
        if workers == int(strategy.split("pipeline(")[1][0]):
            assert_same(expected, result)
        else:  # Each replica has the loss of its own part of a batch.
            assert_same(expected | {"losses": []}, result | {"losses": []})


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


def test_a_killed_stage_is_named_and_the_run_can_be_resumed(launcher: Launcher, tmp_path: Path, shared: Path) -> None:
    goal = {"disturb": ("worker 1: kill at step 9",), "checkpoint_every": 4}
    with pytest.raises(WorkerError, match="worker 1"):
        trained(launcher, tmp_path / "killed", "pipeline(2)", 2, **goal)
    run = next((tmp_path / "killed" / "runs").glob("2*"))
    results = trained(launcher, tmp_path / "killed", "pipeline(2)", 2, resume=run)
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
    for stage in split["stages"]:
        assert stage["compute_seconds"] > 0
        assert stage["bytes"]["parameters"] < 0.6 * whole
    kinds = results[1].seconds_by_kind or {}
    assert kinds["bubble"] > 0
    assert sum(kinds.values()) == pytest.approx(results[1].seconds, rel=0.01)


@pytest.mark.parametrize(
    ("words", "strategy", "message"),
    [
        (["--called"], "pipeline(2)", r"the model was called, but under .*team\.pipeline\(model, criterion\)"),
        (["--summed"], "pipeline(2)", "the criterion is not a mean over the examples"),
        ([], "pipeline(2, microbatches=17)", "16 examples cannot be cut into microbatches=17"),
    ],
)
def test_what_cannot_be_trained_in_stages_is_refused(
    launcher: Launcher, tmp_path: Path, words: list[str], strategy: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        trained(launcher, tmp_path, strategy, 2, *words)


def test_a_task_with_a_loss_of_its_own_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from offbeat.tasks.digits import Digits\n\nclass Own(Digits):\n"
        "    def loss(self, model, batch):\n        return model(batch[0]).mean()\n"
    )
    job = Job(target_of(f"{tmp_path / 'own.py'}:Own"), Goal(strategy="pipeline(2)"), 2)
    with pytest.raises(StrategyError, match="overrides loss"):
        resolve(job)
