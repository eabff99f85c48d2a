"""What makes no sense is refused with a clear error, before anything is started or written."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cli_support import Offbeat, Said, in_process, points, write
from torch import Tensor, nn

import offbeat
from conftest import Cli
from offbeat.errors import OffbeatError, TaskError, UsageError
from offbeat.run.drive import fit
from offbeat.runtime.launch import Launcher
from offbeat.task import TaskReference, reference_to

DIGITS = "offbeat.tasks.digits"


@pytest.fixture
def run(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return functools.partial(in_process(launcher, tmp_path, monkeypatch, capsys), "run")


def refused(said: Said, *pieces: str) -> None:
    """A usage error: exit code 2, words on stderr and none of our frames, stdout empty, no run folder."""
    assert said.code == 2, said.err
    for piece in pieces:
        assert piece in said.err
    assert said.out == ""
    assert "offbeat/cli" not in said.err
    assert "offbeat/run/drive" not in said.err
    assert not Path("runs").exists()


# --- options


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ("--workers 0", ["--workers 0 makes no sense", "1 or more"]),
        ("--workers -2", ["--workers -2 makes no sense"]),
        ("--workers two", ["Invalid value for '--workers'", "valid integer"]),
        ("--workers 1.5", ["Invalid value for '--workers'", "valid integer"]),
        ("--threads 0", ["--threads 0 makes no sense"]),
        ("--epochs 0", ["--epochs 0 makes no sense"]),
        ("--steps -1", ["--steps -1 makes no sense"]),
        ("--checkpoint-every 0", ["--checkpoint-every 0 makes no sense"]),
        ("--timeout -1", ["--timeout -1.0 makes no sense", "seconds above 0"]),
        ("--timeout nan", ["--timeout nan makes no sense"]),
        ("--seed x", ["Invalid value for '--seed'", "valid integer"]),
        ("--device nope", ["--device 'nope' is not a device", "cpu"]),
        ("--parts foo", ["'foo' is not a way to divide data", "dirichlet(0.3)"]),
        ("--parts dirichlet(0)", ["dirichlet(0.0) makes no sense", "above 0"]),
        ("--parts dirichlet(a)", ["is not a way to divide data"]),
        ("--target foo", ["--target 'foo' is not a target", "accuracy=0.97"]),
        ("--target accuracy=0.9", ["a task has one score", "score=NUMBER"]),
        ("--target nan", ["is not a target"]),
        ("--port 99999", ["--port 99999 makes no sense", "65535"]),
        ("--port -1", ["--port -1 makes no sense"]),
        ("--format yaml", ["--format", "'yaml' is not one of"]),
        ("--worker 2", ["No such option", "--workers"]),
    ],
)
def test_a_wrong_option_is_refused(run: Offbeat, options: str, pieces: list[str]) -> None:
    refused(run(DIGITS, *options.split(" ")), *pieces)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so cuda is not a mistake")
def test_a_gpu_that_is_not_there_is_refused(run: Offbeat) -> None:
    refused(run(DIGITS, "--device", "cuda"), "no CUDA", "--device cpu")


@pytest.mark.parametrize(
    ("strategy", "pieces"),
    [
        ("alreduce", ["Unknown strategy 'alreduce'", "Did you mean 'allreduce'?"]),
        ("allreduce(buket=3)", ["no argument 'buket'", "Did you mean 'bucket'?"]),
        ("accumulate(-1)", ["steps is -1, but at least 1"]),
        ("accumulate(2.5)", ["steps takes int, not 2.5"]),
        ("accumulate", ["accumulate", "steps"]),
        ("allreduce + ddp", ["cannot be added", "Keep one"]),
        ("__import__('os').system('x')", ["cannot stand in a strategy", "never quoted"]),
        ("'allreduce'", ["cannot stand in a strategy", "never quoted"]),
        ("allreduce(", ["The strategy cannot be read"]),
        ("", ["The strategy is empty"]),
        ("nowhere.py:Push", ["nowhere.py", "no file"]),
        ("accumulate({2,4})", ["a set means a sweep"]),
    ],
)
def test_what_is_no_strategy_is_refused(run: Offbeat, strategy: str, pieces: list[str]) -> None:
    refused(run(DIGITS, "--workers", "2", "--strategy", strategy), *pieces)


def test_single_with_two_workers_is_refused(run: Offbeat) -> None:
    refused(run(DIGITS, "-s", "single", "-w", "2"), "single is one worker, but 2 were asked for", "allreduce")


def test_accumulating_without_gradients_is_refused(run: Offbeat) -> None:
    refused(run("offbeat.tasks.mixture", "-s", "single + accumulate(2)"), "no gradients to accumulate", "single alone")


def test_a_port_that_is_taken_is_refused(run: Offbeat) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(run(DIGITS, "--port", str(port)), f"cannot listen on port {port}", "choose another port")


def test_tensorboard_that_is_not_installed_is_named_with_its_cure(
    run: Offbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    refused(run(DIGITS, "--tensorboard"), "pip install 'offbeat[tensorboard]'")


def test_nothing_to_run_is_said(run: Offbeat) -> None:
    refused(run("--workers", "2"), "give a script, a task, or --resume RUN")


# --- targets


@pytest.mark.parametrize(
    ("target", "pieces"),
    [
        ("nowhere.py", ["There is no file 'nowhere.py'", "Check the path"]),
        ("nowhere.py:Points", ["There is no file 'nowhere.py'"]),
        ("a/folder", ["is neither a Python file nor a module"]),
        ("folder", ["is neither a Python file nor a module"]),
        ("folder.py", ["There is no file 'folder.py'"]),
        (".", ["is neither a Python file nor a module"]),
        (".relative", ["not the name of a module"]),
        ("notes.txt", ["is neither a Python file nor a module"]),
        ("offbeat.tasks.digit", ["There is no module 'offbeat.tasks.digit'", "offbeat.tasks.digits"]),
        ("two words", ["not the name of a module"]),
        (":Points", ["is neither a Python file nor a module"]),
        ("points.py:Pints", ["'Pints' does not exist", "Did you mean 'Points'?"]),
        ("points.py:RANK", ["'RANK' is not a subclass of offbeat.Task", "Valid: Points"]),
        ("points.py:TensorDataset", ["is not a subclass of offbeat.Task"]),
    ],
)
def test_a_target_that_is_none_is_refused(run: Offbeat, tmp_path: Path, target: str, pieces: list[str]) -> None:
    points(tmp_path / "points.py")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "notes.txt").write_text("no Python")
    refused(run(target), *pieces)


def test_a_file_that_cannot_be_read_as_python_is_shown_where(run: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "broken.py", "import torch\n\nclass Points(:\n    pass\n")
    refused(run("broken.py:Points"), "cannot be imported: SyntaxError", 'broken.py", line 3', "class Points(:")


def test_a_module_that_raises_while_imported_shows_its_own_traceback(run: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "mine.py", "import math\n\ndef half():\n    return 1 / 0\n\nhalf()\n")
    refused(run("mine"), "mine cannot be imported: ZeroDivisionError", 'mine.py", line 6', "line 4, in half")
    refused(run("mine.py:Points"), "cannot be imported: ZeroDivisionError", "line 4, in half")


def test_a_module_that_misses_another_says_which(run: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "needy.py", "import no_such_package\n")
    refused(run("needy"), "needy cannot be imported: ModuleNotFoundError", "no_such_package")


def test_a_module_that_exits_while_imported_is_refused(run: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "quits.py", "import sys\nsys.exit(0)\n")
    refused(run("quits"), "quits cannot be imported: SystemExit", 'quits.py", line 2')


def test_a_module_without_a_task_is_refused(run: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "empty.py", "from offbeat.tasks.digits import Digits\n")
    refused(run("empty"), "empty defines no task", "derives from offbeat.Task", "`file.py`")


def test_a_module_with_two_tasks_lists_them(run: Offbeat, tmp_path: Path) -> None:
    points(tmp_path / "pair.py", after="class Other(Points):\n    pass\n")
    refused(run("pair"), "pair defines 2 tasks: Other, Points", "`pair:Other`")


def test_a_task_without_one_of_its_methods_is_told_which(run: Offbeat, tmp_path: Path) -> None:
    text = points(tmp_path / "part.py").read_text()
    (tmp_path / "part.py").write_text(text.replace("def score", "def scores").replace("def model", "def models"))
    refused(run("part"), "Points is not a complete task: it lacks model() and score()")
    refused(run("part.py:Points"), "Points is not a complete task: it lacks model() and score()")


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (["--speed", "3"], ["cannot be made with speed=3", "unexpected keyword argument 'speed'", "rate"]),
        (["--rate", "abc"], ["cannot be made with rate='abc'", "TypeError"]),
        (["--rate=-1"], ["rate", "-1"]),
        (["0.1"], ["'0.1' after `--` is not an argument", "`--name value`"]),
    ],
)
def test_wrong_arguments_of_a_task_are_refused(run: Offbeat, arguments: list[str], pieces: list[str]) -> None:
    refused(run(DIGITS, "--", *arguments), *pieces)


def test_a_task_whose_constructor_raises_shows_its_own_traceback(run: Offbeat, tmp_path: Path) -> None:
    points(tmp_path / "points.py", "def __init__(self, root: str):\n    self.root = open(root)\n")
    said = run("points.py:Points", "--", "--root", "nowhere")
    refused(said, "cannot be made with root='nowhere': FileNotFoundError", "self.root = open(root)")
    refused(run("points.py:Points"), "cannot be made with no arguments", "missing a required argument: 'root'")


# --- output


def test_a_folder_below_a_file_cannot_be_written(run: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = run(DIGITS, "--out", "file/runs", "--format", "json")
    assert (said.code, json.loads(said.out)["error"]["type"]) == (1, "OutputError")
    assert "file/runs cannot be written: Not a directory" in said.err
    assert "--out" in said.err
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_of_the_kernels_cannot_be_written(run: Offbeat) -> None:
    said = run(DIGITS, "--out", "/proc/offbeat")
    assert said.code == 1
    assert "/proc/offbeat cannot be written" in said.err


# --- Python


@dataclass(eq=False)
class Line(offbeat.Task):
    """Learn y = 2x, in the test's own file."""

    rate: float = 0.1
    epochs = 1

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self) -> offbeat.Data:
        x = torch.linspace(-1, 1, 64).unsqueeze(1)
        part = torch.utils.data.TensorDataset(x, 2 * x)
        return offbeat.Data(part, part, part)

    def optimizer(self, params: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.rate)  # pyright: ignore[reportArgumentType]

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def score(self, model: nn.Module, data: object) -> float:
        return 1.0


class Loose(Line):
    def __init__(self, *sizes: int, **options: float) -> None:
        super().__init__(rate=options.get("rate", 0.1))
        self.sizes = sizes


def test_a_task_of_the_tests_own_file_is_learned(launcher: Launcher, tmp_path: Path) -> None:
    result = fit(Line(0.2), workers=2, out=tmp_path, launcher=launcher)
    assert (result.steps, result.score, result.workers) == (1, 1.0, 2)


def test_a_task_inside_a_function_is_refused(tmp_path: Path, launcher: Launcher) -> None:
    class Inner(Line):
        pass

    with pytest.raises(TaskError, match=r"defined inside a function or class.*top level"):
        fit(Inner(), out=tmp_path / "runs", launcher=launcher)
    assert not (tmp_path / "runs").exists()


def test_arguments_that_are_not_plain_are_refused() -> None:
    with pytest.raises(TaskError, match=r"Line\(rate=Tensor…\).*never as a pickle"):
        reference_to(Line(torch.tensor(0.1)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TaskError, match="never as a pickle"):
        reference_to(Line(print))  # pyright: ignore[reportArgumentType]


def test_arguments_without_names_are_refused_and_free_ones_arrive() -> None:
    with pytest.raises(TaskError, match="'sizes' by position only"):
        reference_to(Loose(1, 2))
    reference = reference_to(Loose(rate=0.5))
    assert reference.arguments == {"rate": 0.5}
    made = TaskReference(reference.source, reference.name, reference.arguments).build()
    assert isinstance(made, Loose)
    assert made.rate == 0.5


@pytest.mark.parametrize("options", [{"workers": 2.5}, {"workers": "2"}, {"workers": True}, {"threads": 0}])
def test_wrong_numbers_are_refused_in_python_too(launcher: Launcher, tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="makes no sense"):
        fit(Line(), out=tmp_path / "runs", launcher=launcher, **options)
    assert not (tmp_path / "runs").exists()


def test_fit_wants_a_task_not_a_script(launcher: Launcher, tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "print('hello')")
    with pytest.raises(TaskError, match=r"is a script, not a task.*train\.py:Class"):
        fit(str(script), out=tmp_path / "runs", launcher=launcher)


@pytest.mark.slow
def test_a_file_that_starts_a_run_when_imported_is_told_of_the_guard(tmp_path: Path) -> None:
    program = points(tmp_path / "unguarded.py", after="offbeat.fit(Points(), workers=2, steps=1)")
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "UsageError" in done.stderr
    assert "must do so under `if __name__ == '__main__':`" in done.stderr


# --- as a real command


@pytest.mark.slow
def test_a_refused_command_prints_one_error_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    done = cli("run", DIGITS, "--strategy", "alreduce", "--format", "json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["error"]["type"], told["error"]["exit_code"]) == (2, "StrategyError", 2)
    assert done.stderr.startswith("error: Unknown strategy 'alreduce'. Did you mean 'allreduce'?")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_the_users_to_catch(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(OffbeatError):
        fit(Line(), "nope", out=tmp_path, launcher=launcher)
