"""A model in stages ends like the whole model in one process, under every schedule."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from own_scripts.running import left, run_script, same

from offbeat.runtime.launch import Launcher

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


CASES = [
    ("words", "AdamW", "pipeline(2)", 2),
    ("skips", "SGD", "pipeline(2, gpipe, microbatches=3)", 2),
    ("words", "SGD", "pipeline(2, interleaved, microbatches=4, chunks=2)", 2),
    ("words", "SGD", "pipeline(2, zero_bubble, microbatches=3)", 2),
    ("mlp", "SGD", "allreduce + pipeline(2, naive)", 4),
    ("mlp", "AdamW", "allreduce + accumulate(2) + pipeline(2)", 2),
    ("words", "AdamW", "pipeline(4)", 4),
]


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
