"""Updates that a strategy does not see are refused or warned of, instead of letting workers drift apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_scripts.running import left, run_script, same

from offbeat.errors import UsageError
from offbeat.runtime.launch import Launcher

IN_STEPS = (
    "local(2)",
    "gossip",
    "gossip(asynchronous=True)",
    "gossip + local(2)",
    "hogwild",
    "allreduce(shard=optimizer)",
    "allreduce + accumulate(2)",
    "ddp + accumulate(2)",
)
"""Strategies without servers that exchange when an optimizer steps."""
SERVED = ("server(consistency=ssp(2))", "server(consistency=asp)", "server", "downpour", "elastic", "coded")


def outcomes(launcher: Launcher, folder: Path, *cases: tuple[str, str], **goal: Any) -> list[list[dict[str, Any]]]:
    """What each of two workers was left with by each case under its strategy."""
    words = [word for case in cases for word in case]
    run_script(launcher, folder, "odd_loops.py", folder / "left", *words, workers=2, timeout=120.0, **goal)
    return [left(folder / "left" / str(number), 2) for number in range(len(cases))]


@pytest.mark.slow
def test_updates_by_hand_are_refused_where_exchanges_need_an_optimizer(launcher: Launcher, tmp_path: Path) -> None:
    for of_one in outcomes(launcher, tmp_path, *(("by_hand", strategy) for strategy in IN_STEPS)):
        for found in of_one:
            assert "no optimizer was given to prepare()" in found["told"]


@pytest.mark.slow
def test_updates_by_hand_agree_where_gradients_are_exchanged(launcher: Launcher, tmp_path: Path) -> None:
    for of_one in outcomes(launcher, tmp_path, *(("by_hand", strategy) for strategy in ("allreduce", "ddp"))):
        assert [found["told"] for found in of_one] == ["", ""]
        same(of_one[0]["state"], of_one[1]["state"], tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SERVED)
def test_updates_by_hand_are_refused_on_servers(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    with pytest.raises(UsageError, match=r"no optimizer was given to prepare\(\)"):
        outcomes(launcher, tmp_path, ("by_hand", strategy), strategy=strategy)
    ((found, _),) = outcomes(launcher, tmp_path, ("plain", strategy), strategy=strategy)
    assert (found["told"], found["warnings"]) == ("", [])


@pytest.mark.slow
def test_a_prepared_optimizer_that_never_steps_does_not_hide_updates(launcher: Launcher, tmp_path: Path) -> None:
    cases = [(case, strategy) for case in ("never_stepped", "second_by_hand") for strategy in IN_STEPS[:4]]
    for (case, _), of_one in zip(cases, outcomes(launcher, tmp_path, *cases), strict=True):
        for found in of_one:
            if case == "never_stepped":
                assert "weight (1, 4)" in found["told"]
                assert "no prepared optimizer has stepped on" in found["told"]
            else:  # The copy may be meant to follow the other.
                (warning,) = found["warnings"]
                assert "weight of model 1 (1, 4)" in warning


@pytest.mark.slow
def test_an_optimizer_of_parameters_that_no_team_knows_is_named_once(launcher: Launcher, tmp_path: Path) -> None:
    ways = ("allreduce", "ddp", "local(2)", "gossip")
    for of_one in outcomes(launcher, tmp_path, *(("second_optimizer", strategy) for strategy in ways)):
        for found in of_one:
            assert found["told"] == ""
            (warning,) = found["warnings"]
            assert "Adam updates 2 parameters that no prepared model has, of shapes (1, 4), (1,)" in warning


@pytest.mark.slow
def test_plain_loops_followers_and_fitted_inputs_are_left_alone(launcher: Launcher, tmp_path: Path) -> None:
    ways = ("allreduce", "local(2, outer=nesterov(0.7, 0.9))", "gossip", "hogwild", "gossip(asynchronous=True)")
    plain = [("plain", strategy) for strategy in IN_STEPS]
    for of_one in outcomes(launcher, tmp_path, *plain, *(("fine", strategy) for strategy in ways)):
        assert [(found["told"], found["warnings"]) for found in of_one] == [("", [])] * 2
        assert all(bool(torch.isfinite(value).all()) for value in of_one[0]["state"].values())


@pytest.mark.slow
def test_workers_that_compute_the_same_batches_are_told_once(launcher: Launcher, tmp_path: Path) -> None:
    ways = ("allreduce", "allreduce(ring)", "ddp", "local(2)", "gossip", "gossip(asynchronous=True)")
    for of_one in outcomes(launcher, tmp_path, *(("same_batches", strategy) for strategy in ways)):
        (warning,) = of_one[0]["warnings"]
        assert "all 2 workers had the same gradients" in warning
        assert of_one[1]["warnings"] == []


@pytest.mark.slow
def test_equal_gradients_of_divided_batches_and_zeros_are_no_reason_to_warn(launcher: Launcher, tmp_path: Path) -> None:
    cases = [(case, way) for case in ("own_batches", "no_gradients", "equal_parts") for way in ("allreduce", "ddp")]
    for of_one in outcomes(launcher, tmp_path, *cases):
        assert [(found["told"], found["warnings"]) for found in of_one] == [("", [])] * 2


@pytest.mark.slow
def test_models_that_drift_apart_where_they_should_be_equal_are_told_once(launcher: Launcher, tmp_path: Path) -> None:
    ways = ("allreduce", "ddp", "allreduce + accumulate(2)")
    cases = [(case, way) for case in ("own_rate", "own_gradients", "own_noise", "common_noise") for way in ways]
    for (case, way), of_one in zip(cases, outcomes(launcher, tmp_path, *cases), strict=True):
        told = [found["warnings"] for found in of_one]
        if case == "common_noise":
            assert told == [[], []], way
        else:
            assert [len(one) for one in told] == [1, 0], (case, way)
            assert "the workers' models differ after step" in told[0][0]


COMPRESSORS = (
    *("topk(0.2)", "randomk(0.2)", "threshold(0.01)", "quantize(4)", "quantize(2, stochastic=True)", "sign"),
    *("lowrank(1)", "half", "bfloat", "topk(0.3) + quantize(4)"),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one_nan", "one_infinite"])
def test_one_nan_reaches_all_in_its_step_and_nobody_later(launcher: Launcher, tmp_path: Path, case: str) -> None:
    ways = ("allreduce", *(f"allreduce + {compressor}" for compressor in COMPRESSORS))
    dense, *compressed = outcomes(launcher, tmp_path, *((case, strategy) for strategy in ways))
    assert dense[0]["facts"]["unfit"] == ["2.bias"]
    for way, of_one in zip(ways[1:], compressed, strict=True):
        for found in of_one:
            assert found["told"] == "", way
            assert found["facts"]["unfit"] == ["2.bias"], way
            assert "later" not in found["facts"], way
            assert found["facts"]["loss"] < 3.5, way
        same(of_one[0]["state"], of_one[1]["state"], tolerance=0)


@pytest.mark.slow
def test_what_cannot_be_exchanged_rightly_is_refused_with_the_reason(launcher: Launcher, tmp_path: Path) -> None:
    cases = (
        ("one_graph_twice", "ddp", "a second backward pass reached a model"),
        ("parts_called", "ddp", "gradients of a model that was not called so since the last step"),
        ("skipped_step", "allreduce", "have made different numbers of steps (worker 0 4, worker 1 2)"),
        ("skipped_step", "ddp", "have made different numbers of steps (worker 0 4, worker 1 2)"),
        ("line_search", "allreduce + topk(0.2)", "evaluates its closure several times in a step"),
        ("line_search", "local(2)", "cannot be used with optimizer.step(closure)"),
        ("line_search", "gossip", "cannot be used with optimizer.step(closure)"),
        ("steps_in_backward", "allreduce", "SGD steps while backward still runs"),
        ("steps_in_backward", "allreduce(ring)", "SGD steps while backward still runs"),
    )
    for (case, strategy, reason), of_one in zip(
        cases, outcomes(launcher, tmp_path, *((case, strategy) for case, strategy, _ in cases)), strict=True
    ):
        for found in of_one:
            assert reason in found["told"], (case, strategy)


@pytest.mark.slow
def test_two_backward_passes_through_one_graph_are_both_exchanged(launcher: Launcher, tmp_path: Path) -> None:
    (of_one,) = outcomes(launcher, tmp_path, ("one_graph_twice", "allreduce"))
    assert [found["told"] for found in of_one] == ["", ""]
    same(of_one[0]["state"], of_one[1]["state"], tolerance=0)
