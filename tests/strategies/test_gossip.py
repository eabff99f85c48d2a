"""Gossip on real processes: models mix with their neighbours' as the matrix says."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import paths
import pytest
import torch
from cli_support import write
from killed_scripts import compare
from own_scripts.running import Matrix, left, run_script

from conftest import DEADLINE, clean_environment
from offbeat.errors import StrategyError
from offbeat.protocols.gossip.machine import STEPPED, CopyRow, Gossiper, Message, MoveHalfway
from offbeat.protocols.machine import Done, Effect, Event, Payload, SetTimer, Timer
from offbeat.run.drive import fit
from offbeat.runtime.launch import Launcher
from offbeat.runtime.messages import Codec, Endpoint, address_in, drive, private_directory
from offbeat.runtime.run.report import gossip_in_words
from offbeat.strategies import Gossip, Local, Random, Traits, parse
from offbeat.tasks.digits import Digits

Facts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def parted(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(
        launcher,
        tmp_path_factory.mktemp("parted"),
        "parted.py",
        ("at_different_points", "with_large_parameters", "watched"),
    )


def facts_of(matrix: Matrix, case: str, strategy: str, workers: int) -> Facts:
    return [one["facts"] for one in matrix.outcome(case, strategy, workers)]


def test_it_is_written_as_text_and_reads_back() -> None:
    assert parse("dpsgd") == Gossip()
    assert str(Gossip(Random(3))) == "gossip(random(3))"
    assert parse("gossip(random(3, seed=2)) + local(4)").parts() == (Gossip(Random(3, 2)), Local(4))
    assert parse("gossip(torus)").traits == Traits(deterministic=True)
    assert parse("gossip(ring, asynchronous=True)") == Gossip(asynchronous=True)
    assert Gossip(asynchronous=True).traits == Traits(elastic=True)


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
@pytest.mark.parametrize("case", ["at_different_points", "with_large_parameters"])
@pytest.mark.parametrize(
    ("strategy", "workers", "every"),
    [("gossip(ring)", 4, 1), ("gossip(exponential)", 4, 1), ("gossip(ring) + local(2)", 4, 2), ("gossip(ring)", 2, 1)],
)
def test_without_learning_models_follow_the_mixing_matrix(
    parted: Matrix, strategy: str, workers: int, every: int, case: str
) -> None:
    facts = facts_of(parted, case, strategy, workers)
    made = Gossip.mixing(parse(strategy).parts()[0], workers)  # pyright: ignore[reportArgumentType]
    start = torch.stack([one["after"][0] for one in facts]).numpy()
    mean = start.mean(axis=0)
    assert len(facts[0]["after"]) == 9
    for step in range(9):
        found = torch.stack([one["after"][step] for one in facts]).numpy()
        expected = made.product(step // every) @ start
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
        distance = np.linalg.norm(found - mean)
        predicted = np.linalg.norm(made.product(step // every) @ (start - mean))
        assert distance == pytest.approx(predicted, abs=1e-5)
    for one in facts:
        np.testing.assert_allclose(one["mean"].numpy(), mean, atol=1e-9)


@pytest.mark.slow
def test_the_measured_distance_and_rate_stand_beside_the_predicted_ones(parted: Matrix) -> None:
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


# --- without a beat


@pytest.mark.slow
def test_pairs_that_meet_without_a_beat_keep_the_mean_and_come_together(launcher: Launcher, tmp_path: Path) -> None:
    goal: dict[str, Any] = {"strategy": "gossip(complete, asynchronous=True)", "timeout": 30.0}
    run_script(launcher, tmp_path, "parted.py", tmp_path / "left", "talking", workers=3, **goal)
    facts = [one["facts"] for one in left(tmp_path / "left" / "talking", 3)]
    start = torch.stack([one["start"] for one in facts])
    for one in facts:
        torch.testing.assert_close(one["mean"], start.mean(dim=0), rtol=0, atol=1e-9)
    own = torch.stack([one["own"] for one in facts])
    apart = float((own - own.mean(dim=0)).norm() / (start - start.mean(dim=0)).norm())
    assert apart < 0.1
    assert facts[0]["notes"] == facts[1]["notes"]
    assert facts[0]["notes"]["gossip"]["pairs"] > 20
    assert all(one["sent"] > 20 * own[0].numel() * 8 for one in facts)


@pytest.mark.slow
def test_a_task_learns_without_a_beat_and_goes_on_from_a_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 2, "launcher": launcher, "out": tmp_path / "runs"}
    cut = fit("offbeat.tasks.digits", "gossip(asynchronous=True)", steps=20, **options)
    result = fit("offbeat.tasks.digits", resume=cut.run, steps=1000, **options)
    assert result.reached_target is True
    assert result.steps > 20
    assert result.gossip["pairs"] > 0


@pytest.mark.slow
def test_models_of_several_kinds_are_refused_without_a_beat(launcher: Launcher, tmp_path: Path) -> None:
    script = write(
        tmp_path / "kinds.py",
        """
        import torch
        from torch import nn
        import offbeat

        with offbeat.init() as team:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
            team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        """,
    )
    with pytest.raises(StrategyError, match="these models have float32, float64"):
        run_script(launcher, tmp_path, str(script), workers=2, strategy="gossip(asynchronous=True)")


VICTIM = """
    import sys
    from pathlib import Path
    sys.path[:0] = sys.argv[2:]
    from test_gossip import talk
    talk(Path(sys.argv[1]), 2, lambda worker: False)
"""


class Talker:
    """A machine on a real socket, whose worker steps as fast as it can."""

    def __init__(self, folder: Path, rank: int) -> None:
        others = [f"worker {k}" for k in range(3) if k != rank]
        self.machine = Gossiper(f"worker {rank}", others, seed=rank, patience=0.05)
        self.name, self.others, self.folder = self.machine.name, others, folder
        self.row = np.full(1000, float(rank))

    def begin(self, now: float) -> Sequence[Effect]:
        return [SetTimer(0.001, "step")]

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        if event == Timer("step"):
            return [SetTimer(0.001, "step"), *self.machine.on(Done(STEPPED), now)]
        return self.machine.on(event, now)

    def work(self, item: Any, token: Any) -> Payload:
        match item:
            case CopyRow():
                return Payload(8000, self.row.copy())
            case MoveHalfway(row):
                move = (np.frombuffer(row.handle) - self.row) / 2
                self.row = self.row + move
                return Payload(8000, move)
            case _:
                self.row = self.row - np.frombuffer(item.by.handle)
        return Payload(0)


def talk(folder: Path, rank: int, until: Callable[[Talker], bool]) -> Talker:
    talker = Talker(folder, rank)
    with Endpoint[Any](talker.name, Codec(Message), bind=address_in(folder, talker.name)) as endpoint:
        for other in talker.others:
            endpoint.connect(other, address_in(folder, other))
        drive(talker, endpoint, talker.work, until=lambda: until(talker))
    return talker


@pytest.mark.slow
def test_the_living_go_on_when_a_neighbour_is_killed(tmp_path: Path) -> None:
    """Two machines here, one in another process, which dies in the middle of things; nobody tells the others."""
    script = write(tmp_path / "victim.py", VICTIM)
    deadline = time.monotonic() + DEADLINE
    with private_directory() as folder, ThreadPoolExecutor() as threads:
        command = [sys.executable, str(script), str(folder), str(Path(__file__).parent), *map(str, paths.IMPORTED)]
        killed: list[int] = []
        since: dict[str, int] = {}
        done: set[str] = set()
        with subprocess.Popen(command, env=clean_environment()) as victim:

            def until(talker: Talker) -> bool:
                assert time.monotonic() < deadline, "waited in vain"
                machine = talker.machine
                if not killed and machine.granted > 20 and "worker 2" in machine._decided:
                    killed.append(machine.met)
                    victim.send_signal(signal.SIGKILL)
                if killed and victim.poll() is not None:
                    since.setdefault(talker.name, machine.met)
                    if machine.met > since[talker.name] + 50:
                        done.add(talker.name)
                return len(done) == 2

            first, second = threads.map(lambda rank: talk(folder, rank, until), range(2))
    assert killed
    assert first.machine.overdue + second.machine.overdue >= 1
    assert abs(first.row - second.row).max() < 0.5


@pytest.mark.slow
def test_letters_keep_the_mean_and_bring_models_together(parted: Matrix) -> None:
    facts = facts_of(parted, "at_different_points", "gossip(ring, gamma=0.4) + quantize(8)", 4)
    found = [torch.stack([one["after"][step] for one in facts]).numpy() for step in range(9)]
    mean = found[0].mean(axis=0)
    for models in found:
        np.testing.assert_allclose(models.mean(axis=0), mean, rtol=0, atol=1e-9)
    # Eight bits say almost everything: what is mixed are nearly the models themselves.
    exact = (1 - 0.4) * np.eye(4) + 0.4 * Gossip().mixing(4).matrices[0]
    for before, after in itertools.pairwise(found):
        np.testing.assert_allclose(after, exact @ before, rtol=0, atol=0.05)
    distances = [float(np.linalg.norm(models - mean)) for models in found]
    assert distances[-1] < 0.2 * distances[0]


@pytest.mark.slow
@pytest.mark.parametrize("compressor", ["threshold(0.001)", "randomk", "topk(0.05) + half"])
def test_digits_are_learned_by_letters_to_neighbours(launcher: Launcher, tmp_path: Path, compressor: str) -> None:
    options: dict[str, Any] = {"out": tmp_path, "launcher": launcher, "seed": 1}
    result = fit(Digits(), f"gossip + {compressor}", workers=3, **options)
    assert result.reached_target
    plain = 4 * sum(p.numel() for p in Digits().model().parameters()) * 2 * 3 * result.steps
    assert result.bytes_sent < 0.9 * plain


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("gossip(exponential) + topk", "neighbours change in every step"),
        ("gossip(asynchronous=True) + half", "random pairs keep no estimates"),
        ("gossip + lowrank", "lowrank"),
        ("gossip(gamma=0.0) + half", "gamma"),
    ],
)
def test_letters_that_gossip_cannot_carry_are_refused(strategy: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        parse(strategy)
