"""Runs that are resumed: what is finished is said to be, accounts add up, and what is proposed next works."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from cli_support import Offbeat, Said, in_process, points, write
from plain_script import SCRIPT

from offbeat.run.drive import fit
from offbeat.run.job import Job, Script, finished_result
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import RUN_FILE
from offbeat.runtime.run.settings import Goal
from offbeat.runtime.state.checkpoint import file_of, metadata_of, newest


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


def nobody(*_: object, **__: object) -> None:
    pytest.fail("a process was started")


# --- what is finished


def test_a_finished_run_is_said_to_be_and_nothing_is_started(
    offbeat_: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points(tmp_path / "mine.py")
    before = json.loads(offbeat_("run", "mine.py:Points", "-w", "2", "--target", "1", "--format", "json").out)
    monkeypatch.setattr("offbeat.cli.commands.run.Launcher", nobody)
    monkeypatch.setattr("offbeat.run.drive.Launcher", nobody)
    said = offbeat_("run", "--resume", "runs/latest")
    assert (said.code, said.err) == (0, "")
    for piece in (
        "runs/latest is finished: nothing was started",
        "Target missed",
        "8 steps",
        "To continue, raise its limit",
    ):
        assert piece in said.out
    assert "run --resume runs/latest --epochs 4" in said.out
    assert "TARGET" not in said.out
    again = json.loads(offbeat_("run", "--resume", "runs/latest", "--format", "json").out)
    assert again == before | {"run": "runs/latest"}
    assert fit("mine.py:Points", workers=2, resume="runs/latest").bytes_sent == before["bytes_sent"]


CASES = [
    ({"epochs": 4}, {"epochs": 4}, {}, True),
    ({"epochs": 4}, {"epochs": 4}, {"epochs": 8}, False),
    ({"epochs": 4}, {"epochs": 4}, {"epochs": 3}, True),
    ({"epochs": 4}, {"epochs": 4}, {"epochs": None, "steps": 10}, True),
    ({"epochs": 4}, {"epochs": 4}, {"epochs": None, "steps": 11}, False),
    ({"steps": 10}, {"epochs": 3}, {"steps": None, "epochs": 3}, False),
    ({"steps": 10}, {}, {"steps": 11}, False),
    ({"epochs": 9, "target": "0.9"}, {"epochs": 3, "reached_target": True}, {}, True),
    ({"epochs": 9, "target": "0.9"}, {"epochs": 3, "reached_target": True}, {"epochs": 20}, True),
    ({"epochs": 9, "target": "0.9"}, {"epochs": 3, "reached_target": True}, {"target": "0.95"}, False),
    ({"epochs": 9, "target": "0.9"}, {"epochs": 9, "reached_target": False}, {"target": "0.95"}, True),
    ({}, {"epochs": 3}, {}, True),
]


@pytest.mark.parametrize(("before", "result", "now", "over"), CASES)
def test_a_run_is_finished_if_nothing_is_left_to_do(
    tmp_path: Path, before: dict[str, Any], result: dict[str, Any], now: dict[str, Any], over: bool
) -> None:
    kept = {"strategy": "single", "workers": 1, "task": "train.py", "steps": 10} | result
    known = {"state": "finished", "config": {"goal": before}, "result": kept}
    (tmp_path / RUN_FILE).write_text(json.dumps(known))
    job = Job(Script("train.py"), Goal(**before | now), resume=tmp_path)
    assert (finished_result(job) is not None) is over
    for state in ("failed", "interrupted", "running", "finished without a team"):
        (tmp_path / RUN_FILE).write_text(json.dumps(known | {"state": state}))
        assert finished_result(job) is None


def test_a_script_that_was_changed_may_go_on(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "print('longer now')")
    result = {"strategy": "single", "workers": 1, "task": "train.py"}
    (tmp_path / RUN_FILE).write_text(json.dumps({"state": "finished", "config": {"goal": {}}, "result": result}))
    job = Job(Script(str(script)), Goal(), resume=tmp_path)
    ended = (tmp_path / RUN_FILE).stat().st_mtime
    os.utime(script, (ended - 1, ended - 1))
    assert finished_result(job) is not None
    os.utime(script, (ended + 1, ended + 1))
    assert finished_result(job) is None


# --- accounts


def times_in_checkpoint(run: Path) -> tuple[float, float]:
    """Core-seconds of all workers and mean wall seconds, without what came after the checkpoint was written."""
    folder = newest(run / "checkpoint")
    assert folder is not None
    states = [metadata_of(folder / file_of(rank))["data"] for rank in range(2)]
    cores = [float(number) for state in states for number in re.findall(r'"cpu_seconds", ([\d.e-]+)', state)]
    kinds = [match for state in states for match in re.findall(r'\["seconds", \{"~pairs": (\[\[.*?\]\])\}', state)]
    assert len(cores) == len(kinds) == 2
    return sum(cores), sum(seconds for kind in kinds for _, seconds in json.loads(kind)) / 2


@pytest.mark.parametrize("strategy", ["allreduce", "ddp", "server", "hogwild"])
def test_the_account_of_a_resumed_run_is_that_of_all_its_parts(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    points(tmp_path / "mine.py")
    first = fit("mine.py:Points", strategy, workers=2, steps=20, target=1.0, launcher=launcher)
    core_seconds, seconds = times_in_checkpoint(Path(str(first.run)))
    both = fit("mine.py:Points", workers=2, steps=40, resume=first.run, launcher=launcher)
    assert (both.steps, both.samples) == (40, 2 * first.samples)
    # Less than twice: what start and end send counts once for the whole run.
    assert 1.6 * first.bytes_sent <= both.bytes_sent <= 2.4 * first.bytes_sent
    assert both.seconds > seconds > 0
    assert both.core_seconds > core_seconds > 0
    assert sum(both.seconds_by_kind.values()) == pytest.approx(both.seconds)


def test_a_resumed_script_that_has_nothing_left_to_do_keeps_its_account(offbeat_: Offbeat, tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", SCRIPT)
    before = json.loads(offbeat_("run", "train.py", "-w", "2", "--format", "json", "--", "2").out)
    later = Path(before["run"], RUN_FILE).stat().st_mtime + 10
    os.utime(script, (later, later))  # As if it had been changed, so that it is tried.
    after = json.loads(offbeat_("run", "--resume", before["run"], "--format", "json").out)
    assert (after["steps"], after["samples"]) == (before["steps"], before["samples"])
    assert after["bytes_sent"] >= 0.9 * before["bytes_sent"], "all but what was sent after the last checkpoint"
    assert after["seconds_by_kind"]["compute"] == pytest.approx(before["seconds_by_kind"]["compute"])


# --- what is proposed


def proposed(said: Said) -> list[list[str]]:
    """The commands after `Try next:`, as a shell reads them."""
    assert said.code == 0, said.err
    lines = said.out.partition("Try next:\n")[2].splitlines()
    assert lines
    assert not any("#" in line or "TARGET" in line for line in lines)
    commands = [shlex.split(line) for line in lines]
    return [words[1:] if words[0].endswith("offbeat") else words[3:] for words in commands]


def test_what_is_proposed_after_a_script_works(offbeat_: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "my train.py", SCRIPT)
    alone = proposed(offbeat_("run", "my train.py", "--seed", "3", "--", "1", "a b"))
    assert alone[0] == ["run", "my train.py", "--workers", "2", "--seed", "3", "--", "1", "a b"]
    two = proposed(offbeat_(*alone[0]))
    assert two[0] == ["run", "my train.py", "--workers", "2", "--strategy", "ddp", "--seed", "3", "--", "1", "a b"]
    assert offbeat_(*two[0]).code == 0


def test_what_is_proposed_after_a_resumed_task_works(offbeat_: Offbeat, tmp_path: Path) -> None:
    points(tmp_path / "mine.py")
    first = proposed(offbeat_("run", "mine.py:Points", "-w", "2", "--target", "1", "--", "--rate", "0.2"))
    assert first[0][:4] == ["run", "mine.py:Points", "--workers", "2"]
    assert first[0][-2:] == ["--", "--rate=0.2"]
    longer = first[-1]
    assert longer[:2] == ["run", "--resume"]
    assert longer[-2:] == ["--epochs", "4"]
    second = proposed(offbeat_(*longer))
    assert second[0][1] == f"{tmp_path}/mine.py:Points"
    assert "--rate=0.2" in second[0]
    assert offbeat_(*second[0]).code == 0


def test_what_is_proposed_after_an_iterative_task_can_run_it(offbeat_: Offbeat) -> None:
    commands = proposed(offbeat_("run", "offbeat.tasks.mixture", "-w", "2", "--steps", "3"))
    assert offbeat_(*commands[0]).code == 0
