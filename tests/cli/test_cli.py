"""The command line's surface, frozen: commands, options, exports, what a run prints and what it leaves behind."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main
from cli_support import Offbeat, in_process, points, write
from safetensors.torch import load_file

import offbeat
from conftest import Cli, clean_environment
from offbeat._version import __version__
from offbeat.cli.app import app
from offbeat.run.drive import Result
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal
from offbeat.strategies import available
from offbeat.tasks.digits import Digits

COMMANDS = [
    "run", "compare", "explain", "doctor", "watch", "strategies", "config", "draw", "reduce", "check", "ps", "stop",
    "logs", "scale", "batch-size", "bench", "federated", "keys",
]  # fmt: skip
BENCH_OPTIONS = {
    "--ranks", "-r", "--size", "--sizes", "--simulate", "--network", "--inside", "--host-count", "--per-host",
    "--ports", "--collective", "--call", "--peers", "--blocks", "--report", "-o", "--picture", "--format",
}  # fmt: skip
RUN_OPTIONS = {
    "--strategy", "-s", "--workers", "-w", "--target", "-t", "--epochs", "--steps", "--seed", "--device",
    "--backend", "--threads", "--hosts",
    "--parts", "--out", "-o", "--resume", "--checkpoint-every", "--timeout", "--port", "--tensorboard", "--disturb",
    "--replace", "--monitor", "--rate-factor", "--placement", "--data-servers",
    "--on", "--ship", "--sbatch", "--dry-run", "--delivery", "--delivery-bound",
    "--format",
}  # fmt: skip
COMPARE_OPTIONS = {
    "--strategy", "-s", "--workers", "-w", "--hosts", "--target", "-t", "--seeds", "--seed", "--tune", "--single",
    "--budget", "--epochs", "--steps", "--disturb", "--parts", "--device", "--threads", "--timeout", "--out", "-o",
    "--resume", "--format", "--report", "--data-servers", "--on",
}  # fmt: skip
EXPLAIN_OPTIONS = {
    "--picture",
    "--window",
    "--cut",
    "--export",
    "--as",
    "--pattern",
    "--delimiter",
    "--delivery",
    "--delay",
    "--possibly",
    "--definitely",
    "--execution",
    "--verify-checkpoint",
    "--format",
}
EXPORTS = [
    "BatchSize", "ClientDatasets", "Data", "Host", "Hosts", "IterativeTask", "League", "OffbeatError", "Result",
    "Scaling", "Strategy", "Task", "Team", "__version__", "accuracy", "batch_size", "compare", "fit", "init", "parse",
    "programmed_update", "scale",
]  # fmt: skip
RESULT = [
    "strategy",
    "workers",
    "task",
    "run",
    "seed",
    "steps",
    "epochs",
    "samples",
    "skipped",
    "score",
    "best_score",
    "test_score",
    "metrics",
    "target",
    "reached_target",
    "seconds_to_target",
    "seconds",
    "startup_seconds",
    "samples_per_second",
    "core_seconds",
    "bytes_sent",
    "bytes_measuring",
    "seconds_by_kind",
    "overlapped_seconds",
    "staleness",
    "disturbances",
    "choices",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "split",
    "gossip",
    "compression",
    "pays",
    "predicted",
    "waits",
    "refusals",
    "update",
    "servers",
    "input",
    "data_servers",
    "hosts",
    "died",
    "joined",
    "placement",
    "tensor",
    "federated",
    "sandblaster",
    "warnings",
    "first_batch",
    "error",
]  # fmt: skip
KINDS = ["input", "compute", "communicate", "wait", "evaluate", "other"]


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


# --- the surface


def options_of(*path: str) -> set[str]:
    found = typer.main.get_command(app)
    for name in path:
        found = found.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    shown = {name for option in found.params if not getattr(option, "hidden", False) for name in option.opts}
    return {name for name in shown if name.startswith("-")} - {"--config"}


def test_the_commands_and_their_options_are_these() -> None:
    assert list(typer.main.get_command(app).commands) == COMMANDS  # pyright: ignore[reportAttributeAccessIssue]
    assert options_of("run") == RUN_OPTIONS
    assert options_of("compare") == COMPARE_OPTIONS
    assert options_of("explain") == EXPLAIN_OPTIONS
    assert options_of("ps") == {"--all", "-a", "--format"}
    assert options_of("stop") == {"--kill", "--within", "--out", "-o"}
    assert options_of("logs") == {"--rank", "-r", "--server", "--follow", "-f", "--out", "-o"}
    assert options_of("doctor") == {"--format"}
    assert options_of("watch") == {"--port", "--open", "--export"}
    assert options_of("strategies") == options_of("config") == {"--format"}
    own = {"--collective", "--runs", "--seed"}
    assert options_of("check") == {"--workers", "-w", "--hosts", "--format"} | own
    world = {"--workers", "-w", "--network", "--inside", "--size", "--per-host", "--steps", "--step", "--stragglers"}
    assert options_of("draw") == world | {"--microbatches", "--collective", "--seed", "--picture", "-o", "--format"}
    assert list(typer.main.get_command(app).commands["bench"].commands) == ["collectives", "server"]  # pyright: ignore[reportAttributeAccessIssue]
    assert options_of("bench", "collectives") == BENCH_OPTIONS
    measuring = {"--workers", "-w", "--steps", "--seconds", "--threads", "--seed", "--out", "-o", "--format"}
    assert options_of("scale") == measuring | {"--strategy", "-s", "--weak", "--repeats"}
    assert options_of("batch-size") == measuring | {"--times", "--delta", "--per-example"}


def test_every_entry_of_a_goal_is_an_option_or_for_commands_that_measure() -> None:
    names = {"--" + field.name.replace("_", "-") for field in fields(Goal)}
    assert names - RUN_OPTIONS == {"--watch", "--check-finite", "--merge", "--gauge"}  # `watch` is --monitor.


def test_the_exports_are_these_and_all_can_be_had() -> None:
    assert offbeat.__all__ == EXPORTS
    assert all(getattr(offbeat, name) is not None for name in EXPORTS)
    assert set(EXPORTS) <= set(dir(offbeat))
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = offbeat.train  # pyright: ignore[reportAttributeAccessIssue]


def test_the_result_has_these_entries() -> None:
    assert [field.name for field in fields(Result)] == RESULT


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_teaches_by_example(offbeat_: Offbeat, command: str) -> None:
    said = offbeat_(command, "--help")
    assert said.code == 0
    assert "Example" in said.out
    assert f"offbeat {command}" in said.out.partition("Example")[2]


def test_the_front_page_says_how_to_start(offbeat_: Offbeat) -> None:
    said = offbeat_("--help")
    assert "offbeat run offbeat.tasks.digits --workers 2" in said.out
    assert "offbeat run train.py --workers 4 -- --its own --arguments" in said.out
    assert offbeat_("-h").out == said.out
    assert offbeat_().code == 2


def test_the_version_is_said(offbeat_: Offbeat) -> None:
    assert offbeat_("--version").out == f"offbeat {__version__}\n"


@pytest.mark.parametrize(
    "code",
    [
        "import offbeat",
        "sys.argv = ['offbeat', '--help']; from offbeat.cli import main; main()",
        "sys.argv = ['offbeat', 'run', '--help']; from offbeat.cli import main; main()",
        "sys.argv = ['offbeat', '--version']; from offbeat.cli import main; main()",
        "sys.argv = ['offbeat', 'bench', 'collectives', '--help']; from offbeat.cli import main; main()",
    ],
)
def test_what_needs_no_torch_does_not_wait_for_it(code: str) -> None:
    program = f"import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


def test_an_unknown_command_proposes_the_nearest(offbeat_: Offbeat) -> None:
    said = offbeat_("runn")
    assert (said.code, said.out) == (2, "")
    assert "No such command 'runn'" in said.err
    assert "'run'" in said.err


def test_an_option_of_the_scripts_own_is_told_its_place(offbeat_: Offbeat) -> None:
    said = offbeat_("run", "train.py", "--lr", "0.1")
    assert said.code == 2
    assert "A script's own arguments go after `--`" in said.err


# --- strategies and doctor


def test_the_strategies_are_listed(offbeat_: Offbeat) -> None:
    said = offbeat_("strategies")
    assert (said.code, said.err) == (0, "")
    for piece in ("single", "ddp", "allreduce", "accumulate", "sequential = single", "deterministic"):
        assert piece in " ".join(said.out.split())
    listed = json.loads(offbeat_("strategies", "--format", "json").out)
    assert [entry["name"] for entry in listed] == list(available())


def test_one_strategy_is_explained(offbeat_: Offbeat) -> None:
    said = offbeat_("strategies", "allreduce")
    assert said.code == 0
    for piece in ("bucket: float = 25.0", "MiB of gradients", "promises: synchronous", "examples:"):
        assert piece in said.out
    explained = json.loads(offbeat_("strategies", "allreduce", "--format", "json").out)
    assert explained["fields"][0]["name"] == "algorithm"
    assert explained["traits"]["exact"] is True
    wrong = offbeat_("strategies", "alreduce")
    assert (wrong.code, wrong.out) == (2, "")
    assert "Did you mean 'allreduce'?" in wrong.err


@pytest.mark.slow
def test_the_doctor_finds_this_machine_well(cli: Cli) -> None:
    done = cli("doctor", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["self_test"]["ok"] is True
    assert found["offbeat"] == __version__
    assert found["packages"]["torch"]
    assert {
        "cores",
        "limits",
        "memory_gib",
        "shared_memory_gib",
        "compiled_executor",
        "compiled_calls",
        "compiled_messages",
        "backends",
    } <= set(found)


# --- what a run prints


def test_the_json_of_a_run_is_its_result_and_nothing_else(offbeat_: Offbeat, tmp_path: Path) -> None:
    points(tmp_path / "mine.py")
    said = offbeat_("run", "mine.py:Points", "-w", "2", "--target", "-100", "--format", "json", "--", "--rate=0.2")
    assert (said.code, said.err) == (0, "")
    result = json.loads(said.out)
    assert list(result) == RESULT
    assert list(result["seconds_by_kind"]) == KINDS
    assert sum(result["seconds_by_kind"].values()) == pytest.approx(result["seconds"])
    assert (result["workers"], result["strategy"], result["seed"], result["reached_target"]) == (
        2,
        "allreduce",
        0,
        True,
    )
    assert result["seconds_to_target"] <= result["seconds"]
    assert json.loads((tmp_path / result["run"] / "run.json").read_text())["result"] == result


def test_a_run_shows_plain_lines_where_there_is_no_terminal(offbeat_: Offbeat, tmp_path: Path) -> None:
    points(tmp_path / "mine.py")
    said = offbeat_("run", "mine.py:Points", "-w", "2")
    assert "mine.py:Points on 2 workers, allreduce (logs in runs/" in said.err
    assert "step 4  epoch 1  loss" in said.err
    assert "\x1b" not in said.err + said.out
    for piece in ("Done: score", "on test data", "8 steps, 2 epochs, 32 examples", "everything is in", "Try next:"):
        assert piece in said.out


def test_what_a_script_prints_is_passed_on(offbeat_: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import os, sys\nprint('I am', os.environ['RANK'], *sys.argv[1:])\n")
    said = offbeat_("run", "train.py", "-w", "2", "--", "--lr", "0.1")
    assert said.code == 0, said.err
    assert "I am 0 --lr 0.1\n" in said.out
    assert "I am 1" not in said.out
    assert "It never called offbeat.init()" in said.out
    assert (tmp_path / "runs/latest/logs/worker-1.log").read_text() == "I am 1 --lr 0.1\n"
    quiet = offbeat_("run", "train.py", "--format", "json")
    assert json.loads(quiet.out)["steps"] == 0
    assert "I am 0" in quiet.err


def test_options_that_a_script_without_a_team_cannot_heed_are_named(offbeat_: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import torch\n")
    said = offbeat_("run", "train.py", "-w", "2", "--strategy", "gossip", "--steps", "3", "--format", "json")
    assert said.code == 0, said.err
    assert "warning: --strategy, --steps had no effect: only a script that calls offbeat.init() heeds them" in said.err
    assert "no effect" not in offbeat_("run", "train.py", "-w", "2", "--seed", "1", "--backend", "offbeat").err


def test_square_brackets_in_a_path_are_shown(offbeat_: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "[bold]").mkdir()
    points(tmp_path / "[bold]" / "mine.py")
    said = offbeat_("run", "[bold]/mine.py:Points", "--out", "[red]", "--steps", "1")
    assert said.code == 0, said.err
    assert "/[bold]/mine.py:Points on 1 worker" in said.err
    assert "[red]/2" in said.out


@pytest.mark.slow
def test_a_terminal_gets_a_live_panel(tmp_path: Path) -> None:
    points(tmp_path / "mine.py", "def disturbed(self, loss):\n    time.sleep(0.02)\n    return loss\n")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "offbeat", "run", "mine.py:Points", "-w", "2", "--epochs", "8"]
    environment = clean_environment() | {"TERM": "xterm-256color"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 65536):
                shown += block
        except OSError:
            pass  # How Linux says that the other side has closed its terminal.
        os.close(ours)
        assert process.wait(30) == 0, shown.decode()
    text = shown.decode()
    assert "examples/s" in text
    assert "compute" in text
    assert "█" in text
    assert "\x1b[" in text
    assert "Done" in text


# --- what a run leaves


def test_a_run_leaves_its_records(offbeat_: Offbeat, tmp_path: Path) -> None:
    assert offbeat_("run", "offbeat.tasks.digits", "-w", "2", "--epochs", "2", "--", "--rate", "0.02").code == 0
    run = (tmp_path / "runs" / "latest").resolve()
    assert (tmp_path / "runs/latest").readlink() == Path(run.name)
    assert run.name.endswith("-offbeat.tasks.digits-allreduce")
    assert {entry.name for entry in run.iterdir()} == {
        "run.json", "metrics.jsonl", "logs", "checkpoint", "model.safetensors",
    }  # fmt: skip
    record = json.loads((run / "run.json").read_text())
    assert set(record) == {"config", "environment", "state", "process", "result"}
    assert record["state"] == "finished"
    assert record["config"]["workers"] == 2
    assert record["config"]["what"]["task"]["arguments"] == {"rate": 0.02}
    assert {field.name for field in fields(Goal)} == set(record["config"]["goal"])
    assert {"offbeat", "python", "torch", "cores", "command", "started"} <= set(record["environment"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["epoch"]) for line in lines] == [(19, 1), (38, 2)]
    assert all({"samples", "seconds", "seconds_by_kind", "loss", "score"} <= set(line) for line in lines)
    Digits().model().load_state_dict(load_file(run / "model.safetensors"))
    assert sorted(log.name for log in (run / "logs").iterdir()) == ["worker-0.log", "worker-1.log"]
    assert [entry.name for entry in (run / "checkpoint").iterdir()] == ["step-000000038"]


def test_tensorboard_files_are_written_when_asked_for(offbeat_: Offbeat, tmp_path: Path) -> None:
    points(tmp_path / "mine.py")
    said = offbeat_("run", "mine.py:Points", "--tensorboard")
    assert said.code == 0, said.err
    events = list((tmp_path / "runs/latest/tensorboard").glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert b"score" in events[0].read_bytes()
