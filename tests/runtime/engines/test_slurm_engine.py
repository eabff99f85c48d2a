"""Runs in allocations of a real Slurm: two nodes on this machine, with daemons of the test's own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paths
import pytest
from engine_support import agents, need
from slurm_cluster import COMMANDS, SlurmCluster, slurm_cluster

from conftest import wait_until
from offbeat.errors import UsageError
from offbeat.runtime.engines.slurm import batch_script, cores_of

ENVIRONMENT = {"PYTHONPATH": str(paths.ROOT / "src"), "OMP_NUM_THREADS": "1"}
OFFBEAT = (sys.executable, "-m", "offbeat")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    need("slurm-wlm", "munge", commands=COMMANDS)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        cluster.environment |= ENVIRONMENT
        yield cluster


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    wait_until(lambda: not agents(), "every agent to end", 15)


@pytest.mark.slow
def test_a_submitted_run_trains_on_every_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    words = [*OFFBEAT, "run", "offbeat.tasks.digits", "--on", "slurm", "--workers", "2", "--strategy", "allreduce"]
    words += ["--steps", "10", "--out", "runs", "--sbatch", "--nodes=2 --exclusive"]
    done = subprocess.run(
        words, env=slurm.environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Slurm has the run as job" in done.stdout, done.stderr
    wait_until(lambda: not slurm.ask("squeue", "--noheader").strip(), "the job to end")
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    known = json.loads((folder / "run.json").read_text())
    assert known["state"] == "finished", next(tmp_path.glob("offbeat-*.out")).read_text()
    assert [(host["kind"], host["workers"]) for host in known["result"]["hosts"]] == [("slurm", [0]), ("slurm", [1])]
    assert (folder / "logs" / "worker-1.log").is_file()


@pytest.mark.slow
def test_a_cancelled_step_ends_the_run_and_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    words = ["salloc", "--nodes=2", "--exclusive", *OFFBEAT, "run", "offbeat.tasks.digits", "--on", "slurm"]
    words += ["--strategy", "allreduce", "--epochs", "500", "--out", str(tmp_path / "runs")]
    with (tmp_path / "said").open("wb") as said:
        run = subprocess.Popen(words, env=slurm.environment, stdout=said, stderr=said)
        try:
            wait_until(lambda: any((tmp_path / "runs").glob("*/metrics.jsonl")), "the first report")
            steps = slurm.ask("squeue", "--noheader", "--steps", "--format=%i %N").split("\n")
            (step,) = (line.split()[0] for line in steps if line.split()[1:] == ["n2"])
            slurm.ask("scancel", step)
            assert run.wait(60) == 1
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait(10)
    assert "machine slurm-1 was lost, and with it worker 1" in (tmp_path / "said").read_text()


def test_the_script_of_a_job_runs_the_command_in_its_allocation() -> None:
    script = batch_script(["python", "-m", "offbeat", "run", "my task.py", "--on", "slurm"], 4, "--time=10")
    assert script.splitlines()[:5] == [
        "#!/bin/bash", "#SBATCH --job-name=offbeat", "#SBATCH --output=offbeat-%j.out", "#SBATCH --nodes=4",
        "#SBATCH --time=10",
    ]  # fmt: skip
    assert script.endswith("exec python -m offbeat run 'my task.py' --on slurm\n")
    assert "--nodes=4" not in batch_script(["x"], 4, "--nodes=2")


def test_options_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match="'rm' is not an option"):
        batch_script(["x"], 1, "--time=1 rm -rf")


@pytest.mark.parametrize(
    ("text", "nodes", "cores"), [("4(x2),3", 3, [4, 4, 3]), ("8", 1, [8]), ("", 2, [1, 1]), ("2", 3, [2, 1, 1])]
)
def test_cores_of_nodes_are_read_from_slurms_list(text: str, nodes: int, cores: list[int]) -> None:
    assert cores_of(text, nodes) == cores
