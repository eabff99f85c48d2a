"""Runs that cannot go on say who failed and why, end within seconds, and keep what was learned."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import Offbeat, Said, in_process, points, write

from conftest import Cli, clean_environment, wait_until
from offbeat.errors import CheckpointError, WorkerError
from offbeat.run.drive import Result, fit
from offbeat.runtime.launch import Launcher
from offbeat.runtime.state.checkpoint import newest, newest_step

TWO = ("--workers", "2")


@pytest.fixture
def offbeat(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


def failed(said: Said, *pieces: str, code: int = 1) -> None:
    """A run that was started and failed: its exit code, words on stderr, and run.json says so."""
    assert said.code == code, said.err
    for piece in pieces:
        assert piece in said.err
    assert state() == "failed"


def state(run: str = "runs/latest") -> str:
    return json.loads((Path(run) / "run.json").read_text())["state"]


def processes_of(folder: Path) -> list[int]:
    """Processes that work in a folder or below it, zombies aside."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


# --- people's own code raises


AT_THIRD = "def disturbed(self, loss):\n    if RANK == 1 and self.seen == 3:\n        {}\n    return loss\n"
NET = "def model(self):\n    class Net(torch.nn.Linear):\n        def forward(self, x):\n            return x @ self\n"


@pytest.mark.parametrize(
    ("more", "pieces"),
    [
        (
            AT_THIRD.format("raise KeyError('no such word')"),
            ["worker 1 failed with KeyError: 'no such word'", "In worker 1:", "raise KeyError('no such word')"],
        ),
        (
            "def data(self):\n    return open('nowhere.csv')\n",
            ["failed with FileNotFoundError", "nowhere.csv", "in data", "return open('nowhere.csv')"],
        ),
        (NET + "    return Net(1, 1)\n", ["failed with TypeError", "in forward", "return x @ self"]),
        (
            "def score(self, model, data):\n    return {}['accuracy']\n",
            ["failed with KeyError: 'accuracy'", "in score"],
        ),
    ],
    ids=["loss on worker 1", "data", "model", "score"],
)
def test_an_exception_is_told_with_its_worker_and_its_traceback(
    offbeat: Offbeat, tmp_path: Path, more: str, pieces: list[str]
) -> None:
    points(tmp_path / "mine.py", more)
    start = time.monotonic()
    said = offbeat("run", "mine.py:Points", *TWO, "--format", "json")
    assert time.monotonic() - start < 120, "somebody has waited for a deadline"
    failed(said, *pieces, 'mine.py", line')
    told = json.loads(said.out)
    assert (told["workers"], told["error"]["type"], told["error"]["exit_code"]) == (2, "WorkerError", 1)
    assert pieces[0] in told["error"]["message"]
    assert (told["error"]["role"], Path(told["run"]).is_dir()) == ("worker", True)
    assert re.search(r"worker-\d\.log", said.err)


@pytest.mark.parametrize(
    ("more", "piece"),
    [
        ("def data(self):\n    return 1, 2, 3\n", "Points.data() is a tuple. Return offbeat.Data"),
        ("def disturbed(self, loss):\n    return loss.expand(3)\n", "the loss is a tensor of shape (3,)"),
        ("def disturbed(self, loss):\n    return loss.item()\n", "the loss is a float, not a tensor of one number"),
        ("global_batch = 0\n", "global_batch is 0, but"),
        ("def __init__(self):\n    self.examples = 0\n", "the training data is empty"),
        ("def __init__(self):\n    self.examples = 3\n", "3 training examples, fewer than one global batch of 4"),
        ("global_batch = 1\ndef __init__(self):\n    self.examples = 1\n", "1 training examples for 2 workers"),
    ],
)
def test_what_only_the_data_shows_is_refused_as_usage(offbeat: Offbeat, tmp_path: Path, more: str, piece: str) -> None:
    points(tmp_path / "mine.py", more)
    said = offbeat("run", "mine.py:Points", *TWO)
    failed(said, piece, code=2)
    assert "Traceback" not in said.err


def test_a_worker_killed_by_the_system_is_named(offbeat: Offbeat, tmp_path: Path) -> None:
    points(tmp_path / "mine.py", AT_THIRD.format("os.kill(os.getpid(), 9)"))
    failed(offbeat("run", "mine.py:Points", *TWO), "worker 1 was ended by SIGKILL", "out of memory?", code=137)


def test_the_others_are_ended_within_two_seconds(launcher: Launcher, tmp_path: Path) -> None:
    more = """
        def disturbed(self, loss):
            if RANK == 1 and self.seen == 2:
                open("raised", "w").write(str(time.time()))
                raise ValueError("enough")
            if RANK == 0 and self.seen == 2:
                time.sleep(60)
            return loss
    """
    task = points(tmp_path / "mine.py", more.replace('"raised"', repr(str(tmp_path / "raised"))))
    with pytest.raises(WorkerError) as caught:
        fit(f"{task}:Points", workers=2, out=tmp_path, launcher=launcher)
    assert time.time() - float((tmp_path / "raised").read_text()) < 4
    assert (caught.value.role, caught.value.rank) == ("worker", 1)
    assert "ValueError: enough" in caught.value.remote_traceback


# --- losses that are not finite


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_is_placed_and_the_run_can_go_on(
    offbeat: Offbeat, tmp_path: Path, value: str
) -> None:
    more = f"""
        def disturbed(self, loss):
            bad = RANK == 1 and self.seen == 6 and not os.path.exists("mended")
            return loss * float("{value}") if bad else loss
    """
    points(tmp_path / "mine.py", more)
    said = offbeat("run", "mine.py:Points", *TWO, "--checkpoint-every", "2")
    failed(said, f"worker 1 has a loss of {value} in step 6", "lower learning rate")
    resume = re.search(r"Resume with: offbeat (run --resume \S+)", said.err)
    assert resume is not None
    assert "step-000000004" in said.err
    (tmp_path / "mended").touch()
    again = offbeat(*resume[1].split())
    assert again.code == 0, again.err
    assert (state(), newest(Path("runs/latest/checkpoint")).name) == ("finished", "step-000000008")  # pyright: ignore[reportOptionalMemberAccess]


# --- scripts


@pytest.mark.parametrize(
    ("end", "code", "piece"),
    [
        ("sys.exit(3)", 3, "ended with exit code 3"),
        ("os._exit(7)", 7, "ended with exit code 7"),
        ("sys.exit('no disk')", 1, "no disk"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "was ended by SIGTERM (ended from outside)"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "was ended by SIGINT (interrupted from outside)"),
    ],
)
def test_a_run_ends_with_the_code_that_its_script_ends_with(
    offbeat: Offbeat, tmp_path: Path, end: str, code: int, piece: str
) -> None:
    write(tmp_path / "train.py", f"import os, signal, sys\nprint('giving up', flush=True)\n{end}\n")
    failed(offbeat("run", "train.py", *TWO), piece, "giving up", code=code)


def test_a_script_that_exits_well_keeps_its_result(offbeat: Offbeat, tmp_path: Path) -> None:
    script = """
        import sys, torch, offbeat
        team = offbeat.init()
        model = torch.nn.Linear(1, 1)
        model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        team.report(loss=0.5)
        sys.exit(0)
    """
    write(tmp_path / "train.py", script)
    said = offbeat("run", "train.py", *TWO, "--format", "json")
    assert said.code == 0, said.err
    assert {name: json.loads(said.out)[name] for name in ("steps", "metrics")} == {"steps": 1, "metrics": {"loss": 0.5}}


def test_a_script_whose_worker_raises_shows_that_workers_traceback(offbeat: Offbeat, tmp_path: Path) -> None:
    script = "import os, time\nif os.environ['RANK'] == '1':\n    raise OSError('no such disk')\ntime.sleep(60)\n"
    write(tmp_path / "train.py", script)
    said = offbeat("run", "train.py", *TWO, "--format", "json")
    failed(said, "worker 1 failed with OSError: no such disk", 'train.py", line 3', "raise OSError")
    error = json.loads(said.out)["error"]
    assert (error["role"], error["rank"], "raise OSError" in error["traceback"]) == ("worker", 1, True)


def test_a_script_that_is_no_python_shows_its_line(offbeat: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "train.py", "x = 1\nprint(x\n")
    failed(offbeat("run", "train.py"), "SyntaxError", 'train.py", line 2', "print(x")


def test_a_script_that_starts_a_run_itself_is_told_how_to(offbeat: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import offbeat\noffbeat.fit('offbeat.tasks.digits')\n")
    failed(offbeat("run", "train.py"), "start it with `python file.py`, not with `offbeat run`", code=2)


# --- resuming what cannot be resumed


@pytest.fixture(scope="module")
def finished(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A finished run of a task on two workers; tests spoil copies of it."""
    folder = tmp_path_factory.mktemp("finished")
    task = f"{points(folder / 'mine.py')}:Points"
    return fit(task, workers=2, steps=4, checkpoint_every=2, out=folder / "runs", launcher=launcher)


@pytest.fixture
def run(finished: Result, tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "latest").symlink_to(finished.run.name)
    return Path(shutil.copytree(finished.run, tmp_path / "runs" / finished.run.name))


def unresumable(said: Said, run: Path, *pieces: str) -> None:
    assert (said.code, said.out) == (1, ""), said.err
    for piece in pieces:
        assert piece in said.err
    assert newest(run / "checkpoint") is not None


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        ("offbeat.tasks.digits", ["is a run of", "mine.py:Points, not of offbeat.tasks.digits"]),
        ("TASK -- --rate 0.2", ["is a run of", "{'rate': 0.2}"]),
        ("--strategy ddp", ["was run with strategy allreduce, not ddp"]),
        ("--seed 7", ["was run with seed 0, not 7"]),
        ("--parts dirichlet(0.5)", ["was run with parts iid, not dirichlet(0.5)"]),
        ("--workers 3", ["was run with 2 workers, not 3. Resume with as many"]),
        ("--workers 1", ["was run with 2 workers, not 1. Resume with as many"]),
    ],
)
def test_a_run_cannot_go_on_differently(
    offbeat: Offbeat, finished: Result, run: Path, words: str, pieces: list[str]
) -> None:
    before = (run / "run.json").read_text()
    changes = words.replace("TASK", finished.task).split()
    unresumable(offbeat("run", "--resume", run, "--steps", "6", *changes), run, *pieces)
    assert (run / "run.json").read_text() == before


def test_a_run_goes_on_with_as_many_workers_as_before(offbeat: Offbeat, run: Path) -> None:
    said = offbeat("run", "--resume", run, "--steps", "6", "--format", "json")
    assert said.code == 0, said.err
    result = json.loads(said.out)
    assert (result["workers"], result["steps"], result["run"]) == (2, 6, str(run))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "manifest", "missing"])
def test_a_damaged_checkpoint_is_named(offbeat: Offbeat, run: Path, damage: str) -> None:
    kept = newest(run / "checkpoint")
    assert kept is not None
    file = kept / "shared.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
    elif damage == "flipped":
        content = bytearray(file.read_bytes())
        content[-3] ^= 0x10
        file.write_bytes(content)
    elif damage == "manifest":
        (kept / "manifest.json").write_text('{"format": 1, ')
    else:
        file.unlink()
    name = "its manifest cannot be read" if damage == "manifest" else "shared.safetensors"
    unresumable(offbeat("run", "--resume", run, "--steps", "6"), run, f"{kept.name} is damaged", name)
    assert json.loads((run / "run.json").read_text())["result"]["steps"] == 4


def test_a_run_without_a_checkpoint_cannot_be_resumed(offbeat: Offbeat, run: Path) -> None:
    shutil.rmtree(run / "checkpoint")
    said = offbeat("run", "--resume", run, "--steps", "6")
    assert said.code == 1
    assert "has no checkpoint, so there is nothing to resume from" in said.err
    assert state() == "finished"


@pytest.mark.parametrize("content", [None, "{}", "not json", '{"config": {}}'])
def test_a_folder_that_is_no_run_cannot_be_resumed(offbeat: Offbeat, tmp_path: Path, content: str | None) -> None:
    (tmp_path / "other").mkdir()
    if content is not None:
        (tmp_path / "other" / "run.json").write_text(content)
    said = offbeat("run", "--resume", "other")
    assert (said.code, said.out) == (1, "")
    expected = {None: "is not a run folder: it has no run.json", "not json": "cannot be read"}
    assert expected.get(content, "does not say what was run") in said.err
    assert "Traceback" not in said.err


def test_python_resumes_with_as_many_workers_as_before(finished: Result, run: Path, launcher: Launcher) -> None:
    task = finished.task
    assert fit(task, resume=run, steps=6, launcher=launcher).workers == 2
    with pytest.raises(CheckpointError, match="was run with 2 workers, not 3"):
        fit(task, resume=run, steps=8, workers=3, launcher=launcher)


# --- a disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "offbeat-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


WIDE = """
    width = 20_000

    def __init__(self):
        self.examples, self.rate, self.seen = 16, 1e-6, 0

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(1, self.width), torch.nn.Linear(self.width, 1))

    def disturbed(self, loss):
        if self.seen == 6 and os.environ["RANK"] == "0":
            room = os.statvfs(DISK)
            open(DISK + "/filler", "wb").write(b"x" * (room.f_bavail * room.f_bsize - 8192))
        return loss
"""


def test_a_full_disk_ends_the_run_and_keeps_the_checkpoint(offbeat: Offbeat, tmp_path: Path, small_disk: Path) -> None:
    points(tmp_path / "mine.py", WIDE.replace("DISK", repr(str(small_disk))))
    said = offbeat("run", "mine.py:Points", *TWO, "--out", small_disk, "--checkpoint-every", "4", "--epochs", "4")
    assert (said.code, said.out) == (1, ""), said.err
    assert "a checkpoint could not be written" in said.err
    assert "No space left on device" in said.err
    run = (small_disk / "latest").resolve()
    kept = newest(run / "checkpoint")
    assert kept is not None
    assert kept.name == "step-000000004"
    assert not list((run / "checkpoint").glob(".draft*"))
    assert "The last checkpoint is complete (step-000000004)" in said.err
    (small_disk / "filler").unlink()
    points(tmp_path / "mine.py", WIDE.replace("DISK", repr(str(tmp_path))).replace("== 6", "== 600"))
    again = offbeat("run", "--resume", run, "--epochs", "2")
    assert again.code == 0, again.err


def test_a_disk_that_is_full_from_the_start_is_an_output_error(
    offbeat: Offbeat, tmp_path: Path, small_disk: Path
) -> None:
    points(tmp_path / "mine.py")
    room = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (room.f_bavail * room.f_bsize))
    said = offbeat("run", "mine.py:Points", *TWO, "--out", small_disk)
    assert (said.code, said.out) == (1, "")
    assert "cannot be written: No space left on device" in said.err
    assert "--out" in said.err


# --- interrupts, as real commands


ENDLESS = "def disturbed(self, loss):\n    time.sleep(0.02)\n    return loss\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_ends_everything_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    points(tmp_path / "mine.py", ENDLESS)
    words = ["run", "mine.py:Points", *TWO, "--epochs", "100000", "--checkpoint-every", "2", "--format", "json"]
    with subprocess.Popen(
        [sys.executable, "-m", "offbeat", *words],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # By then the launcher has heard of the first steps, too: a worker tells of them every 0.1 s.
        wait_until(lambda: newest_step(tmp_path / "runs/latest/checkpoint") >= 200, "a hundred checkpoints")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    told = json.loads(out)
    assert (told["error"]["type"], told["error"]["exit_code"]) == ("KeyboardInterrupt", 130)
    assert (told["steps"] >= 2, set(told["seconds_by_kind"]) >= {"compute"}) == (True, True)
    assert "error: interrupted; all processes were ended." in err
    assert "Resume with: python -m offbeat run --resume runs/" in err
    assert "Traceback" not in err
    assert state(str(tmp_path / "runs/latest")) == "interrupted"
    wait_until(lambda: not processes_of(tmp_path), "the end of all processes", 10)


@pytest.mark.slow
def test_a_failed_command_leaves_no_process(cli: Cli, tmp_path: Path) -> None:
    points(tmp_path / "mine.py", "def disturbed(self, loss):\n    raise ValueError('enough')\n")
    done = cli("run", "mine.py:Points", *TWO, "--format", "json")
    assert (done.returncode, json.loads(done.stdout)["error"]["exit_code"]) == (1, 1)
    assert "ValueError: enough" in done.stderr
    wait_until(lambda: not processes_of(tmp_path), "the end of all processes", 10)
