"""A script that runs without `offbeat run` says at its end what came of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import write
from plain_script import SCRIPT

from conftest import DEADLINE, clean_environment
from offbeat.runtime.run.report import headline, report_lines, reporter
from offbeat.runtime.run.result import Result

RESULT = {
    "kind": "result",
    "strategy": "allreduce",
    "workers": 2,
    "steps": 40,
    "epochs": 5,
    "samples": 320,
    "score": 0.97,
    "target": "0.9",
    "reached_target": True,
    "seconds_to_target": 1.5,
    "seconds": 2.0,
    "samples_per_second": 160.0,
    "core_seconds": 3.25,
    "bytes_sent": 6100,
    "seconds_by_kind": {"compute": 1.5, "communicate": 0.5},
}


def test_the_report_is_the_launchers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reporter(tmp_path)(RESULT)
    said = capsys.readouterr()
    result = Result.from_plain({"task": "", "run": tmp_path} | RESULT)
    assert said.out == ""
    assert said.err == "\n".join(["", "offbeat: " + "".join(headline(result)), *report_lines(result), ""])
    assert "Target reached: score 0.97 (wanted 0.9) after 1.50 s. 2 workers, allreduce." in said.err
    assert "where the time went compute 75 %, communicate 25 % (mean of 2 workers)" in said.err
    assert f"everything is in    {tmp_path}" in said.err


def test_without_a_folder_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    reporter(None)(RESULT)
    assert "everything is in" not in capsys.readouterr().err


def test_a_variable_turns_it_off_and_progress_is_never_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter(None)({"kind": "progress"})
    monkeypatch.setenv("OFFBEAT_REPORT", "0")
    reporter(None)(RESULT)
    assert capsys.readouterr().err == ""


def test_a_closed_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "closed").open("w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", closed)
    reporter(None)(RESULT)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_python_and_torchrun_end_with_one_report(tmp_path: Path, launcher: list[str]) -> None:
    write(tmp_path / "loop.py", SCRIPT)
    done = subprocess.run(
        [sys.executable, *launcher, "loop.py", "2"],
        cwd=tmp_path,
        env=clean_environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("offbeat: Done: score 1 after") == 1, done.stderr
    assert f"{'2 workers, allreduce' if launcher else '1 worker, single'}." in done.stderr
    assert "8 steps, 2 epochs, 32 examples" in done.stderr
