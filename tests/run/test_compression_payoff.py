"""Whether compression pays: the arithmetic, the dense run that is asked, and the verdict of real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.run.step_times import verdict, without_compression
from offbeat.runtime.launch import Launcher
from offbeat.tasks.digits import Digits

CONFIG: dict[str, Any] = {"what": {"task": "t"}, "workers": 2, "goal": {"target": "score=0.9", "strategy": "allreduce"}}


def result(strategy: str, seconds: float, steps: int, **more: Any) -> dict[str, Any]:
    """What a run came to: a second of it spent on evaluations."""
    known = {"seconds": seconds + 1.0, "seconds_by_kind": {"evaluate": 1.0}, "target": "score=0.9"}
    return {"strategy": strategy, "steps": steps, "reached_target": True, "run": "there", **known, **more}


def account(sums: int, coding: float, sending: float, dense: float) -> dict[str, float]:
    """Compressed sums of a step each, and two dense ones that took `dense` each."""
    spent = {"coding_seconds": coding, "sending_seconds": sending, "probing_seconds": 2 * dense}
    return {"sums": sums, "as_dense_seconds": sums * dense, "as_compressed_seconds": coding + sending, **spent}


def left(folder: Path, name: str, told: dict[str, Any], **changed: Any) -> None:
    """A finished run beside others."""
    (folder / name).mkdir()
    config = {**CONFIG, "goal": {**CONFIG["goal"], "strategy": told["strategy"]}, **changed}
    (folder / name / "run.json").write_text(json.dumps({"config": config, "state": "finished", "result": told}))


def test_both_sides_are_compared_and_the_verdict_is_said_in_words(tmp_path: Path) -> None:
    left(tmp_path, "dense", result("allreduce", 50.0, 100))
    # 140 steps of 0.1 s each, of which 0.05 s are compressed sums; a dense sum takes 0.4 s.
    told = result("allreduce + topk(0.01)", 14.0 + 0.8, 140, compression=account(140, 2.0, 5.0, 0.4))
    found = verdict(told, CONFIG, tmp_path)
    assert found["step_seconds"] == pytest.approx(0.1)
    assert found["dense_step_seconds"] == pytest.approx(0.1 - 0.05 + 0.4)
    assert (found["steps"], found["dense_steps"]) == (140, 100)
    assert found["pays"] is True
    assert found["words"] == "topk pays here: step 0.22x, 1.40x the steps, 0.31x the time to target."


def test_what_makes_a_step_cheaper_may_still_not_pay(tmp_path: Path) -> None:
    left(tmp_path, "dense", result("allreduce", 50.0, 100))
    told = result("allreduce + topk(0.05)", 14.0 + 0.12, 140, compression=account(140, 2.0, 5.0, 0.06))
    found = verdict(told, CONFIG, tmp_path)
    assert found["pays"] is False
    assert found["words"] == "topk(0.05) does not pay here: step 0.91x, but 1.40x the steps."


def test_without_a_dense_run_the_steps_are_unknown_and_said_to_be(tmp_path: Path) -> None:
    other = result("allreduce", 50.0, 100)
    left(tmp_path, "another-number-of-workers", other, workers=4)
    left(tmp_path, "another-task", other, what={"task": "u"})
    left(tmp_path, "another-strategy", result("ddp", 50.0, 100))
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run" / "run.json").write_text("{")
    told = result("allreduce + topk(0.05)", 14.0 + 0.12, 140, compression=account(140, 2.0, 5.0, 0.06))
    found = verdict(told, CONFIG, tmp_path)
    assert found["pays"] is None
    assert "steps to the target are unknown without a dense run" in found["words"]


def test_where_no_dense_sum_was_made_the_dense_run_tells_what_a_step_takes(tmp_path: Path) -> None:
    told = result("server + sign", 20.0, 100)
    assert "was not measured. Run server beside it" in verdict(told, CONFIG, tmp_path)["words"]
    left(tmp_path, "dense", result("server", 10.0, 100))
    found = verdict(told, CONFIG, tmp_path)
    assert (found["dense_step_seconds"], found["pays"]) == (pytest.approx(0.1), False)
    assert found["words"] == "sign does not pay here: step 2.00x, and 1.00x the steps."


def test_nothing_is_said_of_what_is_sent_as_it_is(tmp_path: Path) -> None:
    assert without_compression("allreduce + accumulate(2)") is None
    assert without_compression("local(4) + half") == "allreduce + local(4)"
    assert verdict(result("allreduce", 1.0, 10), CONFIG, tmp_path) == {}


@pytest.mark.slow
def test_a_run_measures_a_dense_sum_and_asks_the_dense_run_beside_it(launcher: Launcher, tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 2, "seed": 1, "out": tmp_path, "launcher": launcher}
    dense = offbeat.fit(Digits(), "allreduce", **options)
    assert dense.pays == {}
    small = offbeat.fit(Digits(), "allreduce + quantize(8)", **options)
    assert small.compression["probes"] >= 1
    assert small.pays["dense_steps"] == dense.steps
    assert isinstance(small.pays["pays"], bool)
    # What was sent only to be compared is not counted.
    assert small.bytes_sent < dense.bytes_sent / 2 * small.steps / dense.steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["local(2) + lowrank(2)", "gossip + quantize(4)", "server(shards=2, consistency=ssp(1)) + topk(0.05)"],
)
def test_every_exchange_that_carries_a_compressor_measures_what_it_takes_dense(
    strategy: str, launcher: Launcher, tmp_path: Path
) -> None:
    result = offbeat.fit(Digits(), strategy, workers=2, seed=1, steps=12, out=tmp_path, launcher=launcher)
    account = result.compression
    assert account["letter_bytes"] < account["dense_bytes"]
    assert account["compared"] >= 1
    assert account["as_dense_seconds"] == pytest.approx(account["sums"] * account["dense_seconds"] / account["probes"])
    assert result.pays["dense_step_seconds"] > 0
    assert "of a dense one here" in result.pays["words"]
