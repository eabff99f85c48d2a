"""Own loops train to the same parameters on one worker and on several, whatever the loop looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.runtime.launch import Launcher
from own_scripts.running import Matrix, same

CASES = (
    "plain",
    "clip_norm",
    "clip_value",
    "schedule_per_epoch",
    "schedule_per_batch",
    "parameter_groups",
    "two_optimizers",
    "gan",
    "gan_maker_first",
    "zeros_kept",
    "two_losses",
    "own_accumulation",
    "penalty_on_weights",
    "called_twice",
    "numbered_epochs",
    "evaluated",
)
CLOSURES = ("lbfgs", "lbfgs_strong_wolfe", "sgd_with_closure")
WAYS = (("allreduce", 2), ("allreduce", 3), ("ddp", 2), ("allreduce + accumulate(2)", 2), ("ddp + accumulate(2)", 3))


@pytest.fixture(scope="module")
def matrix(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder: Path = tmp_path_factory.mktemp("loops")
    return Matrix(launcher, folder, "loops.py", CASES)


@pytest.fixture(scope="module")
def with_closures(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(launcher, tmp_path_factory.mktemp("closures"), "loops.py", CLOSURES)


def alone(strategy: str) -> str:
    return "single + accumulate(2)" if "accumulate" in strategy else "single"


@pytest.mark.parametrize(("strategy", "workers"), WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_loop_ends_with_the_parameters_of_one_process(matrix: Matrix, case: str, strategy: str, workers: int) -> None:
    if case == "own_accumulation" and "accumulate" in strategy:
        pytest.skip("who accumulates in the loop does not ask a strategy to do it too")
    [expected] = matrix.outcome(case, alone(strategy), 1)
    found = matrix.outcome(case, strategy, workers)
    for one in found:
        same(expected["state"], one["state"])
        same(found[0]["state"], one["state"], tolerance=0)


@pytest.mark.parametrize(("strategy", "workers"), [("allreduce", 2), ("allreduce", 3), ("ddp", 2)])
@pytest.mark.parametrize("case", CLOSURES)
def test_closures_see_the_loss_of_the_whole_batch(
    with_closures: Matrix, case: str, strategy: str, workers: int
) -> None:
    [expected] = with_closures.outcome(case, "single", 1)
    found = with_closures.outcome(case, strategy, workers)
    for one in found:
        same(expected["state"], one["state"], tolerance=1e-4)
        same(found[0]["state"], one["state"], tolerance=0)
        assert one["facts"]["calls"] == expected["facts"]["calls"]
        assert one["facts"]["losses"] == pytest.approx(expected["facts"]["losses"], abs=1e-4)
