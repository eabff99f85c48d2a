"""Split models on real processes: twenty steps equal those of one process, with dropout, clipping and a resume."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import split_models

from offbeat.runtime.launch import Launcher, Role, serve_store, worker_environment

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
TRANSFORMERS = {"gpt2", "llama", "bert"}


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", list(split_models.MODELS))
def test_twenty_steps_of_a_split_model_equal_one_process(
    launcher: Launcher, tmp_path: Path, model: str, optimizer: str, dtype: str, ways: int
) -> None:
    if model in TRANSFORMERS and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed, whose models are split here")
    reports = on_ways(launcher, tmp_path, ways, model=model, optimizer=optimizer, dtype=dtype, steps=20)
    assert len(reports) == ways
    for report in reports:
        assert report["moved"] > 1e-3, "the steps have changed something"
        assert report["apart"] <= TOLERANCE[dtype]
        assert report["losses apart"] <= TOLERANCE[dtype]
        assert report["outputs apart"] <= 10 * TOLERANCE[dtype]
        assert report["norms apart"] <= TOLERANCE[dtype]
        assert report["replicas equal"]
        assert report["same names"]
        assert report["held"] == pytest.approx(report["share"], abs=0.02)
        assert report["held"] < 0.85


def on_ways(launcher: Launcher, folder: Path, ways: int, entry: str = "compare", **config: Any) -> list[dict[str, Any]]:
    """What each of some processes reports."""
    store, reports = serve_store(), list[dict[str, Any]]()
    name = f"{split_models.__name__}:{entry}"
    roles = [
        Role("worker", rank, name, config, worker_environment(rank, ways, store.port), folder / f"{rank}", 1)
        for rank in range(ways)
    ]
    launcher.run(roles, on_message=lambda _role, message: reports.append(dict(message)))
    return reports
