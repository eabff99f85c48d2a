"""Gossip on real processes: models mix with their neighbours' as the matrix says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.cli.display import gossip_in_words
from offbeat.errors import StrategyError
from offbeat.fitting import fit
from offbeat.runtime.launch import Launcher
from offbeat.strategies import Gossip, Local, Random, Traits, parse
from own_scripts.running import Matrix, left, run_script
from test_own_resume import compare

Facts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def parted(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(launcher, tmp_path_factory.mktemp("parted"), "parted.py", ("at_different_points", "watched"))


def facts_of(matrix: Matrix, case: str, strategy: str, workers: int) -> Facts:
    return [one["facts"] for one in matrix.outcome(case, strategy, workers)]


def test_it_is_written_as_text_and_reads_back() -> None:
    assert parse("dpsgd") == Gossip()
    assert str(Gossip(Random(3))) == "gossip(random(3))"
    assert parse("gossip(random(3, seed=2)) + local(4)").parts() == (Gossip(Random(3, 2)), Local(4))
    assert parse("gossip(torus)").traits == Traits(deterministic=True)


@pytest.mark.parametrize(
    ("text", "workers", "said"),
    [
        ("gossip(torus)", 5, "5 is a prime number"),
        ("gossip(random(3))", 3, "no connected graph of 3 workers"),
        ("gossip(random(0))", 4, "degree is 0"),
        ("gossip(star)", 4, "topology"),
        ("gossip + local(2, outer=nesterov)", 4, "there is no common point"),
        ("gossip + local(2, momentum=averaged)", 4, "there is no common point"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(text: str, workers: int, said: str) -> None:
    with pytest.raises(StrategyError) as refused:
        parse(text).check(workers)
    assert said in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "every"),
    [("gossip(ring)", 4, 1), ("gossip(exponential)", 4, 1), ("gossip(ring) + local(2)", 4, 2), ("gossip(ring)", 2, 1)],
)
def test_without_learning_models_follow_the_mixing_matrix(
    parted: Matrix, strategy: str, workers: int, every: int
) -> None:
    facts = facts_of(parted, "at_different_points", strategy, workers)
    made = Gossip.mixing(parse(strategy).parts()[0], workers)  # pyright: ignore[reportArgumentType]
    start = torch.stack([one["after"][0] for one in facts]).numpy()
    mean = start.mean(axis=0)
    assert len(facts[0]["after"]) == 9
    for step in range(9):
        found = torch.stack([one["after"][step] for one in facts]).numpy()
        expected = made.product(step // every) @ start
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
        distance = np.linalg.norm(found - mean)
        foretold = np.linalg.norm(made.product(step // every) @ (start - mean))
        assert distance == pytest.approx(foretold, abs=1e-5)
    for one in facts:
        np.testing.assert_allclose(one["mean"].numpy(), mean, atol=1e-9)


@pytest.mark.slow
def test_the_measured_distance_and_rate_stand_beside_the_foretold_ones(parted: Matrix) -> None:
    facts = facts_of(parted, "at_different_points", "gossip(ring) + local(2)", 4)
    made = Gossip().mixing(4)
    last = torch.stack([one["after"][-1] for one in facts]).numpy()
    apart = np.sqrt(np.mean(np.square(np.linalg.norm(last - last.mean(axis=0), axis=1))))
    for one in facts:
        assert one["distance"] == pytest.approx(apart, rel=1e-9)
        noted = one["notes"]["gossip"]
        assert noted["rate"] == pytest.approx(1 / 3)
        assert noted["spectral_gap"] == pytest.approx(2 / 3)
        mixed = made.product(1) @ (last - last.mean(axis=0))
        assert noted["measured_rate"] == pytest.approx(np.linalg.norm(mixed) / apart / 2, rel=1e-9)
    assert "spectral gap 0.667: a step leaves at most 0.333" in gossip_in_words(facts[0]["notes"]["gossip"])


@pytest.mark.slow
def test_a_step_comes_before_the_mixing_and_the_idle_make_none(parted: Matrix) -> None:
    facts = facts_of(parted, "watched", "gossip(ring)", 4)
    matrix = Gossip().mixing(4).at(0)
    for step in range(10):
        alone = torch.stack([one["alone"][step] for one in facts])
        after = torch.stack([one["after"][step] for one in facts])
        torch.testing.assert_close(after, torch.from_numpy(matrix).float() @ alone, rtol=0, atol=1e-6)
        before = facts[0]["start"] if step == 0 else None
        moved = [not torch.equal(one["alone"][step], before or one["after"][step - 1]) for one in facts if step]
        assert not step or moved.count(False) == (3 if step in (4, 9) else 0)
    assert len({tuple(one["own"].tolist()) for one in facts}) == 4
    assert all(torch.equal(one["mean"], facts[0]["mean"]) for one in facts)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(launcher: Launcher, tmp_path: Path) -> None:
    strategy = "gossip(exponential)"
    compare(launcher, tmp_path, "1.2.1", "map", "range", strategy=strategy, checkpoint_every=1, workers=3)
    first, second, _ = (one["state"] for one in left(tmp_path / "whole" / "left", 3))
    assert not torch.equal(first["model.3.weight"], second["model.3.weight"])


@pytest.mark.slow
def test_a_task_learns_and_its_records_tell_of_the_graph(launcher: Launcher, tmp_path: Path) -> None:
    result = fit("offbeat.tasks.digits", "gossip(ring)", workers=3, launcher=launcher, out=tmp_path / "runs")
    assert result.reached_target is True
    assert set(result.gossip) == {"spectral_gap", "rate", "usual_rate", "measured_rate", "distance"}
    assert json.loads((result.run / "run.json").read_text())["result"]["gossip"] == result.gossip
    lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["distance"] >= 0 for line in lines)


@pytest.mark.slow
def test_parts_of_different_lengths_finish(launcher: Launcher, tmp_path: Path) -> None:
    case, goal = "parts_of_different_lengths", {"strategy": "gossip(ring)", "timeout": 30.0}
    run_script(launcher, tmp_path, "parted.py", tmp_path / "left", case, workers=2, **goal)
    assert [one["facts"]["steps"] for one in left(tmp_path / "left" / case, 2)] == [7, 7]
