"""Agents and the launcher's end of them: who is refused, what is kept, and where files may land."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import wait_until
from offbeat.errors import MachineLostError, RunError, UsageError
from offbeat.protocols.agents import LinkBeat, LinkMessage
from offbeat.runtime.agents import fleet as fleets
from offbeat.runtime.agents.code import digest_of, packed, unpack
from offbeat.runtime.agents.collected_files import CollectedFiles
from offbeat.runtime.agents.fleet import Fleet
from offbeat.runtime.agents.mirror import FolderMirror
from offbeat.runtime.engines.command import CommandAgent
from offbeat.runtime.engines.placement import ClusterMachine, hosts_on, shared_out
from offbeat.runtime.messages import Codec, Endpoint, Keys

# Files that agents send.


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/outside", "run.json", "a/../../b", ".hidden", "a//b", "x/" * 9, ""]
)
def test_a_file_that_does_not_belong_into_a_run_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(RunError, match="does not belong"):
        CollectedFiles(folder).take("a", name, 0, memoryview(b"x"))
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


def test_files_are_never_written_through_links(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "logs").symlink_to(outside)
    (folder / "file").symlink_to(outside / "file")
    files = CollectedFiles(folder)
    with pytest.raises(RunError, match="out of the run folder"):
        files.take("a", "logs/worker-0.log", 0, memoryview(b"x"))
    with pytest.raises(OSError, match="symbolic links"):
        files.take("a", "file", 0, memoryview(b"x"))
    assert not list(outside.iterdir())


def test_an_agent_cannot_send_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.runtime.agents.collected_files.MOST_BYTES", 10)
    files = CollectedFiles(tmp_path)
    files.take("a", "log", 0, memoryview(b"123456"))
    with pytest.raises(RunError, match="machine a sent more than"):
        files.take("a", "log", 6, memoryview(b"123456"))


def test_a_mirrored_folder_is_the_same_after_every_look(tmp_path: Path) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    (here / "logs").mkdir(parents=True)
    home.mkdir()
    mirror, files = FolderMirror(here), CollectedFiles(home)

    def look() -> list[str]:
        names: list[str] = []
        for name, offset, data in mirror.news():
            names.append(name)
            files.take("a", name, offset, memoryview(data))
        return names

    log, metrics = here / "logs" / "worker-0.log", here / "metrics.jsonl"
    log.write_bytes(b"one\n")
    metrics.write_bytes(b"")
    (here / ".draft").write_bytes(b"not yet")
    assert sorted(look()) == ["logs/worker-0.log", "metrics.jsonl"]
    with log.open("ab") as file:
        file.write(b"two\n")
    assert look() == ["logs/worker-0.log"]
    metrics.with_name(".new").write_bytes(b"replaced")
    metrics.with_name(".new").replace(metrics)
    assert look() == ["metrics.jsonl"]
    assert look() == []
    assert (home / "logs" / "worker-0.log").read_bytes() == b"one\ntwo\n"
    assert (home / "metrics.jsonl").read_bytes() == b"replaced"
    assert not (home / ".draft").exists()


def test_a_checkpoint_is_one_when_every_machine_has_sent_its_part(tmp_path: Path) -> None:
    files = CollectedFiles(tmp_path)
    files.expect(["a", "b"])

    def send(machine: str, step: int) -> None:
        name = f"worker-{machine}.safetensors"
        names = [name, "shared.safetensors"] if machine == "a" else [name]
        manifest = {"format": 1, "step": step, "files": {each: {"bytes": 1, "blake2b": machine} for each in names}}
        files.take(machine, f"checkpoint/step-{step:09d}/{name}", 0, memoryview(machine.encode()))
        files.take(machine, f"checkpoint/step-{step:09d}/manifest.json", 0, memoryview(json.dumps(manifest).encode()))

    def kept() -> list[str]:
        return sorted(path.name for path in (tmp_path / "checkpoint").iterdir() if path.name.startswith("step-"))

    send("a", 10)
    assert kept() == []
    send("b", 10)
    assert kept() == ["step-000000010"]
    send("a", 20)  # Machine b had removed its part before it was sent.
    send("a", 30)
    send("b", 30)
    assert kept() == ["step-000000030"]
    send("b", 20)  # Late.
    send("a", 40)
    files.discard_drafts()
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-000000030"]
    final = json.loads((tmp_path / "checkpoint" / "step-000000030" / "manifest.json").read_text())
    assert sorted(final["files"]) == ["shared.safetensors", "worker-a.safetensors", "worker-b.safetensors"]


@pytest.mark.parametrize("elastic", [True, False])
def test_a_lost_machine_is_not_waited_for_where_the_run_continues(tmp_path: Path, elastic: bool) -> None:
    files = CollectedFiles(tmp_path)
    files.expect(["a", "b"], elastic)

    def send(machine: str, step: int, *names: str) -> bool:
        manifest = json.dumps({"format": 1, "files": {name: {} for name in names}}).encode()
        files.take(machine, f"checkpoint/step-{step:09d}/manifest.json", 0, memoryview(manifest))
        return (tmp_path / "checkpoint" / f"step-{step:09d}" / "manifest.json").is_file()

    assert not send("b", 10, "worker-1.safetensors")
    files.lose("a")  # Which had what all share.
    assert not (tmp_path / "checkpoint" / "step-000000010").exists()
    assert not send("b", 20, "worker-1.safetensors")
    assert send("b", 30, "shared.safetensors", "worker-1.safetensors") is elastic


# Code that is sent to agents.


def test_shipped_code_arrives_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "code" / "pack").mkdir(parents=True)
    (tmp_path / "code" / "pack" / "a.py").write_text("A = 1\n")
    (tmp_path / "code" / ".secret").write_text("no")
    (tmp_path / "there").mkdir()
    unpack(packed(tmp_path / "code"), tmp_path / "there")
    assert [str(path.relative_to(tmp_path / "there")) for path in sorted((tmp_path / "there").rglob("*"))] == [
        "pack", "pack/a.py",
    ]  # fmt: skip
    assert digest_of(packed(tmp_path / "code")) != digest_of(b"")


def _archive(change: Callable[[tarfile.TarInfo], object]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        member = tarfile.TarInfo("a.py")
        member.size = 1
        change(member)
        tar.addfile(member, io.BytesIO(b"x"))
    return made.getvalue()


@pytest.mark.parametrize(
    "change",
    [
        lambda member: setattr(member, "name", "../a.py"),
        lambda member: setattr(member, "name", "/a.py"),
        lambda member: (setattr(member, "type", tarfile.SYMTYPE), setattr(member, "linkname", "/etc")),
        lambda member: setattr(member, "type", tarfile.FIFOTYPE),
    ],
)
def test_an_archive_that_leads_out_of_its_folder_is_refused(
    tmp_path: Path, change: Callable[[tarfile.TarInfo], object]
) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="not a plain file inside its folder"):
        unpack(_archive(change), tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())


def test_too_much_to_be_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(1000))
    monkeypatch.setattr("offbeat.runtime.agents.code.LARGEST", 100)
    with pytest.raises(UsageError, match="more than code"):
        packed(tmp_path)


# Placement.


def test_workers_are_shared_out_by_cores() -> None:
    machines = [ClusterMachine("big", 8), ClusterMachine("small", 2), ClusterMachine("small too", 2)]
    assert [host.workers for host in shared_out(machines, 6, "ray", "ray").hosts] == [4, 1, 1]
    assert [host.address for host in shared_out(machines, 2, "ray", "ray").hosts] == ["big"]
    assert [host.workers for host in shared_out(machines, None, "ray", "ray").hosts] == [3]


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("rya", "no such engine, and no such file. Did you mean 'ray'?"),
        ("k8s.toml", "k8s.toml"),
        ("slurm", "not in an allocation"),
        ("ray://127.0.0.1:1", "nothing answers there"),
    ],
)
def test_an_engine_that_is_not_there_is_refused(on: str, said: str) -> None:
    if on.startswith("ray"):
        pytest.importorskip("ray")
    with pytest.raises(UsageError) as caught:
        hosts_on(on, 2)
    assert said in str(caught.value)


# Agents, as processes.


def _start(_machine: str, settings: bytes) -> CommandAgent:
    command = [sys.executable, "-P", "-m", "offbeat.runtime.agents.agent"]
    return CommandAgent("the command", command, settings)


@pytest.mark.slow
def test_a_stranger_is_refused_and_counted_and_the_keys_are_nowhere_to_see() -> None:
    fleet = Fleet("127.0.0.1", ["a"], _start, ("torch",))
    try:
        facts = fleet.await_hellos()["a"]
        assert facts.cores == len(os.sched_getaffinity(0))
        address, public = fleet._endpoint.address, fleet._keys.public
        assert address is not None
        with Endpoint("intruder", Codec(LinkMessage), keys=Keys.generate()) as intruder:
            intruder.connect("launcher", address, public)

            def knock() -> bool:
                intruder.send("launcher", LinkBeat(0))
                intruder.receive(0.05)
                return fleet.strangers > 0

            wait_until(knock, "the stranger to be counted", 20)
            assert not intruder.has_met("launcher")
        secret = fleet._secrets["a"]
        for process in Path("/proc").glob("[0-9]*"):
            for file in ("cmdline", "environ"):
                try:
                    assert secret.encode() not in (process / file).read_bytes()
                except OSError:
                    continue
        assert not fleet.lost
    finally:
        fleet.close()


@pytest.mark.slow
def test_an_agent_with_other_versions_is_refused_and_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fleets.versions()
    monkeypatch.setattr(fleets, "versions", lambda: {**real, "torch": "9.9"})
    fleet = Fleet("127.0.0.1", ["a"], _start, ("numpy",))
    try:
        with pytest.raises(UsageError, match=rf"a has torch {real['torch'].replace('+', '.')}, this machine 9\.9"):
            fleet.await_hellos()
    finally:
        fleet.close()


@pytest.mark.slow
def test_an_agent_without_a_launcher_ends_and_says_why() -> None:
    def elsewhere(machine: str, settings: bytes) -> CommandAgent:
        # A port of this machine where nobody listens, and little patience.
        wrong = settings.replace(b"127.0.0.1:", b"127.0.0.2:").replace(b'"patience":60.0', b'"patience":1.0')
        return _start(machine, wrong)

    began = time.monotonic()
    fleet = Fleet("127.0.0.1", ["a"], elsewhere, ("numpy",))
    try:
        with pytest.raises(MachineLostError, match="has not heard from the launcher at"):
            fleet.await_hellos()
    finally:
        fleet.close()
    assert time.monotonic() - began < 60
