"""Files of runs that were damaged, edited or made up by a stranger: every reader answers or says what is wrong."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from league_support import league

from offbeat.cli.commands.explain import explain_run, scene_of
from offbeat.cli.commands.runs import _lines, _named
from offbeat.errors import CheckpointError, OffbeatError, UsageError
from offbeat.league import League, report
from offbeat.monitor import recorded
from offbeat.monitor.diagram import svg
from offbeat.monitor.page.run_folders import Folder, log_of
from offbeat.monitor.page.run_view import RunView
from offbeat.run.drive import fit
from offbeat.run.job import Job, _as_before, earlier, target_from_plain
from offbeat.runtime.events import recorder
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.runtime.messages.keys import Keys
from offbeat.runtime.run.folder import RunFolder
from offbeat.runtime.run.settings import Goal
from offbeat.runtime.run.status import statuses
from offbeat.runtime.run.untrusted_files import parse_json, read_bytes
from offbeat.runtime.state.certificates import check
from offbeat.runtime.state.checkpoint import _read_state, digest, newest, read_manifest
from offbeat.tasks.digits import Digits

DEEP = '{"a":' * 100_000
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    float("nan"),
    float("inf"),
    2**70,
    "x",
    "",
    [],
    {},
    [1],
    {"a": 1},
    "/dev/zero",
]
LONGEST = 10.0
"""Seconds of computing that no reader may take for a run of a few steps."""


@pytest.fixture(scope="module")
def finished(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that was watched and has a checkpoint."""
    out = tmp_path_factory.mktemp("finished")
    return fit(Digits(), "allreduce", workers=2, steps=8, watch=True, target=2.0, out=out, launcher=launcher).run


def readers(folder: Path) -> dict[str, Callable[[], object]]:
    """Everything that reads a run's folder from outside."""

    def ps() -> None:
        for row in statuses(folder.parent):
            assert json.dumps(row.plain())
            assert list(_lines(row))

    def page() -> None:
        run = RunView("x", folder)
        assert json.dumps(run.summary())
        run.lanes()
        for name in ("worker-0", "worker-1"):
            log_of(folder, name)

    def resume() -> None:
        _as_before(
            Job(
                target_from_plain(earlier(folder)["what"]),
                Goal(),
                RunFolder.open(folder).read()["config"]["workers"],
                resume=folder,
            )
        )
        place = newest(folder / "checkpoint")
        manifest = read_manifest(place) if place is not None else {"files": ()}
        for name in manifest["files"]:
            assert place is not None
            _read_state(place / name, manifest)

    return {
        "explain": lambda: explain_run(folder, as_json=False),
        "explain as json": lambda: explain_run(folder, as_json=True),
        "check": lambda: check(folder),
        "draw": lambda: svg.save(scene_of(RunFolder.open(folder), recorded(folder)).diagram(), folder.parent / "x.svg"),
        "ps": ps,
        "logs": lambda: _named(RunFolder.open(folder)),
        "list of runs": lambda: Folder(folder.parent).briefs(),
        "page": page,
        "resume": resume,
    }


def assert_all_answer(folder: Path) -> None:
    for name, read in readers(folder).items():
        began = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(OffbeatError, typer.Exit):
            read()
        assert time.process_time() - began < LONGEST, name


def mutated(data: Any, chance: random.Random) -> Any:
    """The same with something odd in one place."""
    if isinstance(data, dict | list) and data and chance.random() < 0.9:
        keys: list[Any] = list(data) if isinstance(data, dict) else list(range(len(data)))
        key = chance.choice(keys)
        if chance.random() < 0.1:
            del data[key]
        else:
            data[key] = mutated(data[key], chance)
        return data
    return copy.deepcopy(chance.choice(ODD))


def spoil(path: Path, chance: random.Random) -> None:
    """Damage one file as accidents, editors and strangers do."""
    way = chance.choice(["odd", "odd", "odd", "cut", "flip", "deep", "pipe", "link", "folder"])
    if way in ("pipe", "link", "folder"):
        path.unlink()
        {"pipe": os.mkfifo, "link": lambda at: at.symlink_to("/dev/zero"), "folder": Path.mkdir}[way](path)
    elif way == "odd" and path.suffix == ".json":
        data = mutated(json.loads(path.read_text()), chance)
        if path.name == "manifest.json" and isinstance(data, dict):
            data.pop("checksum", None)
            data["checksum"] = digest(data)
        path.write_text(json.dumps(data))
    elif way == "odd" and path.suffix == ".events":
        spoil_events(path, chance)
    elif way == "deep":
        path.write_text(DEEP)
    else:
        text = bytearray(path.read_bytes())
        if way == "cut":
            del text[chance.randrange(len(text) + 1) :]
        for _ in range(4 if text and way == "flip" else 0):
            text[chance.randrange(len(text))] = chance.randrange(256)
        path.write_bytes(text)


FIELDS: dict[str, tuple[int, list[Any]]] = {
    "<I": (0, [*range(24), 77]),
    "<Q": (8, [0, 1, 2, 2**40, 2**53, 2**63]),
    "<d": (16, [0.0, -1.0, float("nan"), float("inf"), 1e300]),
    "<q": (24, [0, -1, 5, 2**62]),
}
ABOUTS: list[Any] = ["world", "servers", "send to", "pull", 5, -3, 2**40, 60_000, [0, 1], [-1], ["a"], True]


def spoil_events(path: Path, chance: random.Random) -> None:
    """Change some records, or what they are about."""
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 6)):
        if chance.random() < 0.3:
            at = recorder._TABLE_AT + recorder._SLOT * chance.randrange(6)
            (length,) = struct.unpack_from("<H", data, at)
            if not length:
                continue
            about = json.loads(bytes(data[at + 2 : at + 2 + length]))
            about[chance.choice(["group", "operation", "members", "root", "peer", "bound", "elements"])] = (
                chance.choice(ABOUTS)
            )
            text = json.dumps(about).encode()
            struct.pack_into("<H", data, at, len(text))
            data[at + 2 : at + 2 + len(text)] = text
        else:
            kind = chance.choice(list(FIELDS))
            offset, values = FIELDS[kind]
            struct.pack_into(kind, data, recorder.RING_AT + 48 * chance.randint(1, 80) + offset, chance.choice(values))
    path.write_bytes(data)


@pytest.mark.slow
def test_a_run_that_was_damaged_anywhere_is_read_or_refused_with_a_reason(
    finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copies = tmp_path_factory.mktemp("copies")
    names = sorted(path.relative_to(finished) for path in finished.rglob("*") if path.is_file())
    events = [name for name in names if name.suffix == ".events"]

    @settings(max_examples=30)
    @given(st.sampled_from([*names, *events, *events]), st.integers(0, 2**32))
    def damaged(name: Path, seed: int) -> None:
        folder = copies / "run"
        shutil.copytree(finished, folder)
        try:
            spoil(folder / name, random.Random(seed))
            assert_all_answer(folder)
        finally:
            shutil.rmtree(folder)

    damaged()


@given(st.integers(0, 2**32))
@example(31)  # It took the arguments of the task away.
@settings(max_examples=60)
def test_a_league_that_was_edited_is_read_or_refused_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("league")
    made = league({"ddp": [2.0, 3.0], "local(4)": [1.0, None], "single": [3.0, 3.5]})
    dataclasses.replace(made, folder=folder).write()
    chance = random.Random(seed)
    data = mutated(json.loads((folder / "league.json").read_text()), chance)
    (folder / "league.json").write_text(json.dumps(data))
    with contextlib.suppress(CheckpointError):
        found = League.read(folder)
        assert found.outcome.words
        assert report.page(found)
        assert report.markdown(found)
        assert report.json_of(found)
        assert report.csv_of(found)


def test_one_bad_run_does_not_hide_the_others(tmp_path: Path) -> None:
    texts = {"a": '{"state": "finished"}', "b": DEEP, "c": '{"config": [1]}', "d": '{"state": 7}', "e": "[]"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    rows = {Path(row.run).name: row for row in statuses(tmp_path)}
    assert {name: row.state for name, row in rows.items()} == {"a": "finished"} | dict.fromkeys("bcde", "not readable")
    assert "nested more than 100 deep" in rows["b"].what
    assert "Expected `object`, got `array` - at `$.config`" in rows["c"].what
    assert len(Folder(tmp_path).briefs()) == 5


@pytest.mark.parametrize("name", ["/dev/zero", "../secret", "sub/file", "..", ""])
@pytest.mark.parametrize("certified", [False, True])
def test_names_that_lead_out_of_a_checkpoint_are_not_followed(name: str, certified: bool, tmp_path: Path) -> None:
    place = tmp_path / "step-000000001"
    place.mkdir()
    (tmp_path / "secret").write_text("x")
    manifest: dict[str, Any] = {"format": 1, "step": 1, "workers": 1, "identity": {}, "summary": {}}
    manifest["files"] = {name: {"bytes": 1, "blake2b": ""}}
    (place / "manifest.json").write_text(json.dumps(manifest | {"checksum": digest(manifest)}))
    if certified:
        told = {"format": 1, "kind": "servers", "run": "r", "colour": 1, "epoch": 1, "workers": [], "shards": []}
        told |= {"pairs": [], "sums": {}, "files": {name: {"bytes": 1, "sha256": ""}}}
        (place / "certificate.json").write_text(json.dumps(told | {"checksum": digest(told)}))
    (fault,) = check(tmp_path).faults
    assert "is not the name of a file in the same folder" in fault


@pytest.mark.parametrize("kind", ["link", "pipe", "other size"])
def test_a_checkpoint_file_that_is_none_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "step-000000001"
    place.mkdir()
    manifest: dict[str, Any] = {"format": 1, "step": 1, "workers": 1, "identity": {}, "summary": {}}
    manifest["files"] = {"worker-0.safetensors": {"bytes": 1, "blake2b": ""}}
    (place / "manifest.json").write_text(json.dumps(manifest | {"checksum": digest(manifest)}))
    path = place / "worker-0.safetensors"
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(2**40)  # Nobody should read this.
    (fault,) = check(tmp_path).faults
    assert "worker-0.safetensors" in fault


def test_json_is_read_up_to_a_depth_and_a_size(tmp_path: Path) -> None:
    assert parse_json('{"a": [{"b": "[[[["}]}') == {"a": [{"b": "[[[["}]}
    assert parse_json("[" + "[]," * 1000 + "1]")[-1] == 1
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        parse_json("[" * 200 + "]" * 200)
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_bytes(tmp_path / "large", 10)


def test_files_of_hosts_and_keys_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "strange"
    path.touch(0o600)
    for text in ("a = " + "[" * 10_000, "[" * 10_000, DEEP, "host = 5", '{"public": 1}', "\0"):
        path.write_text(text)
        with pytest.raises(UsageError):
            Hosts.read(path)
        with pytest.raises(UsageError):
            Keys.load(path)
