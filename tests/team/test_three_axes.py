"""Replicas in stages whose operators several workers share end like one process: pipeline and tensor together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_scripts.running import left, run_script, same

from offbeat.runtime.launch import Launcher

pytestmark = pytest.mark.slow


def trained(launcher: Launcher, folder: Path, strategy: str, workers: int, *words: str, **goal: Any) -> list[Any]:
    """What each worker has left: losses of steps times examples, the model in the end, the score."""
    folder.mkdir(exist_ok=True)
    run_script(launcher, folder, "splitting.py", folder / "out", *words, workers=workers, strategy=strategy, **goal)
    return left(folder / "out", workers)


@pytest.mark.parametrize(
    ("model", "optimizer", "strategy", "workers"),
    [
        ("gpt2", "AdamW", "pipeline(2, zero_bubble) + tensor(2)", 4),
        ("words", "SGD", "pipeline(2, interleaved, microbatches=4, chunks=2) + tensor(2)", 4),
        ("words", "AdamW", "allreduce + accumulate(2) + pipeline(2) + tensor(2)", 8),
    ],
)
def test_a_loop_with_clipping_ends_like_one_process(
    launcher: Launcher, tmp_path: Path, model: str, optimizer: str, strategy: str, workers: int
) -> None:
    words = ["--model", model, "--optimizer", optimizer, "--clip"]
    alone = "single + accumulate(2)" if "accumulate" in strategy else "single"
    expected = trained(launcher, tmp_path / "alone", alone, 1, *words)[0]
    for result in trained(launcher, tmp_path / "split", strategy, workers, *words):
        same(expected["model"], result["model"], 1e-10)
        assert result["score"] == pytest.approx(expected["score"], abs=1e-10)
        if workers == 4:  # Otherwise each replica has the loss of its own part of a batch.
            assert result["losses"] == pytest.approx(expected["losses"], abs=1e-10)


def test_a_run_moves_between_all_layouts_with_the_same_losses(launcher: Launcher, tmp_path: Path) -> None:
    words = ["--model", "words", "--optimizer", "AdamW"]
    expected = trained(launcher, tmp_path / "alone", "single", 1, *words)[0]
    losses: list[float] = []
    run: Path | None = None
    layouts = (
        *(("pipeline(2) + tensor(2)", 4, 4), ("single", 1, 8), ("tensor(2)", 2, 12)),
        *(("allreduce + pipeline(2)", 4, 16), ("pipeline(2) + tensor(2)", 4, 20)),
    )
    result: list[dict[str, Any]] = []
    for strategy, workers, steps in layouts:
        result = trained(launcher, tmp_path / "moving", strategy, workers, *words, steps=steps, resume=run)
        replicas = 2 if strategy.startswith("allreduce") else 1
        # Losses times examples: those of the replicas add up to that of the batch.
        parts = [result[replica * workers // replicas]["losses"] for replica in range(replicas)]
        losses += [sum(terms) for terms in zip(*parts, strict=True)]
        run = run or next((tmp_path / "moving" / "runs").glob("2*"))
    assert losses == pytest.approx(expected["losses"], abs=1e-10)
    for worker in result:
        same(expected["model"], worker["model"], 1e-10)
