"""Replicas whose operators several workers share end like one process: own loops, tasks, other layouts, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from own_scripts.running import left, run_script, same
from safetensors.torch import load_file

from offbeat.errors import StrategyError
from offbeat.run.drive import drive
from offbeat.run.job import Job, resolve, target_of
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE, RUN_FILE
from offbeat.runtime.run.settings import Goal
from offbeat.strategies import TensorParallel, combined, parse


def trained(launcher: Launcher, folder: Path, strategy: str, workers: int, *words: str, **goal: Any) -> list[Any]:
    """What each worker has left: losses of steps times examples, the model in the end, the score."""
    folder.mkdir(exist_ok=True)
    run_script(launcher, folder, "splitting.py", folder / "out", *words, workers=workers, strategy=strategy, **goal)
    return left(folder / "out", workers)


@pytest.mark.parametrize(
    ("model", "strategy", "workers"), [("mlp", "allreduce + tensor(2)", 4), ("words", "tensor(2)", 2)]
)
def test_a_loop_with_clipping_ends_like_one_process(
    launcher: Launcher, tmp_path: Path, model: str, strategy: str, workers: int
) -> None:
    words = ["--model", model, "--optimizer", "AdamW", "--clip"]
    expected = trained(launcher, tmp_path / "alone", "single", 1, *words)[0]
    for result in trained(launcher, tmp_path / "split", strategy, workers, *words):
        same(expected["model"], result["model"], 1e-10)
        assert result["score"] == pytest.approx(expected["score"], abs=1e-10)
        if workers == 2:
            assert result["losses"] == pytest.approx(expected["losses"], abs=1e-10)


def test_random_models_and_data_are_those_of_one_process(launcher: Launcher, tmp_path: Path) -> None:
    words = ["--model", "noisy", "--optimizer", "AdamW"]
    [expected] = trained(launcher, tmp_path / "alone", "single", 1, *words)
    for result in trained(launcher, tmp_path / "split", "tensor(2)", 2, *words):
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-10)
        same(expected["model"], result["model"], 1e-10)


def test_a_run_moves_from_ways_to_one_process_to_stages_and_back(launcher: Launcher, tmp_path: Path) -> None:
    words = ["--model", "words", "--optimizer", "AdamW"]
    expected = trained(launcher, tmp_path / "alone", "single", 1, *words)[0]
    losses: list[float] = []
    run: Path | None = None
    result: dict[str, Any] = {}
    layouts = (("tensor(2)", 2, 5), ("single", 1, 10), ("pipeline(2)", 2, 15), ("tensor(2)", 2, 20))
    for strategy, workers, steps in layouts:
        folder = tmp_path / "moving"
        result = trained(launcher, folder, strategy, workers, *words, steps=steps, resume=run)[0]
        losses += result["losses"]
        run = run or next((folder / "runs").glob("2*"))
    assert losses == pytest.approx(expected["losses"], abs=1e-10)
    same(expected["model"], result["model"], 1e-10)


def test_a_task_says_how_it_is_split_and_learns_as_it_does_alone(launcher: Launcher, tmp_path: Path) -> None:
    what = target_of("offbeat.tasks.text")
    results = [
        drive(Job(what, Goal(strategy=strategy, steps=5), workers, 1, tmp_path / strategy), launcher=launcher)
        for strategy, workers in (("single", 1), ("tensor(2)", 2))
    ]
    assert results[1].score == pytest.approx(results[0].score, rel=1e-3)
    folders = [next((tmp_path / strategy).glob("2*")) for strategy in ("single", "tensor(2)")]
    same(*(load_file(folder / MODEL_FILE) for folder in folders), 1e-3)
    tensor = json.loads((folders[1] / RUN_FILE).read_text())["result"]["tensor"]
    assert tensor["split"]["1.look"] == "column"
    assert tensor["split"]["2.think.3"] == "row"
    assert tensor["share"] < 0.6


@pytest.mark.parametrize(
    ("strategy", "workers", "message"),
    [
        ("tensor(3)", 3, r"its 4 heads cannot be divided by 3 \(2, 4 would\)"),
        ("tensor(2)", 3, "3 are not a multiple of 2. Ask for 2 or 4 workers"),
        ("tensor(1)", 1, "a replica on one worker is not split"),
        ("downpour + tensor(2)", 2, "parameters of their own beside the servers"),
        ("server(consistency=drop_slowest(1)) + tensor(2)", 4, "be late in another"),
        ("server(shards=200) + tensor(2)", 4, "so there would be 400 processes"),
        ("coded + tensor(2)", 4, "those of a split replica compute it together"),
        ("allreduce(shard=optimizer) + tensor(2)", 2, "Omit shard"),
        ("local(4) + topk + tensor(2)", 2, "would become different ones at each mean of local"),
        ("gossip(asynchronous=True) + tensor(2)", 2, "parts of different models"),
        ("hogwild + tensor(2)", 2, "those of a split replica have different ones"),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_starts(strategy: str, workers: int, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        resolve(Job(target_of("offbeat.tasks.text"), Goal(strategy=strategy), workers))


def test_ways_are_text_and_values_alike() -> None:
    strategy = combined(parse("allreduce + tensor(2)"))
    assert strategy.split == (TensorParallel(2),)
    assert str(strategy) == "allreduce + tensor(2)"
    assert (strategy.replica_size, strategy.replicas(8)) == (2, 4)
    assert strategy.traits.exact
