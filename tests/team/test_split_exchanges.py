"""Replicas that several workers share train under every exchange as replicas on one worker each do."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from own_scripts.running import left, run_script, same

from offbeat.errors import RunError
from offbeat.run.drive import Result
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import RUN_FILE

pytestmark = pytest.mark.slow


def trained(
    launcher: Launcher, folder: Path, strategy: str, workers: int, *words: str, **goal: Any
) -> tuple[list[dict[str, Any]], Result]:
    """What each worker has left, and the result."""
    folder.mkdir(exist_ok=True)
    out = goal.pop("out", folder / "out")
    result = run_script(launcher, folder, "splitting.py", out, *words, workers=workers, strategy=strategy, **goal)
    return left(out, workers), result


@cache
def unsplit(launcher: Launcher, folder: Path, strategy: str, *words: str) -> list[dict[str, Any]]:
    """The same training with two replicas of one worker each."""
    return trained(launcher, folder / "-".join([strategy.replace(" ", ""), *words]), strategy, 2, *words)[0]


@cache
def alone(launcher: Launcher, folder: Path, *words: str) -> dict[str, Any]:
    """The same training in one process."""
    return trained(launcher, folder / "-".join(["alone", *words]), "single", 1, *words)[0][0]


def result_of(folder: Path) -> dict[str, Any]:
    """The result of the run in a folder."""
    return json.loads((run_of(folder) / RUN_FILE).read_text())["result"]


def run_of(folder: Path) -> Path:
    """The run in a folder."""
    return next((folder / "runs").glob("2*"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unsplit")


def assert_alike(whole: list[dict[str, Any]], parts: list[dict[str, Any]], tolerance: float = 1e-10) -> None:
    """Every worker of a split replica has left what the replica's one worker leaves."""
    spread = len(parts) // len(whole)
    for rank, part in enumerate(parts):
        expected = whole[rank // spread]
        assert part["losses"] == pytest.approx(expected["losses"], abs=tolerance, rel=tolerance)
        assert part["score"] == pytest.approx(expected["score"], abs=tolerance)
        same(expected["model"], part["model"], tolerance)


CASES = [
    ("words", "AdamW", "local(3)", "pipeline(2)"),
    ("words", "AdamW", "local(4, momentum=averaged)", "tensor(2)"),
    ("mlp", "SGD", "local(3, after=5, outer=nesterov(0.7, 0.9))", "pipeline(2)"),
    ("mlp", "SGD", "local(4, outer=nesterov)", "tensor(2)"),
    ("words", "SGD", "local(4, momentum=reset)", "pipeline(2)"),
    ("words", "AdamW", "gossip", "pipeline(2)"),
    ("mlp", "SGD", "gossip + local(2, after=3)", "pipeline(2)"),
    ("words", "SGD", "gossip", "tensor(2)"),
]


@pytest.mark.parametrize(("model", "optimizer", "strategy", "split"), CASES)
def test_split_replicas_end_like_replicas_on_one_worker(
    launcher: Launcher, tmp_path: Path, shared: Path, model: str, optimizer: str, strategy: str, split: str
) -> None:
    words = ["--model", model, "--optimizer", optimizer]
    parts, _ = trained(launcher, tmp_path, f"{strategy} + {split}", 4, *words)
    assert_alike(unsplit(launcher, shared, strategy, *words), parts)
    assert result_of(tmp_path)["warnings"] == []


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("words", "local(3, outer=nesterov) + pipeline(2)"),
        ("words", "local(5, momentum=averaged) + tensor(2)"),
        ("mlp", "gossip + pipeline(2)"),
        ("mlp", "gossip + tensor(2)"),
        ("words", "allreduce + topk(0.1) + pipeline(2)"),
        ("words", "allreduce + powersgd + tensor(2)"),
    ],
)
def test_a_resumed_run_of_split_replicas_goes_on_as_if_it_had_not_stopped(
    launcher: Launcher, tmp_path: Path, model: str, strategy: str
) -> None:
    out = tmp_path / "out"
    words, once, twice = ["--model", model, "--optimizer", "SGD"], tmp_path / "once", tmp_path / "twice"
    # Both from one checkpoint, because where a model is cut is measured, and matters for what is compressed together.
    trained(launcher, once, strategy, 4, *words, steps=5, out=out)
    shutil.copytree(once, twice)
    straight, _ = trained(launcher, once, strategy, 4, *words, steps=20, resume=run_of(once), out=out)
    first, _ = trained(launcher, twice, strategy, 4, *words, steps=12, resume=run_of(twice), out=out)
    second, _ = trained(launcher, twice, strategy, 4, *words, steps=20, resume=run_of(twice), out=out)
    for whole, begun, ended in zip(straight, first, second, strict=True):
        assert [*begun["losses"], *ended["losses"]] == pytest.approx(whole["losses"], abs=1e-12)
        same(whole["model"], ended["model"], 1e-12)


@pytest.mark.parametrize("split", ["pipeline(2)", "tensor(2)"])
@pytest.mark.parametrize("compressor", ["topk(0.1)", "powersgd", "half", "randomk(0.2)"])
def test_replicas_that_sum_compressed_parts_stay_equal_and_learn(
    launcher: Launcher, tmp_path: Path, split: str, compressor: str
) -> None:
    words = ["--model", "words", "--optimizer", "AdamW"]
    parts, result = trained(launcher, tmp_path, f"allreduce + {compressor} + {split}", 4, *words)
    for part in parts[1:]:  # Also what several workers of a replica have: a tied weight, or normalization.
        same(parts[0]["model"], part["model"], 0)
    assert sum(parts[0]["losses"][-5:]) < 0.9 * sum(parts[0]["losses"][:5])
    assert 0 < result.compression["letter_bytes"] < result.compression["dense_bytes"]


@pytest.mark.parametrize(
    ("model", "optimizer", "strategy", "workers", "placement"),
    [
        ("words", "AdamW", "server(shards=2) + pipeline(2)", 4, "0,2,3,1"),
        ("words", "AdamW", "server + tensor(2)", 4, "auto"),
        ("mlp", "SGD", "server(replicas=1) + pipeline(2)", 4, "auto"),
        ("mlp", "SGD", "server + pipeline(2, gpipe)", 2, "auto"),
    ],
)
def test_split_replicas_in_step_on_servers_end_like_one_process(
    launcher: Launcher,
    tmp_path: Path,
    shared: Path,
    model: str,
    optimizer: str,
    strategy: str,
    workers: int,
    placement: str,
) -> None:
    words = ["--model", model, "--optimizer", optimizer]
    expected = alone(launcher, shared, *words)
    parts, result = trained(launcher, tmp_path, strategy, workers, *words, placement=placement)
    for part in parts:
        same(expected["model"], part["model"], 1e-5)
        assert part["score"] == pytest.approx(expected["score"], abs=1e-5)
    assert set(result.staleness) == {"0"}
    assert result_of(tmp_path)["warnings"] == []


@pytest.mark.parametrize(
    "strategy",
    [
        "server(consistency=ssp(2)) + pipeline(2)",
        "server(shards=2, consistency=asp) + pipeline(2)",
        "server(consistency=ssp(1, eager)) + tensor(2)",
        "server(consistency=asp) + tensor(2)",
        "server(consistency=ssp(2)) + topk(0.2) + pipeline(2)",
    ],
)
def test_split_replicas_apart_on_servers_learn(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    parts, result = trained(
        launcher, tmp_path, strategy, 4, "--model", "words", "--optimizer", "AdamW", "--steps", "40"
    )
    for part in parts[1:]:  # Tied weights and normalization are the same on all workers of a replica.
        same(parts[0]["model"], part["model"], 0)
    losses = parts[0]["losses"]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert sum(result.staleness.values()) >= 4 * 40
    assert {server["shard"] for server in result.servers} == set(range(4 if "shards=2" in strategy else 2))


@pytest.mark.parametrize("strategy", ["server(shards=2) + pipeline(2)", "server + tensor(2)"])
def test_a_run_of_split_replicas_on_servers_is_resumed(
    launcher: Launcher, tmp_path: Path, shared: Path, strategy: str
) -> None:
    words = ["--model", "words", "--optimizer", "AdamW"]
    trained(launcher, tmp_path / "run", strategy, 4, *words, steps=8)
    parts, _ = trained(launcher, tmp_path / "run", strategy, 4, *words, steps=20, resume=run_of(tmp_path / "run"))
    for part in parts:
        same(alone(launcher, shared, *words)["model"], part["model"], 1e-5)


@pytest.mark.parametrize(
    ("strategy", "victim", "place"),
    [
        ("server(consistency=ssp(2)) + pipeline(2)", 3, "stage 1 of replica 1"),
        ("server(replicas=1) + tensor(2)", 0, "tensor 0 of replica 0"),
    ],
)
def test_a_killed_worker_ends_its_replica_and_the_run_which_can_be_resumed(
    launcher: Launcher, tmp_path: Path, strategy: str, victim: int, place: str
) -> None:
    words = ["--model", "mlp", "--optimizer", "SGD"]
    faults = {"disturb": (f"worker {victim}: kill at step 9",), "checkpoint_every": 4}
    with pytest.raises(RunError, match=rf"(?s)worker {victim} .*{place}"):
        trained(launcher, tmp_path / "run", strategy, 4, *words, **faults)
    parts, result = trained(launcher, tmp_path / "run", strategy, 4, *words, resume=run_of(tmp_path / "run"))
    assert result.steps == 20
    assert all(len(part["losses"]) == 12 for part in parts)


@pytest.mark.parametrize(
    ("model", "optimizer", "shard", "clip"),
    [
        ("words", "AdamW", "optimizer", ["--clip"]),
        ("words", "SGD", "gradients", ["--clip"]),
        ("skips", "AdamW", "gradients", []),
    ],
)
def test_stages_divide_their_optimizer_over_replicas(
    launcher: Launcher, tmp_path: Path, shared: Path, model: str, optimizer: str, shard: str, clip: list[str]
) -> None:
    words = ["--model", model, "--optimizer", optimizer, *clip]
    strategy = f"allreduce(shard={shard}) + pipeline(2)"
    expected = alone(launcher, shared, *words)
    trained(launcher, tmp_path / "run", strategy, 4, *words, steps=8)
    parts, _ = trained(launcher, tmp_path / "run", strategy, 4, *words, steps=14, resume=run_of(tmp_path / "run"))
    # The checkpoint holds whole parameters and optimizer state, so the run goes on in one process.
    (last,), _ = trained(launcher, tmp_path / "run", "single", 1, *words, steps=20, resume=run_of(tmp_path / "run"))
    assert len(parts) == 4
    same(expected["model"], last["model"], 1e-9)
    assert last["losses"] == pytest.approx(expected["losses"][14:], abs=1e-8)
