"""Replicas on several hosts: who shares one is decided by the hosts, printed, and in the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from own_scripts.running import left, run_script, same

from offbeat.errors import StrategyError, UsageError, WorkerError
from offbeat.run.job import Job, resolve, target_of
from offbeat.runtime.hosts import Host, Hosts
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import RUN_FILE
from offbeat.runtime.run.settings import Goal

pytestmark = pytest.mark.slow
UNEVEN = Hosts((Host("a", 1), Host("b", 2), Host("c", 1)))


def result_in(folder: Path) -> dict[str, Any]:
    """The result that the only run of a folder has left."""
    return json.loads((next((folder / "runs").glob("2*")) / RUN_FILE).read_text())["result"]


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize(
    ("placement", "workers", "ways", "stages"),
    [("auto", [[[0, 3], [1, 2]]], 1, 2), ("ranks", [[[0, 1], [2, 3]]], 2, 2), ("3,2,1,0", [[[3, 2], [1, 0]]], 2, 2)],
)
def test_ways_share_a_host_unless_the_user_says_otherwise(
    launcher: Launcher, tmp_path: Path, placement: str, workers: list[Any], ways: int, stages: int
) -> None:
    words = ["--model", "words", "--optimizer", "SGD", "--clip"]
    goal = {"strategy": "pipeline(2) + tensor(2)", "hosts": UNEVEN, "placement": placement}
    (tmp_path / "alone").mkdir()
    run_script(launcher, tmp_path / "alone", "splitting.py", tmp_path / "one", *words, strategy="single")
    run_script(launcher, tmp_path, "splitting.py", tmp_path / "out", *words, workers=4, **goal)
    expected = left(tmp_path / "one", 1)[0]
    for result in left(tmp_path / "out", 4):
        same(expected["model"], result["model"], 1e-10)
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-10)
    assert result_in(tmp_path)["placement"] == {
        "workers": workers, "hosts": [0, 1, 1, 2], "ways_across_hosts": ways, "stages_across_hosts": stages,
    }  # fmt: skip


@pytest.mark.usefixtures("networks")
def test_a_worker_that_dies_is_named_by_the_place_that_it_had(launcher: Launcher, tmp_path: Path) -> None:
    goal = {"hosts": UNEVEN, "disturb": ("worker 3: kill at step 3",)}
    with pytest.raises(WorkerError, match=r"(?s)worker 3 .*It had tensor 1 of replica 0"):
        run_script(
            launcher, tmp_path, "splitting.py", tmp_path / "out", workers=4, strategy="allreduce + tensor(2)", **goal
        )


@pytest.mark.parametrize(
    ("strategy", "placement", "error", "message"),
    [
        ("tensor(2)", "0,0", UsageError, "--placement 0,0 does not place every worker once"),
        ("allreduce", "1,0", UsageError, r"under allreduce each has a whole one. Omit it, or add pipeline\(2\)"),
        ("tensor(3)", "auto", StrategyError, "2 are not a multiple of 3"),
    ],
)
def test_placements_that_cannot_be_are_refused_before_anything_starts(
    strategy: str, placement: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve(Job(target_of("offbeat.tasks.text"), Goal(strategy=strategy, placement=placement), 2))
