"""Local SGD: workers step by themselves and average their models every few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from killed_scripts import compare
from own_scripts.running import Matrix, left, run_script, same
from torch import Tensor

from offbeat.errors import StrategyError
from offbeat.runtime.launch import Launcher
from offbeat.strategies import AllReduce, Local, Nesterov, OuterSGD, Traits, parse

Facts = list[dict[str, Any]]
WATCHED = ("watched", "with_momentum", "with_adam", "with_adagrad", "without_a_loader")


@pytest.fixture(scope="module")
def parted(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(launcher, tmp_path_factory.mktemp("parted"), "parted.py", WATCHED)


@pytest.fixture(scope="module")
def loops(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    cases = ("schedule_per_epoch", "schedule_per_batch", "plain", "two_losses", "gan", "evaluated")
    return Matrix(launcher, tmp_path_factory.mktemp("loops"), "loops.py", cases)


def facts_of(matrix: Matrix, case: str, strategy: str, workers: int) -> Facts:
    return [one["facts"] for one in matrix.outcome(case, strategy, workers)]


def weighed(facts: Facts, common: Tensor, first: int, last: int) -> Tensor:
    """Where an averaging after the steps `first` to `last` should lead, from the models just before it."""
    counts = [sum(counted(one, step) for step in range(first, last + 1)) for one in facts]
    ways = [count * (one["alone"][last] - common) for count, one in zip(counts, facts, strict=True)]
    return torch.stack(ways).sum(0) / sum(counts)


def counted(one: dict[str, Any], step: int) -> int:
    """Examples behind a worker's step; one that stands in for none shows by a model that did not move."""
    before = one["start"] if step == 0 else one["after"][step - 1]
    return 0 if torch.equal(one["alone"][step], before) else one["examples"][step]


# --- as a value


def test_it_is_written_as_text_and_reads_back() -> None:
    assert parse("local(8)") == AllReduce() + Local(8)
    assert parse("diloco").parts()[-1] == Local(500, outer=Nesterov(0.7, 0.9))
    assert str(Local(8, outer=Nesterov(0.5, 0.8))) == "local(8, outer=nesterov(rate=0.5, momentum=0.8))"
    assert parse("local(4, outer=sgd(0.5), momentum=reset)").parts()[-1] == Local(4, 0, OuterSGD(0.5), "reset")
    assert parse("local(8)").traits == Traits(synchronous=True, deterministic=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("local", "local needs period"),
        ("local(0)", "period is 0, but averagings are at least 1 step apart"),
        ("local(2, after=-1)", "after is -1"),
        ("local(2, outer=nesterov(0.7, 1.0))", "momentum is 1.0, but it must lie between 0 and 1"),
        ("local(2, outer=sgd(0.0))", "rate is 0.0, but a step is longer than 0"),
        ("local(2, outer=adam)", "outer"),
        ("local(2, momentum=doubled)", "momentum takes kept | averaged | reset"),
        ("ddp + local(2)", "which ddp cannot do. Use allreduce or gossip"),
        ("server + local(2)", r"downpour(push=2, fetch=2)"),
        ("elastic + local(2)", "which elastic cannot do"),
        ("hogwild + local(2)", "which hogwild cannot do"),
        ("zero1 + local(2)", "which allreduce(shard=optimizer) cannot do"),
        ("local(2) + accumulate(2)", "there is one rhythm"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(StrategyError) as refused:
        parse(text)
    assert said in str(refused.value)


# --- what is computed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        ("schedule_per_epoch", "local(1)"),
        ("schedule_per_batch", "local(1)"),
        ("plain", "local(1, momentum=averaged)"),
        ("two_losses", "local(1, momentum=averaged)"),
        ("gan", "local(1, momentum=averaged)"),
        ("evaluated", "local(1, momentum=averaged)"),
    ],
)
def test_a_period_of_one_is_allreduce(loops: Matrix, case: str, strategy: str) -> None:
    [alone] = loops.outcome(case, "single", 1)
    for one in loops.outcome(case, strategy, 3):
        same(alone["state"], one["state"])


@pytest.mark.slow
def test_models_are_averaged_by_examples_every_few_steps(parted: Matrix) -> None:
    facts = facts_of(parted, "watched", "local(4)", 3)
    assert [one["steps"] for one in facts] == [10, 10, 10]
    common = facts[0]["start"]
    for first in (0, 4):
        assert not torch.equal(facts[0]["alone"][first + 1], facts[1]["alone"][first + 1])
        assert all(torch.equal(one["alone"][k], one["after"][k]) for one in facts for k in range(first, first + 3))
        expected = common + weighed(facts, common, first, first + 3)
        common = facts[0]["after"][first + 3]
        assert all(torch.equal(one["after"][first + 3], common) for one in facts)
        torch.testing.assert_close(common, expected, rtol=0, atol=1e-6)
    # The last batch of an epoch has one example, so two workers stand in.
    assert [counted(one, 4) for one in facts].count(0) == 2


@pytest.mark.slow
def test_an_evaluation_sees_the_mean_and_leaves_every_model_as_it_was(parted: Matrix) -> None:
    facts = facts_of(parted, "watched", "local(4)", 3)
    common = facts[0]["after"][7]
    expected = common + weighed(facts, common, 8, 9)
    for one in facts:
        assert torch.equal(one["own"], one["back"])
        assert torch.equal(one["mean"], facts[0]["mean"])
        torch.testing.assert_close(one["mean"], expected, rtol=0, atol=1e-6)
    assert not torch.equal(facts[0]["own"], facts[1]["own"])


@pytest.mark.slow
def test_the_outer_optimizer_takes_the_averaged_way_for_a_gradient(parted: Matrix) -> None:
    facts = facts_of(parted, "watched", "local(4, outer=nesterov(0.5, 0.8))", 3)
    common, velocity = facts[0]["start"], torch.zeros_like(facts[0]["start"])
    for first in (0, 4):
        gradient = -weighed(facts, common, first, first + 3)
        velocity = 0.8 * velocity + gradient
        expected = common - 0.5 * (gradient + 0.8 * velocity)
        common = facts[0]["after"][first + 3]
        assert all(torch.equal(one["after"][first + 3], common) for one in facts)
        torch.testing.assert_close(common, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_exchanged_until_it_begins(parted: Matrix) -> None:
    facts = facts_of(parted, "watched", "local(4, after=5)", 3)
    usual = facts_of(parted, "watched", "allreduce", 3)
    for one in facts:
        assert all(torch.equal(one["after"][k], usual[0]["after"][k]) for k in range(5))
    assert not torch.equal(facts[0]["after"][5], facts[1]["after"][5])
    assert torch.equal(facts[0]["after"][7], facts[1]["after"][7])


def buffers(one: dict[str, Any], step: int, name: str = "momentum_buffer") -> Tensor:
    return torch.cat([state[name].reshape(-1) for state in one["state"][step].values()])


@pytest.mark.slow
def test_momentum_is_kept_averaged_or_reset_as_is_said(parted: Matrix) -> None:
    kept = facts_of(parted, "with_momentum", "local(4)", 3)
    assert not torch.equal(buffers(kept[0], 3), buffers(kept[1], 3))
    averaged = facts_of(parted, "with_momentum", "local(4, momentum=averaged)", 3)
    assert torch.equal(buffers(averaged[0], 3), buffers(averaged[1], 3))
    # Before the first averaging both runs are the same, so what is averaged is what the other kept.
    counts = [sum(one["examples"][:4]) for one in kept]
    mean = torch.stack([n * buffers(one, 3) for n, one in zip(counts, kept, strict=True)]).sum(0) / sum(counts)
    torch.testing.assert_close(buffers(averaged[0], 3), mean, rtol=0, atol=1e-6)
    forgotten = facts_of(parted, "with_momentum", "local(4, momentum=reset)", 3)
    assert all(not one["state"][3] for one in forgotten)


@pytest.mark.slow
def test_a_reset_optimizer_is_as_it_was_made(parted: Matrix) -> None:
    for one in facts_of(parted, "with_adagrad", "local(4, momentum=reset)", 3):
        assert all(torch.equal(s["sum"], torch.full_like(s["sum"], 0.5)) for s in one["state"][3].values())
        assert all(float(s["step"]) == 0 for s in one["state"][3].values())
    averaged = facts_of(parted, "with_adam", "local(4, momentum=averaged)", 3)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(buffers(averaged[0], 3, name), buffers(averaged[2], 3, name))


@pytest.mark.slow
def test_bytes_fall_with_the_period(parted: Matrix) -> None:
    often, seldom = (facts_of(parted, "watched", text, 3)[0] for text in ("local(1)", "local(4)"))
    each = often["start"].numel() * 4 * 2  # What others read of a small row, which three workers sum in one shot.
    spare = 10 * 64
    assert 10 * each <= often["sent"] - seldom["sent"] + 2 * each <= 10 * each + spare


@pytest.mark.slow
def test_a_loop_without_a_loader_is_paced_by_its_steps(parted: Matrix) -> None:
    facts = facts_of(parted, "without_a_loader", "local(4)", 3)
    agree = [all(torch.equal(one["after"][k], facts[0]["after"][k]) for one in facts) for k in range(6)]
    assert agree == [False, False, False, True, False, False]


# --- who waits for whom


@pytest.mark.slow
def test_nobody_waits_between_averagings(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    goal: dict[str, Any] = {"strategy": "local(4)", "timeout": 30.0}
    run_script(launcher, tmp_path, "parted.py", tmp_path / "left", "nobody_waits", workers=2, **goal)
    assert [one["facts"]["steps"] for one in left(tmp_path / "left" / "nobody_waits", 2)] == [4, 4]


@pytest.mark.slow
def test_a_worker_whose_data_has_ended_keeps_the_others_company(launcher: Launcher, tmp_path: Path) -> None:
    goal: dict[str, Any] = {"strategy": "local(4)", "timeout": 30.0}
    case = "parts_of_different_lengths"
    run_script(launcher, tmp_path, "parted.py", tmp_path / "left", case, workers=2, **goal)
    first, second = (one["facts"] for one in left(tmp_path / "left" / case, 2))
    assert first["steps"] == second["steps"] == 8
    # The fourth step of each is an averaging; on its own, the first worker does not move after its third.
    assert first["moved"] == [True, True, True, True, False, False, False, True]
    assert second["moved"][:7] == [True] * 7


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(launcher: Launcher, tmp_path: Path) -> None:
    strategy = "local(3, outer=nesterov, momentum=averaged)"
    compare(launcher, tmp_path, "1.2.0,2.2.1", "map", "range", strategy=strategy, checkpoint_every=1)
    first, second = (one["state"] for one in left(tmp_path / "whole" / "left", 2))
    assert torch.equal(first["model.3.weight"], second["model.3.weight"])  # 15 steps: the last was an averaging.
    assert not torch.equal(first["model.1.running_mean"], second["model.1.running_mean"])
