"""What a run is asked to do, what it leaves behind, and how its time and score are counted."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import CheckpointError, DataError, OutputError, UsageError
from offbeat.runtime.run import stopwatch
from offbeat.runtime.run.folder import METRICS_FILE, RUN_FILE, MetricsWriter, RunFolder, environment
from offbeat.runtime.run.metrics import Ledger
from offbeat.runtime.run.settings import Goal, Target
from offbeat.runtime.run.stopwatch import KINDS, Stopwatch

# -- the run's folder ------------------------------------------------------------------------------------------------


def test_a_run_folder_is_named_by_time_task_and_strategy(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "deep" / "runs", "/home/me/train.py", "server(shards=2) + topk(0.01)")
    assert re.fullmatch(r"\d{8}-\d{6}-train-server-shards-2-topk-0.01", folder.path.name)
    assert folder.log("worker", 3).parent.is_dir()
    assert folder.checkpoints.parent == folder.path


@pytest.mark.parametrize("text", ["../../etc", "...", "", "a/b\0c", "ü" * 300, "-" * 90, "x" * 300])
def test_no_name_leaves_the_parent_folder(text: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, text, text)
    assert folder.path.parent == tmp_path
    assert folder.path.is_dir()


def test_runs_of_the_same_second_get_names_of_their_own_and_latest_is_the_last(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path, "digits", "ddp") for _ in range(5)]
    assert len({folder.path for folder in folders}) == 5
    latest = tmp_path / "latest"
    assert not latest.readlink().is_absolute(), "so that the folder can be moved"
    assert latest.resolve() == folders[-1].path.resolve()
    folders[-1].write(task="digits")
    assert RunFolder.open(latest).path == folders[-1].path.resolve()


def test_a_latest_that_is_no_link_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(OutputError, match="latest cannot be written"):
        RunFolder.create(tmp_path, "digits", "ddp")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for parent in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(OutputError, match=r"file.* cannot be written: .*choose another folder with --out"):
            RunFolder.create(parent, "digits", "ddp")


def test_entries_of_run_json_are_replaced_and_others_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write(task="digits", path=Path("x"), nested={"a": [1, None]})
    folder.write(result={"steps": 3}, task="mnist")
    assert folder.read() == {"task": "mnist", "path": "x", "nested": {"a": [1, None]}, "result": {"steps": 3}}
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]


def test_a_write_that_fails_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write(task="digits")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("write_text", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, full)
            with pytest.raises(OutputError, match=r"run\.json cannot be written: No space left"):
                folder.write(task="other")
        assert folder.read() == {"task": "digits"}
        assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        RunFolder(tmp_path / "gone").write(task="digits")
    with pytest.raises(OutputError, match="cannot be written"):
        MetricsWriter(tmp_path / "gone" / METRICS_FILE).append({"step": 1})


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "[1]", "3", "null", "\x00\x01"])
def test_a_broken_run_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        RunFolder.open(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        RunFolder.open(tmp_path)


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=r"is not a run folder: it has no run\.json"):
            RunFolder.open(path)


def test_metrics_after_the_checkpoint_and_a_line_cut_short_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    metrics = MetricsWriter(path)
    metrics.keep_first(3)
    assert not path.exists()
    for step in (1, 3, 4):
        metrics.append({"step": step, "score": step / 2})
    with path.open("ab") as file:
        file.write(b'{"step": 5, "score": \xff')
    metrics.keep_first(4)
    assert len(path.read_text().splitlines()) == 3
    metrics.keep_first(2)
    metrics.append({"step": 4})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3, 4]
    assert [found.name for found in tmp_path.iterdir()] == [METRICS_FILE]


def test_the_environment_can_be_written_down() -> None:
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["cores"] == len(os.sched_getaffinity(0))


# -- goals and targets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.97", Target(0.97)),
        (" -1e-3 ", Target(-0.001)),
        ("accuracy=0.97", Target(0.97, "accuracy")),
        ("accuracy >= 1", Target(1.0, "accuracy")),
        ("val_loss2>.5", Target(0.5, "val_loss2")),
        ("loss<=0.1", Target(0.1, "loss", lower=True)),
        ("loss < +0.1", Target(0.1, "loss", lower=True)),
    ],
)
def test_targets_are_read_as_people_write_them(text: str, expected: Target) -> None:
    assert Target.parse(text) == expected


@given(st.floats(-1e6, 1e6).map(lambda x: round(x, 6)), st.sampled_from([None, "loss", "a_1"]), st.booleans())
def test_a_target_written_and_read_again_is_the_same(value: float, name: str | None, lower: bool) -> None:
    target = Target(value, name, lower and name is not None)
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    "text",
    ["", "high", "accuracy", "accuracy=", "=0.5", "accuracy==1", "a b=1", "nan", "x=inf", "1e999", "2x=1"],
)
def test_what_is_no_target_is_refused_with_examples(text: str) -> None:
    for ask in (Target.parse, lambda target: Goal(target=target)):
        with pytest.raises(UsageError, match=r"is not a target. Say a number, or a metric and a number: accuracy=0.97"):
            ask(text)


def test_a_target_judges_the_metric_it_names() -> None:
    metrics = {"loss": 0.3, "accuracy": 0.9}
    assert Target(0.5, "accuracy").pick(metrics) == ("accuracy", 0.9)
    assert Target(0.5, "other").pick(metrics) is None
    assert Target(0.5).pick({"only": 1.0}) == ("only", 1.0)
    assert Target(0.5).pick({}) is None
    with pytest.raises(UsageError, match=r"which metric it means of loss, accuracy\. Say e\.g\. loss=0\.5"):
        Target(0.5).pick(metrics)


def test_a_target_is_reached_at_its_value_exactly() -> None:
    assert [Target(0.5).reached(value) for value in (0.49, 0.5, 0.51)] == [False, True, True]
    assert [Target(0.5, "loss", lower=True).reached(value) for value in (0.49, 0.5, 0.51)] == [True, True, False]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"epochs": 0}, "--epochs 0 makes no sense"),
        ({"steps": -1}, "--steps -1 makes no sense"),
        ({"checkpoint_every": 0}, "--checkpoint-every 0 makes no sense"),
        ({"timeout": 0.0}, "--timeout 0.0 makes no sense"),
        ({"timeout": float("nan")}, "--timeout nan makes no sense"),
        ({"timeout": float("inf")}, "--timeout inf makes no sense"),
        ({"seed": 2**63}, "--seed 9223372036854775808 makes no sense"),
        ({"device": "toaster"}, "--device 'toaster' is not a device"),
        ({"device": "cuda"}, "has no CUDA"),
    ],
)
def test_goals_that_make_no_sense_are_refused_with_the_option(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Goal(**wrong)


def test_parts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(DataError, match="is not a way to divide data"):
        Goal(parts="halves")


def test_a_goal_survives_run_json_and_entries_of_other_versions() -> None:
    goal = Goal(strategy="ddp", target="loss<=0.1", epochs=3, seed=-(2**63), parts="dirichlet(0.3)")
    data = json.loads(json.dumps(goal.plain())) | {"from_the_future": 1}
    assert Goal.from_plain(data) == goal
    assert Goal.from_plain({}) == Goal()


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_the_ledger_keeps_the_best_score_and_when_the_target_was_reached_first() -> None:
    ledger = Ledger(Target(0.5, "loss", lower=True))
    assert not ledger.judge({"loss": 0.9, "accuracy": 0.1}, 1.0)
    assert not ledger.judge({"accuracy": 0.2}, 2.0)
    assert (ledger.score, ledger.metrics) == (0.9, {"accuracy": 0.2})
    assert ledger.judge({"loss": 0.4}, 3.0)
    assert ledger.judge({"loss": 0.45}, 3.5)
    assert ledger.judge({"loss": 0.7}, 4.0), "once reached, it stays reached"
    assert (ledger.score, ledger.best_score, ledger.seconds_to_target) == (0.7, 0.4, 3.0)


def test_without_a_target_the_first_metric_is_the_score() -> None:
    ledger = Ledger(None)
    assert not ledger.judge({"accuracy": 0.5, "loss": 2.0}, 1.0)
    assert not ledger.judge({"accuracy": 0.4}, 2.0)
    assert not ledger.judge({}, 3.0)
    assert (ledger.score, ledger.best_score, ledger.reached) == (0.4, 0.5, False)


def test_a_ledger_goes_on_from_its_state() -> None:
    ledger = Ledger(Target(0.5), steps=7, samples=70, earlier_cpu_seconds=100.0)
    ledger.judge({"accuracy": 0.6}, 3.0)
    state = json.loads(json.dumps(ledger.state_dict()))
    fresh = Ledger(Target(0.5))
    fresh.load_state_dict(state)
    assert fresh.cpu() >= 100.0
    assert state | {"cpu_seconds": 0} == fresh.state_dict() | {"cpu_seconds": 0}


# -- the stopwatch ---------------------------------------------------------------------------------------------------

kinds = st.sampled_from(KINDS)
seconds = st.floats(0, 1e4)
actions = st.lists(
    st.tuples(st.just("switch"), kinds, seconds)
    | st.tuples(st.just("move"), st.floats(-10, 1e5), kinds, kinds)
    | st.tuples(st.just("inside"), kinds, seconds)
    | st.tuples(st.just("carry"))
)


def _act(watch: Stopwatch, action: Any, clock: list[float]) -> None:
    match action:
        case ("switch", kind, spent):
            watch.switch(kind)
            clock[0] += spent
        case ("move", amount, source, target):
            watch.move(amount, source, target)
        case ("inside", kind, spent):
            with watch.spent_on(kind):
                clock[0] += spent
        case _:
            watch.total()
            watch.load_state_dict(watch.state_dict())


@given(actions)
def test_the_kinds_always_sum_to_the_wall_time(todo: list[Any]) -> None:
    clock = [50.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopwatch.time, "perf_counter", lambda: clock[0])
        watch = Stopwatch()
        for action in todo:
            _act(watch, action, clock)
            assert watch.total() == pytest.approx(clock[0] - 50, abs=1e-6)
            assert min(watch.seconds.values()) >= 0
        watch.restart()
        clock[0] += 1
        assert watch.total() == pytest.approx(1)


def test_time_inside_returns_to_the_former_kind_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: clock[0])
    watch = Stopwatch()
    assert watch.switch("compute") == "other"
    with pytest.raises(ZeroDivisionError), watch.spent_on("communicate"):
        clock[0] += 1 / 0
    clock[0] += 2
    watch.total()
    assert watch.seconds == dict.fromkeys(KINDS, 0.0) | {"compute": 2.0}


def test_no_more_than_was_counted_is_moved() -> None:
    watch = Stopwatch()
    watch.load_state_dict({"seconds": {"communicate": 3.0, "unknown": 9.0}, "overlapped": 1.5})
    watch.move(2.0, "communicate", "wait")
    watch.move(5.0, "communicate", "wait")
    watch.move(-1.0, "wait", "communicate")
    assert (watch.seconds["communicate"], watch.seconds["wait"], watch.overlapped) == (0.0, 3.0, 1.5)
