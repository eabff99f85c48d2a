"""Sandblaster on real processes that are killed and stopped in the middle of line searches: the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sandblaster_tasks import Exact

from offbeat.errors import StrategyError, UsageError
from offbeat.run.drive import fit
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.runtime.run.result import Result
from offbeat.strategies import parse

pytestmark = pytest.mark.slow
STRATEGY, STEPS = "sandblaster(shards=2, replicas=1, portions=12)", 8


def weights(result: Result) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in load_file(result.run / MODEL_FILE).values()])


def undisturbed(folder: Path, launcher: Launcher) -> torch.Tensor:
    return weights(fit(Exact(), "sandblaster(portions=12)", workers=1, steps=STEPS, out=folder, launcher=launcher))


def faults_of(seed: int) -> list[str]:
    """Sentences: one copy of some servers, or of the coordinator, and perhaps a worker."""
    draw = random.Random(seed)
    struck = draw.sample(["server 0", "server 1", "coordinator 0"], draw.choice([1, 2, 3]))
    sentences = [f"{who}: {draw.choice(['kill', 'kill', 'stop 4s'])} at step {draw.randrange(1, 7)}" for who in struck]
    return sentences + ([f"worker 1: kill at step {draw.randrange(1, 7)}"] if draw.random() < 0.4 else [])


@pytest.mark.parametrize("seed", range(10))
def test_random_faults_of_processes_give_the_same_bits(seed: int, tmp_path: Path, launcher: Launcher) -> None:
    faults = faults_of(seed)
    result = fit(Exact(), STRATEGY, workers=2, steps=STEPS, out=tmp_path, disturb=faults, launcher=launcher)
    assert result.disturbances == {"asked": len(faults), "fired": len(faults)}
    assert result.steps == STEPS
    assert torch.equal(weights(result), undisturbed(tmp_path, launcher)), faults
    killed = sum("kill" in fault for fault in faults)
    assert len(result.died) >= killed


def test_a_coordinator_without_copies_that_dies_is_named(tmp_path: Path, launcher: Launcher) -> None:
    with pytest.raises(Exception, match="the coordinator of sandblaster is lost"):
        fit(
            Exact(),
            "sandblaster",
            workers=2,
            steps=4,
            out=tmp_path,
            disturb="coordinator 0: kill at step 2",
            launcher=launcher,
        )


def test_more_copies_than_there_can_be_are_refused() -> None:
    with pytest.raises(StrategyError, match="0 to 7 further copies"):
        parse("sandblaster(replicas=8)")


def test_faults_of_a_coordinator_that_is_not_there_are_refused(tmp_path: Path, launcher: Launcher) -> None:
    with pytest.raises(UsageError, match="has no coordinators"):
        fit(
            Exact(),
            "allreduce",
            workers=2,
            steps=1,
            out=tmp_path,
            disturb="coordinator 0: kill at step 2",
            launcher=launcher,
        )
