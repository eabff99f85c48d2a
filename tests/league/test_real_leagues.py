"""Two real leagues, of a task and of the same as a script: what they leave, that both doors agree, that they go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paths
import pytest
from cli_support import in_process

import offbeat
from offbeat.errors import CheckpointError, UsageError
from offbeat.league import Entry, League, Planned
from offbeat.runtime.launch import Launcher, Role
from offbeat.tasks.logistic import Logistic

pytestmark = pytest.mark.slow
LOOP = paths.SUPPORT / "own_scripts" / "league.py"
KEPT = 3
"""Runs of the script's league that end before it is interrupted."""


class Looking:
    """A spectator who looks on, and may press Ctrl-C while a run is under way."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.interrupt_after = interrupt_after
        self.ended_runs: list[Entry] = []
        self.left = 0

    def begin(self, league: League, left: int, seconds: float) -> None:
        self.league, self.left = league, left

    def starting(self, planned: Planned) -> Watching:
        return Watching(len(self.ended_runs) == self.interrupt_after)

    def ended(self, entry: Entry, league: League, left: int, seconds: float) -> None:
        self.ended_runs.append(entry)


class Watching:
    """The same, of one run."""

    def __init__(self, interrupts: bool) -> None:
        self.interrupts = interrupts

    def begin(self, job: object, folder: object) -> None: ...

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        if self.interrupts and message.get("kind") == "progress":
            raise KeyboardInterrupt

    def tick(self) -> None: ...

    def verdict(self, verdict: object) -> None: ...


@dataclass
class Leagues:
    """Both, and what the second looked like when it was interrupted."""

    task: League
    script: League
    before: League
    after: Looking
    loop: Path


@pytest.fixture(scope="module")
def leagues(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Leagues:
    place = tmp_path_factory.mktemp("leagues")
    loop = Path(shutil.copy(LOOP, place))
    task = offbeat.compare(
        "offbeat.tasks.digits",
        ["allreduce", "server"],
        workers=2,
        seeds=1,
        target=0.85,
        tune=None,
        out=place,
        launcher=launcher,
    )
    first, then = Looking(KEPT), Looking()
    with pytest.raises(KeyboardInterrupt):
        offbeat.compare(
            loop,
            ["allreduce"],
            arguments=["--batch", "64"],
            workers=2,
            seeds=1,
            target="accuracy=0.85",
            tune=(1.0, 0.05),
            epochs=3,
            single=False,
            out=place,
            launcher=launcher,
            spectator=first,
        )
    before = League.read(first.league.folder)
    script = offbeat.compare(resume=first.league.folder, launcher=launcher, spectator=then)
    return Leagues(task, script, before, then, loop)


def test_everybody_ran_every_seed_and_the_target_was_reached(leagues: Leagues) -> None:
    task = leagues.task
    assert {row.name: (row.runs, row.reached) for row in task.rows} == dict.fromkeys(
        ["ddp", "ddp, again", "allreduce", "server", "single"], (1, 1)
    )
    assert task.winner in ("ddp", "allreduce", "server")
    for row in task.rows:
        assert row.time.median > 0
        assert row.step_seconds
        assert row.test_score
        assert row.kernel_bytes is None
        assert (row.bytes_sent or 0) > 0 or row.name == "single"
        assert row.speedup is not None
    assert task.tuning["runs"] == 0


def test_strategies_that_are_exact_learn_the_same_from_the_same_start_in_the_same_order(leagues: Leagues) -> None:
    first, *others = (entry for entry in leagues.task.entries if entry.name != "single")
    assert len(others) == 3
    for entry in others:
        assert entry.first_batch == first.first_batch
        # One image of the 300 may fall to the other side of a rounding.
        assert entry.curve[0].score == pytest.approx(first.curve[0].score, abs=0.004)
    assert len({entry.first_batch for entry in leagues.script.entries}) == 2  # One for each seed.


def test_both_doors_agree(leagues: Leagues) -> None:
    ours, theirs = (
        next(entry for entry in made.entries if entry.key == ("allreduce", 0, 1.0, False))
        for made in (leagues.task, leagues.script)
    )
    assert ours.first_batch == theirs.first_batch
    assert [point.step for point in ours.curve] == [point.step for point in theirs.curve]
    # The order of later epochs depends on what each door's evaluation draws before them, as in a plain script.
    assert ours.curve[0].score == pytest.approx(theirs.curve[0].score, abs=1e-6)


def test_learning_rates_of_a_script_are_tuned_without_its_knowledge(leagues: Leagues) -> None:
    tried = {(e.name, e.factor): e for e in leagues.script.entries if e.tuning}
    assert set(tried) == {("ddp", 1.0), ("ddp", 0.05), ("allreduce", 1.0), ("allreduce", 0.05)}
    full, little = tried["allreduce", 1.0], tried["allreduce", 0.05]
    assert full.first_batch == little.first_batch
    assert full.curve[0].score - little.curve[0].score > 0.2
    assert {row.factor for row in leagues.script.rows} == {1.0}


def test_a_factor_reaches_the_rates_of_servers_too(launcher: Launcher, tmp_path: Path) -> None:
    def score(rate: float, factor: float) -> float | None:
        task = Logistic(examples=200, features=8, rate=rate)
        options: dict[str, Any] = {"workers": 2, "steps": 12, "seed": 3, "target": 9.0, "out": tmp_path}
        return offbeat.fit(task, "server", rate_factor=factor, launcher=launcher, **options).score

    assert score(0.4, 0.25) == pytest.approx(score(0.1, 1.0), rel=1e-6)
    assert score(0.1, 2.0) != pytest.approx(score(0.1, 1.0), rel=1e-3)


def test_a_league_goes_on_where_it_was_interrupted(leagues: Leagues) -> None:
    assert len(leagues.before.entries) == KEPT
    assert leagues.script.entries[:KEPT] == leagues.before.entries
    assert leagues.after.left == len(leagues.after.ended_runs) == 7 - KEPT
    assert len({entry.key for entry in leagues.script.entries}) == len(leagues.script.entries) == 7
    states = [json.loads(p.read_text())["state"] for p in (leagues.script.folder / "runs").glob("2*/run.json")]
    assert sorted(states) == ["finished"] * 7 + ["interrupted"]
    ended = [Path(entry.folder or "") for entry in leagues.script.entries]
    assert all((run / "metrics.jsonl").exists() and not (run / "checkpoint").exists() for run in ended)
    assert leagues.script.facts["data"]["hash"] == leagues.script.entries[0].first_batch


def test_a_finished_league_is_told_again_without_a_run(
    leagues: Leagues,
    launcher: Launcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("offbeat.league._compare.Launcher", lambda _preload: nullcontext(launcher))
    command = in_process(launcher, tmp_path, monkeypatch, capsys)
    said = command("compare", "--resume", leagues.task.folder)
    assert (said.code, said.err.count("["), "0 runs to do" in said.err) == (0, 0, True)
    for piece in ("to target, s", "server", "Noise: ddp run twice differs by", "league.html"):
        assert piece in said.out
    told = command("compare", "--resume", leagues.task.folder, "--format", "json")
    assert (told.code, told.err) == (0, "")
    assert json.loads(told.out)["winner"] == leagues.task.winner
    page = command("compare", "--resume", leagues.task.folder, "--format", "html", "--report", "page.html")
    assert (page.code, page.out) == (0, "")
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert (leagues.task.folder / "league.html").read_text() == (tmp_path / "page.html").read_text()


def test_a_script_that_has_changed_or_another_command_is_refused(leagues: Leagues, launcher: Launcher) -> None:
    with pytest.raises(CheckpointError, match="workers was 2, not 3"):
        offbeat.compare(
            leagues.loop,
            ["allreduce"],
            arguments=["--batch", "64"],
            workers=3,
            resume=leagues.script.folder,
            launcher=launcher,
        )
    text = leagues.loop.read_text()
    leagues.loop.write_text(text + "\n")
    try:
        with pytest.raises(CheckpointError, match="has changed since"):
            offbeat.compare(resume=leagues.script.folder, launcher=launcher)
    finally:
        leagues.loop.write_text(text)


def test_without_a_target_there_is_no_league(leagues: Leagues, launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no target"):
        offbeat.compare(
            leagues.loop, ["allreduce"], arguments=["--batch", "600"], epochs=1, out=tmp_path, launcher=launcher
        )
    with pytest.raises(UsageError, match="nothing to compare"):
        offbeat.compare(launcher=launcher)
