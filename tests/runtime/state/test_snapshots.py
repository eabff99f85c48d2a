"""Snapshots of real runs: certified, refused when they are not what was written, and gone on from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import Offbeat, in_process
from fault_runs import Tally, assert_nothing_is_left
from msgspec import structs
from snapshot_runs import Scene, goes_on, photographed

import offbeat
from offbeat.errors import CheckpointError, UsageError
from offbeat.protocols.machine import Effects
from offbeat.protocols.servers.messages import ClusterView, ShardCut, SnapshotWritten, WorkerCut
from offbeat.protocols.servers.snapshots import GivenUp, Snapshots, WorkerColour, faults
from offbeat.run.drive import fit
from offbeat.runtime.launch import Launcher
from offbeat.runtime.state.certificates import REFUSED, check, read
from offbeat.runtime.state.checkpoint import digest, fingerprint, metadata_of

PAUSES = "any worker: pause 30ms with probability 0.3"
SERVED = Scene(
    "server(shards=2, replicas=1, consistency=ssp(3))",
    disturb=[PAUSES, "server 0: kill at step 5", "worker 2: kill at step 20"],
)
PAIRED = Scene("gossip(complete, asynchronous=True)", workers=3, disturb=[PAUSES, "worker 1: kill at step 12"])
IN_TESTS = {"served": (SERVED, 3), "paired": (PAIRED, 2)}


@pytest.fixture(scope="module")
def taken(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Path]]]:
    """Two runs in which somebody is killed, each with its snapshots."""
    found: dict[str, tuple[Path, list[Path]]] = {}
    for name, (scene, _) in IN_TESTS.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = (folder, photographed(scene, launcher, folder))
    return found


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


@pytest.fixture
def snapshot(taken: dict[str, tuple[Path, list[Path]]], tmp_path: Path) -> Path:
    """A copy of a snapshot, to be spoilt."""
    return Path(shutil.copytree(taken["served"][1][-1], tmp_path / taken["served"][1][-1].name))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(IN_TESTS))
def test_snapshots_at_random_moments_lose_and_double_nothing(
    name: str, taken: dict[str, tuple[Path, list[Path]]], launcher: Launcher
) -> None:
    scene, most = IN_TESTS[name]
    folder, snapshots = taken[name]
    assert snapshots
    for one in snapshots[-most:]:
        goes_on(one, scene, launcher, folder)
    (run,) = (folder / "runs").glob("2*")
    assert not list((run / "checkpoint").glob(".snapshot-*"))
    assert_nothing_is_left(run)


@pytest.mark.slow
def test_a_snapshot_is_certified_in_words(snapshot: Path, offbeat_: Offbeat) -> None:
    said = offbeat_("explain", "--verify-checkpoint", snapshot)
    assert said.code == 0
    assert "is a consistent cut of" in said.out
    assert "each once" in said.out
    told = json.loads(offbeat_("explain", snapshot, "--verify-checkpoint", "--format", "json").out)
    assert (told["good"], told["snapshot"], told["faults"]) == (True, True, [])


def torn(path: Path) -> None:
    file = path / "shard-0.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def tampered(path: Path) -> None:
    file = path / "shard-1.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def missing(path: Path) -> None:
    next(path.glob("worker-*")).unlink()


def edited(path: Path) -> None:
    file = path / "certificate.json"
    file.write_text(file.read_text().replace('"colour": ', '"colour": 1', 1))


def forged(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """The certificate is changed by somebody who mends its checksum."""

    def act(path: Path) -> None:
        data = json.loads((path / "certificate.json").read_text())
        data.pop("checksum")
        change(data)
        (path / "certificate.json").write_text(json.dumps(data | {"checksum": digest(data)}))

    return act


def unlist(data: dict[str, Any]) -> None:
    data["files"].pop("channel-0.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (torn, "shard-0.safetensors has"),
        (tampered, "shard-1.safetensors is not what was written (another sha256)"),
        (missing, "is missing"),
        (edited, "certificate.json is not what was written"),
        (lambda path: (path / "certificate.json").unlink(), "certificate.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("{"), "its manifest cannot be read"),
        (forged(lambda data: data["workers"][0]["pushes"].append(3)), "cut elsewhere than the certificate says"),
        (forged(unlist), "channel-0.safetensors is not in the certificate"),
        (forged(lambda data: data["sums"].update(sent=1)), "its sums are"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(
    spoil: Callable[[Path], Any], reason: str, snapshot: Path, offbeat_: Offbeat
) -> None:
    spoil(snapshot)
    said = offbeat_("explain", "--verify-checkpoint", snapshot)
    assert (said.code, said.out.startswith("refused: ")) == (REFUSED, True)
    assert reason in said.out


@pytest.mark.slow
def test_a_spoilt_snapshot_is_not_gone_on_from(
    taken: dict[str, tuple[Path, list[Path]]], snapshot: Path, launcher: Launcher, tmp_path: Path
) -> None:
    (run,) = (taken["served"][0] / "runs").glob("2*")
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoint")
    forged(lambda told: told["shards"][0].update(version=0))(snapshot)
    manifest = json.loads((snapshot / "manifest.json").read_text())
    manifest.pop("checksum")
    manifest["files"]["certificate.json"] = fingerprint(snapshot / "certificate.json", "blake2b")
    (snapshot / "manifest.json").write_text(json.dumps(manifest | {"checksum": digest(manifest)}))
    shutil.copytree(snapshot, again / "checkpoint" / snapshot.name)
    with pytest.raises(CheckpointError, match="is refused: its files say that they were cut elsewhere"):
        fit(Tally(str(taken["served"][0])), SERVED.strategy, workers=3, resume=again, launcher=launcher)


@pytest.mark.slow
def test_of_an_ordinary_checkpoint_it_is_said_that_all_had_met(
    taken: dict[str, tuple[Path, list[Path]]], offbeat_: Offbeat
) -> None:
    (run,) = (taken["served"][0] / "runs").glob("2*")
    said = offbeat_("explain", "--verify-checkpoint", run)
    assert said.code == 0
    assert "an ordinary checkpoint of step 24: all workers had met for it" in said.out
    assert offbeat_("explain", "--verify-checkpoint", run / "nothing").code not in (0, REFUSED)


@pytest.mark.slow
def test_parts_of_a_snapshot_hold_no_pickle_and_say_where_they_were_cut(snapshot: Path) -> None:
    certificate = read(snapshot)
    said = [
        json.loads(metadata_of(snapshot / f"worker-{cut.worker}.safetensors")["cut"]) for cut in certificate.workers
    ]
    assert [one["pushes"] for one in said] == [list(cut.pushes) for cut in certificate.workers]
    assert {path.suffix for path in snapshot.iterdir()} == {".safetensors", ".json"}
    assert not check(snapshot).faults


def test_a_run_in_step_has_no_snapshots() -> None:
    with offbeat.init() as team, pytest.raises(UsageError, match=r"Use team\.checkpoint\(\)"):
        team.snapshot()


# -- without processes -------------------------------------------------------------------------------------------------

ONE = WorkerCut(worker=0, clock=3, pushes=(4,), seen=(5,), meetings=2)
TWO = WorkerCut(worker=1, clock=2, pushes=(2,), seen=(6,), meetings=2)
SHARD = ShardCut(shard=0, version=6, taken=((0, 0, 3, 2), (1, 0, 2, 2)), in_flight=((0, 3),))


def test_a_cut_that_balances_has_no_faults() -> None:
    assert faults([ONE, TWO], [SHARD]) == []


@pytest.mark.parametrize(
    ("workers", "shard", "reason"),
    [
        ([ONE, TWO], structs.replace(SHARD, in_flight=()), "#3 must have been in flight, and none was kept"),
        ([ONE, TWO], structs.replace(SHARD, in_flight=((0, 3), (0, 3))), "and #3, #3 was kept"),
        ([structs.replace(ONE, pushes=(2,)), TWO], SHARD, "had 3 pushes of worker 0, who had sent 2"),
        ([ONE, structs.replace(TWO, seen=(7,))], SHARD, "had seen version 7 of shard 0, which was at 6"),
        ([ONE, structs.replace(TWO, meetings=3)], SHARD, "different numbers of meetings: [2, 3]"),
        ([ONE], structs.replace(SHARD, in_flight=((0, 3), (1, 2))), "a push of worker 1, not a member"),
        ([ONE, structs.replace(TWO, life=1)], SHARD, "do not know of each other"),
    ],
)
def test_what_does_not_balance_or_is_no_consistent_cut_is_named(
    workers: list[WorkerCut], shard: ShardCut, reason: str
) -> None:
    assert any(reason in fault for fault in faults(workers, [shard]))


def test_a_worker_that_acts_on_news_before_its_boundary_has_missed_its_place() -> None:
    colour = WorkerColour()
    colour.hear(1, {0: (5, 3)})
    assert (colour.due, colour.ask()) == (True, 1)
    assert colour.act() == 1
    assert (colour.due, colour.missed) == (False, 1)


def test_a_worker_is_cut_where_it_first_heard_of_the_snapshot() -> None:
    colour = WorkerColour()
    colour.hear(1, {0: (5, 3)})
    assert colour.turn({0: (9, 4)}) == {0: 5}
    colour.announced = 2
    assert colour.turn({0: (9, 4)}) == {0: 9}


def test_a_snapshot_is_given_up_when_somebody_dies_and_taken_anew() -> None:
    view, out = ClusterView.of(2, 1), Effects()
    taking = Snapshots()
    taking.want()
    taking.look(view, False, 0.0, out)
    assert taking.colour == 1
    later = structs.replace(view, epoch=1, workers=(0,), lives=(0,))
    taking.look(later, False, 0.1, out)
    assert [effect.work.reason for effect in out.done if isinstance(getattr(effect, "work", None), GivenUp)] == [
        "who takes part has changed"
    ]
    assert taking.colour == 2
    taking.recorded(SnapshotWritten(worker=0, number=1, colour=2), later, out)
    assert taking.under_way
    taking.look(later, True, 0.2, out)
    assert taking.colour == 2, "nothing is begun while workers are about to meet"
