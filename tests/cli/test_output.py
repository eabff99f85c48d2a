"""What commands print, whoever reads it: JSON of failures, and readers that go away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import Offbeat, in_process, points

from conftest import DEADLINE, clean_environment
from offbeat.cli import main
from offbeat.cli.output import print_json, tolerant_streams, wants_json
from offbeat.runtime.launch import Launcher

DIGITS = "offbeat.tasks.digits"


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


# --- failures as JSON


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        ("run nowhere.py", "TaskError", 2),
        ("run offbeat.tasks.digits --workers two", "BadParameter", 2),
        ("run offbeat.tasks.digits --wrkers 2", "NoSuchOption", 2),
        ("run --resume nowhere", "CheckpointError", 1),
        ("compare offbeat.tasks.digits --strategy nope", "StrategyError", 2),
        ("compare --resume nowhere", "CheckpointError", 1),
        ("scale offbeat.tasks.digits --workers 0", "UsageError", 2),
        ("batch-size offbeat.tasks.digits --workers 1", "UsageError", 2),
        ("bench collectives --simulate --ranks 0", "UsageError", 2),
        ("bench server", "UsageError", 2),
        ("explain nowhere", "CheckpointError", 1),
        ("explain --verify-checkpoint nowhere", "CheckpointError", 1),
        ("check nope", "StrategyError", 2),
        ("strategies nope", "StrategyError", 2),
        ("ps nowhere", "UsageError", 2),
    ],
)
def test_a_failed_command_tells_it_in_json(offbeat_: Offbeat, words: str, kind: str, code: int) -> None:
    said = offbeat_(*words.split(), "--format", "json")
    error = json.loads(said.out)["error"]
    assert (said.code, error["exit_code"], error["type"]) == (code, code, kind)
    assert error["message"].split("\n")[0][:40] in said.err


def test_a_mistake_of_ours_is_json_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("offbeat.cli.commands.strategies.show", lambda *_, **__: 1 // 0)
    monkeypatch.setattr(sys, "argv", ["offbeat", "strategies", "--format=json"])
    with pytest.raises(ZeroDivisionError):
        main()
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("run x.py --format json", True),
        ("run --format=json x.py", True),
        ("run x.py --format text", False),
        ("run x.py -- --format json", False),
        ("run x.py --format", False),
    ],
)
def test_a_scripts_own_format_is_not_ours(words: str, wanted: bool) -> None:
    assert wants_json(words.split()) is wanted


def test_numbers_that_json_does_not_have_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": None},
    }


# --- readers that go away


def offbeat_process(folder: Path, *words: str, stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "offbeat", *words],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    points(tmp_path / "mine.py")
    with offbeat_process(tmp_path, "run", "mine.py:Points", "--epochs", "30", stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert "mine.py" in process.stdout.readline()
        process.stdout.close()  # As `2>&1 | head -1` does.
        assert process.wait(DEADLINE) == 0
    kept = json.loads((tmp_path / "runs/latest/run.json").read_text())
    assert (kept["state"], kept["result"]["epochs"]) == ("finished", 30)
    assert (tmp_path / "runs/latest/model.safetensors").exists()


@pytest.fixture
def broken_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def _in_a_child(code: str, stdout: int) -> subprocess.CompletedProcess[str]:
    program = f"import sys\nfrom offbeat.cli.output import tolerant_streams\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=DEADLINE, check=False
    )


LINES = "for line in range(9999): print('a line of text')"


def test_a_long_command_ends_well_though_nobody_reads(broken_pipe: int) -> None:
    done = _in_a_child(f"with tolerant_streams(True):\n  {LINES}\nsys.exit(7)", broken_pipe)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_short_command_ends_quietly_when_nobody_reads(broken_pipe: int) -> None:
    done = _in_a_child(f"with tolerant_streams(False):\n  {LINES}\nsys.exit(7)", broken_pipe)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_that_a_full_disk_has_lost_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = _in_a_child(f"with tolerant_streams(True):\n  {LINES}", full.fileno())
    assert (done.returncode, done.stderr) == (1, "error: stdout could not be written: No space left on device.\n")


def test_a_command_started_without_standard_streams_works() -> None:
    code = "with tolerant_streams(True): print('lost'); print('lost', file=sys.stderr)\nopen('/dev/null')"
    program = f"import sys\nfrom offbeat.cli.output import tolerant_streams\n{code}"
    closed = f'exec "{sys.executable}" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", closed, "sh", program], timeout=DEADLINE, check=False).returncode == 0


def test_streams_of_tests_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with tolerant_streams(True):
        print("kept")
    assert capsys.readouterr().out == "kept\n"
