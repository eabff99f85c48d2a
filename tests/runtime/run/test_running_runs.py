"""`offbeat ps`, `stop` and `logs`, on a real run and on processes that play one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import Offbeat, in_process, write
from msgspec import structs, to_builtins

from conftest import clean_environment, wait_until
from offbeat.errors import UsageError, WaitError
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import RunFolder
from offbeat.runtime.run.procfs import held, ignores, lives, passport, seen
from offbeat.runtime.run.status import find_run, status, statuses, stop

ROUNDS = """\
import os, time
print("I am", os.environ["RANK"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def offbeat_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Offbeat:
    # Nothing is run here, so no fork server is needed.
    return in_process(Launcher(()), tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_a_run_elsewhere_is_listed_read_and_ended_as_by_ctrl_c(offbeat_: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "train.py", ROUNDS)
    command = [sys.executable, "-m", "offbeat", "run", "train.py", "-w", "2"]
    with subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE, text=True) as run:
        logs = tmp_path / "runs/latest/logs"
        wait_until(lambda: all((logs / f"worker-{i}.log").is_file() for i in (0, 1)), "two logs")
        wait_until(lambda: "I am 1" in (logs / "worker-1.log").read_text(), "worker 1's words")
        (row,) = json.loads(offbeat_("ps", "--format", "json").out)
        assert (row["state"], row["strategy"], row["workers"], row["launcher"]) == ("running", "script", 2, run.pid)
        assert [one["role"] for one in row["processes"]] == ["worker 0", "worker 1"]
        pids = [one["pid"] for one in row["processes"]]
        assert len({*pids, run.pid, os.getpid()}) == 4
        shown = offbeat_("ps").out
        assert "running since 20" in shown
        assert f"worker 1   pid {pids[1]}" in shown
        assert offbeat_("logs", "latest", "--rank", "1").out == "I am 1\n"
        assert offbeat_("logs", "runs/latest").out == "worker 0 | I am 0\nworker 1 | I am 1\n"
        assert "no log of worker 7. There are: worker 0, worker 1" in offbeat_("logs", "latest", "--rank", "7").err
        ended = offbeat_("stop", "latest")
        assert ended.code == 0
        assert "has ended: interrupted." in ended.out
        assert run.stderr is not None
        assert "interrupted; all processes were ended" in run.stderr.read()
        assert run.wait(30) == 130
    assert [seen(pid) for pid in pids] == [None, None]
    assert "No run in runs is running" in offbeat_("ps").out
    assert ": interrupted" in offbeat_("ps", "--all").out
    again = offbeat_("stop", "latest")
    assert again.code == 2
    assert "is not running (it is interrupted)" in again.err
    assert offbeat_("logs", "latest", "--rank", "0", "--follow").out == "I am 0\n"


def test_logs_are_named_by_worker_and_by_shard_and_copy(offbeat_: Offbeat, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", "task", "server(replicas=1)")
    folder.write(config={}, state="done")
    for kind, number in [("server", "0.10"), ("server", "0.2"), ("worker", 10), ("worker", 9)]:
        folder.log(kind, number).write_text(f"{kind} {number}\n")
    names = ["worker 9", "worker 10", "server 0.2", "server 0.10"]
    assert offbeat_("logs", "latest").out == "".join(f"{name} | {name}\n" for name in names)
    assert offbeat_("logs", "latest", "--server", "0.10").out == "server 0.10\n"
    assert "no log of server 0.0" in offbeat_("logs", "latest", "--server", "0").err


# -- processes that play a run

PLAYED = """\
import signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with open(sys.argv[1] + "/logs/worker-0.log", "w") as log:
    subprocess.Popen(["sleep", "600"], stdout=log)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def played(tmp_path: Path) -> Iterator[tuple[RunFolder, list[subprocess.Popen[str]]]]:
    folder = RunFolder.create(tmp_path / "runs", "task", "allreduce")
    started: list[subprocess.Popen[str]] = []
    yield folder, started
    for process in started:
        process.kill()
        process.communicate()


def play(folder: RunFolder, started: list[subprocess.Popen[str]], *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PLAYED, str(folder.path), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    config = {"what": {"task": {"source": "mine", "name": "Task", "arguments": {}}}, "workers": 1}
    folder.write(config=config, state="running", process=to_builtins(passport(process.pid)))
    return process


Played = tuple[RunFolder, list[subprocess.Popen[str]]]


def test_one_that_does_not_end_is_said_and_killed_with_all_its_processes(played: Played) -> None:
    folder, _ = played
    process = play(*played)
    (worker,) = status(folder).processes
    assert (worker.role, status(folder).what) == ("worker 0", "mine:Task")
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(WaitError, match=rf"not ended within 0\.3 s; worker 0 \(pid {worker.pid}, .*End it with --kill"):
        stop(folder, 0.3)
    assert stop(folder, 30, kill=True) == "killed"
    assert process.wait(30) == -signal.SIGKILL
    assert seen(worker.pid) is None or seen(worker.pid).state == "ended"  # pyright: ignore[reportOptionalMemberAccess]
    assert folder.read()["state"] == "killed"


def test_one_that_is_deaf_to_ctrl_c_gets_another_signal(played: Played) -> None:
    folder, _ = played
    process = play(*played, "deaf")
    assert ignores(process.pid, signal.SIGINT)
    (worker,) = status(folder).processes
    os.kill(worker.pid, signal.SIGKILL)
    stop(folder, 30)
    assert process.wait(30) == -signal.SIGTERM
    assert status(folder).state == "lost"


def test_a_number_that_was_given_to_another_process_is_never_signalled(played: Played) -> None:
    folder, _ = played
    process = play(*played)
    real = passport(process.pid)
    for other in (
        structs.replace(real, began=real.began - 1),
        structs.replace(real, boot="another start of the machine"),
        structs.replace(real, counted="elsewhere"),
    ):
        assert lives(real)
        assert not lives(other)
        with held(other) as handle:
            assert handle is None
        folder.write(process=to_builtins(other))
        assert status(folder).state == "lost"
        assert status(folder).launcher is None
        with pytest.raises(UsageError, match=r"is not running \(it is lost\)"):
            stop(folder, 1, kill=True)
    assert process.poll() is None


def test_runs_are_found_by_name_and_odd_folders_do_no_harm(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = played
    folder.write(state="finished", result={"steps": 7, "score": 0.5, "seconds": 2.0})
    (tmp_path / "runs/empty").mkdir()
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/run.json").write_text("{")
    row, broken = sorted(statuses(tmp_path / "runs"), key=lambda one: one.state)
    assert (broken.state, broken.alive) == ("not readable", False)
    assert (row.state, row.step, row.score, row.alive) == ("finished", 7, 0.5, False)
    (folder.path / "metrics.jsonl").write_text('{"step": 8, "score": 0.6, "seconds": 3.0}\n{"step": 9, "sc')
    assert (status(folder).step, status(folder).score) == (8, 0.6)
    monkeypatch.chdir(tmp_path)
    assert find_run(Path(folder.path.name)).path == find_run(Path("latest")).path == folder.path
    with pytest.raises(UsageError, match="there is no folder"):
        statuses(tmp_path / "nowhere")
