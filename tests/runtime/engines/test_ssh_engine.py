"""Runs on machines behind ssh: an sshd in each of two namespaces, real keys, real deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import paths
import pytest
from engine_support import At, need
from ssh_machines import SshMachines, command_of, ssh_machines

import offbeat
from conftest import wait_until
from offbeat.errors import MachineLostError
from offbeat.monitor import recorded
from offbeat.runtime.agents.agent import sweep
from offbeat.runtime.events.machines import machines_of
from offbeat.runtime.events.recorder import Mark
from offbeat.runtime.hosts import why_not
from offbeat.runtime.run.folder import MODEL_FILE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshMachines]:
    need("openssh-server", "openssh-client", commands=("sshd", "ssh", "ssh-keygen"))
    if (reason := why_not()) is not None:
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    with ssh_machines(tmp_path_factory.mktemp("ssh")) as there:
        yield there


@pytest.fixture(autouse=True)
def nothing_left(machines: SshMachines) -> Iterator[None]:
    yield
    wait_until(lambda: not machines.agents(), "every process on the machines to end", 15)
    # An agent that was killed cannot remove its folder; the next one on that machine does.
    sweep(Path(tempfile.gettempdir()))


def test_a_run_over_ssh_is_complete_at_home_and_resumes(machines: SshMachines, tmp_path: Path) -> None:
    with machines.placed.inside():
        result = offbeat.fit(
            "offbeat.tasks.digits", hosts=machines.with_workers(1, 1), steps=20, out=tmp_path / "runs", timeout=60
        )
        folder = Path(result.run)
        assert result.steps == 20
        assert [(host["name"], host["workers"]) for host in result.hosts] == [("a", [0]), ("b", [1])]
        for name in ("logs/worker-0.log", "logs/worker-1.log", "metrics.jsonl", MODEL_FILE):
            assert (folder / name).is_file(), name
        (checkpoint,) = (folder / "checkpoint").iterdir()
        kept = {file.name for file in checkpoint.iterdir()}
        assert kept == {"manifest.json", "shared.safetensors", "worker-0.safetensors", "worker-1.safetensors"}
        longer = offbeat.fit(
            "offbeat.tasks.digits", workers=2, steps=30, out=tmp_path / "runs", resume=folder, timeout=60
        )
    assert longer.steps == 30
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == 30


def test_a_monitored_run_is_judged_by_events_that_machines_send(machines: SshMachines, tmp_path: Path) -> None:
    with machines.placed.inside():
        result = offbeat.fit(
            "offbeat.tasks.digits", hosts=machines.with_workers(1, 1), steps=20, target=2.0, out=tmp_path / "runs",
            timeout=60, watch=True,
        )  # fmt: skip
    known = {machine.name: machine for machine in machines_of(Path(result.run))}
    assert {name: machine.processes for name, machine in known.items()} == {"a": ("worker 0",), "b": ("worker 1",)}
    assert all(machine.received > 20 and not machine.lost for machine in known.values())
    for own in recorded(Path(result.run)).stamps.values():
        assert [stamp.sequence for stamp in own if stamp.mark is Mark.STEP] == list(range(1, 21))
        assert own[-1].mark is Mark.END


def test_a_machine_that_dies_ends_the_run_and_is_named(machines: SshMachines, tmp_path: Path) -> None:
    def kill_agent() -> None:
        network = machines.placed.hosts[1].network
        for pid in machines.agents():
            with suppress(OSError):  # One of this moment may be gone in the next.
                space = Path(f"/proc/{pid}/ns/net").stat().st_ino
                if b"offbeat.runtime.agents.agent" in command_of(pid) and space == Path(str(network)).stat().st_ino:
                    os.kill(pid, signal.SIGKILL)

    with machines.placed.inside(), pytest.raises(MachineLostError, match="machine b was lost, and with it worker 1"):
        offbeat.fit(
            "offbeat.tasks.digits", hosts=machines.with_workers(1, 1), epochs=500, out=tmp_path / "runs",
            timeout=60, watcher=At(kill_agent),
        )  # fmt: skip
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    known = json.loads((folder / "run.json").read_text())
    assert (known["state"], "machine b" in str(known["result"]["error"])) == ("failed", True)


def test_servers_with_copies_go_on_when_a_machine_is_cut_off(machines: SshMachines, tmp_path: Path) -> None:
    link = machines.placed.hosts[1]
    words = ("ip", "-n", Path(str(link.network)).name, "link", "set", link.interface)
    try:
        with machines.placed.inside():
            result = offbeat.fit(
                "offbeat.tasks.digits", "server(replicas=1, consistency=ssp(3))", hosts=machines.with_workers(1, 1),
                epochs=60, out=tmp_path / "runs", timeout=60,
                watcher=At(lambda: subprocess.run([*words, "down"], check=True, timeout=10)),
            )  # fmt: skip
    finally:
        subprocess.run([*words, "up"], check=True, timeout=10)
    assert result.reached_target
    assert {"worker 1", "server 0.1"} <= set(result.died)
    assert "server 0.2" in result.joined or not result.joined


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_ends_leaves_nothing_on_machines(
    machines: SshMachines, tmp_path: Path, number: signal.Signals
) -> None:
    hosts = machines.write(machines.with_workers(1, 1))
    command = ["ip", "netns", "exec", machines.network, sys.executable, "-m", "offbeat", "run", "offbeat.tasks.digits"]
    command += ["--on", str(hosts), "--epochs", "500", "--out", str(tmp_path / "runs")]
    with (tmp_path / "said").open("wb") as said:
        run = subprocess.Popen(
            command, stdout=said, stderr=said, env={**os.environ, "PYTHONPATH": str(paths.ROOT / "src")}
        )
        try:
            wait_until(lambda: any((tmp_path / "runs").glob("*/metrics.jsonl")), "the first report")
            run.send_signal(number)
            assert run.wait(30) == (130 if number == signal.SIGINT else -signal.SIGKILL), (
                tmp_path / "said"
            ).read_text()
        finally:
            run.kill()
            run.wait(10)


def test_what_ssh_says_reaches_the_user(machines: SshMachines, tmp_path: Path) -> None:
    hosts = machines.with_workers(1, 1)
    wrong = replace(hosts, hosts=(hosts.hosts[0], replace(hosts.hosts[1], identity=str(machines.folder / "host"))))
    with machines.placed.inside(), pytest.raises(MachineLostError, match=r"machine b .*Permission denied"):
        offbeat.fit("offbeat.tasks.digits", hosts=wrong, steps=1, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_script_that_exists_only_here_is_shipped_or_refused(machines: SshMachines, tmp_path: Path) -> None:
    # Namespaces share this machine's files, so what is missing "there" is moved away once it has been sent.
    code = tmp_path / "code"
    code.mkdir()
    (code / "helper.py").write_text("STEPS = 6\n")
    (code / "train.py").write_text(
        "import pathlib, helper, offbeat\n"
        "from offbeat.tasks.digits import Digits\n"
        "class Mine(Digits):\n    steps = helper.STEPS\n"
        "print('code in', pathlib.Path(__file__).parent)\n"
    )
    with machines.placed.inside():
        result = offbeat.fit(
            f"{code / 'train.py'}:Mine", hosts=machines.with_workers(1, 1), steps=6, ship=code, out=tmp_path / "runs"
        )
    log = (Path(result.run) / "logs" / "worker-1.log").read_text()
    assert "offbeat-agent-" in log.partition("code in")[2].partition("\n")[0]
