"""Twenty steps of four models with SGD and AdamW, however they are split, equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
from own_scripts.running import Matrix, same

from offbeat.runtime.launch import Launcher
from offbeat.strategies import combined, parse

pytestmark = pytest.mark.slow

CASES = [f"{model}-{optimizer}" for model in ("mlp", "skips", "words", "gpt2") for optimizer in ("SGD", "AdamW")]
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
STRATEGIES = (
    *(("pipeline(2)", 2), ("pipeline(2, naive)", 2), ("pipeline(2, gpipe, microbatches=3)", 2)),
    *(("pipeline(2, interleaved, microbatches=4, chunks=2)", 2), ("pipeline(2, zero_bubble, microbatches=3)", 2)),
    *(("pipeline(4)", 4), ("pipeline(4, zero_bubble)", 4), ("allreduce + pipeline(2)", 4)),
    *(("tensor(2)", 2), ("tensor(4)", 4), ("allreduce + tensor(2)", 4)),
    *(("pipeline(2) + tensor(2)", 4), ("allreduce + pipeline(2) + tensor(2)", 8)),
    *(("zero2", 2), ("zero3", 2), ("zero2 apart", 2), ("zero3 apart", 2)),
)
"""With the workers that each needs; apart: each on a host of its own. Most run in `make chaos`; see tests/wide.py."""


@pytest.fixture(scope="module")
def runs(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    return {
        precision: Matrix(
            launcher, tmp_path_factory.mktemp(precision), "equal_steps.py", [f"{case}-{precision}" for case in CASES]
        )
        for precision in TOLERANCES
    }


@pytest.mark.parametrize(("strategy", "workers"), STRATEGIES)
@pytest.mark.parametrize("precision", TOLERANCES)
def test_twenty_steps_equal_one_process(
    runs: dict[str, Matrix], precision: str, strategy: str, workers: int, request: pytest.FixtureRequest
) -> None:
    strategy, _, apart = strategy.partition(" apart")
    if apart:
        request.getfixturevalue("networks")
    size, tolerance = combined(parse(strategy)).replica_size, TOLERANCES[precision]
    for case in (f"{case}-{precision}" for case in CASES):
        [expected] = (left["facts"] for left in runs[precision].outcome(case, "single", 1))
        outcomes = [left["facts"] for left in runs[precision].outcome(case, strategy, workers, apart=bool(apart))]
        assert _furthest(expected["before"], expected["model"]) > 1e-3, f"the steps of {case} have changed nothing"
        for outcome in outcomes:
            same(expected["model"], outcome["model"], tolerance)
        replicas = [outcome["losses"] for outcome in outcomes[::size]]
        losses = [sum(losses) for losses in zip(*replicas, strict=True)]
        assert losses == pytest.approx(expected["losses"], rel=tolerance, abs=tolerance), case


def _furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)
