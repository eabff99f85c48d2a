"""Folders that may not be looked at, and texts in files that a terminal would obey: commands go on, or say why not."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offbeat.cli.commands import runs as alive
from offbeat.cli.commands.explain import _verdict
from offbeat.cli.options import PsOptions
from offbeat.cli.output import printable
from offbeat.errors import CheckpointError, TaskError, UsageError
from offbeat.monitor import Judge
from offbeat.monitor.page.run_folders import opened
from offbeat.run.job import target_of
from offbeat.runtime.launch import LogFollower
from offbeat.runtime.run.status import find_run, statuses
from offbeat.runtime.run.untrusted_files import read_bytes
from offbeat.runtime.state.certificates import check

NOBODY = 65534
LONG = Path("x" * 300)


def run_folder(path: Path, **entries: object) -> Path:
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"state": "finished", **entries}))
    return path


@pytest.fixture
def runs() -> Generator[Path]:
    """A folder that every user can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def an_ordinary_user() -> Generator[None]:
    """Root may look at everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_folder_that_nobody_may_enter_does_not_hide_the_other_runs(runs: Path) -> None:
    run_folder(runs / "mine")
    secret = run_folder(runs / "secret")
    secret.chmod(0)
    try:
        with an_ordinary_user():
            assert [Path(row.run).name for row in statuses(runs)] == ["mine"]
            with pytest.raises(CheckpointError, match=r"it has no run\.json"):
                find_run(secret, runs)
            with pytest.raises(UsageError, match="cannot be read: Permission denied"):
                statuses(secret)
    finally:
        secret.chmod(0o700)


def test_a_name_that_is_too_long_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        find_run(LONG, tmp_path)
    with pytest.raises(CheckpointError):
        check(LONG)
    with pytest.raises(UsageError, match="is not a folder"):
        opened(LONG)
    with pytest.raises(UsageError, match="there is no folder"):
        statuses(LONG)
    with pytest.raises(TaskError, match="There is no file"):
        target_of(f"{LONG}.py", ())
    with pytest.raises(TaskError):
        target_of(f"{LONG}/", ())


@pytest.mark.parametrize(("kind", "why"), [("folder", "not a regular file"), ("link", "it is a link")])
def test_what_is_no_file_is_refused_in_words_and_keeps_no_descriptor(kind: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "strange"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("run.json")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(10):
        with pytest.raises(ValueError, match=why):
            read_bytes(path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_terminal_obeys_nothing_that_stands_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = {"script": "\x1b[2J\x9b31mtrain.py\nfake: running"}
    run_folder(tmp_path / "a\udcffb\nc", config={"what": what, "goal": {"strategy": "\x1b]0;x\x07"}})
    alive.ps(PsOptions(tmp_path, everything=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == r"a\udcffb\nc: finished"
    assert lines[1].startswith(r"  \x1b[2J\x9b31mtrain.py\nfake: running on ")
    assert lines[1].endswith(r", \x1b]0;x\x07")
    assert len(lines) == 2


def test_ordinary_text_is_printed_as_it_is() -> None:
    text = "größer\tals 3 …\n日本 🙂"
    assert printable(text) == text


def test_a_verdict_without_stacks_or_of_another_version_is_told() -> None:
    told = _verdict({"verdict": {"kind": "deadlock", "message": "all wait"}}, Judge(), [])
    assert str(told) == "deadlock: all wait"


def test_a_log_of_any_size_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    with path.open("wb") as file:
        file.truncate(40 * 2**20)  # One line without an end.
        file.seek(0, 2)
        file.write(b"\nlast\nrest")
    follower = LogFollower(path, whole=True)
    parts: list[str] = []
    while text := follower.new_text():
        parts.append(text)
    assert max(map(len, parts)) <= 2 * 2**20
    assert sum(map(len, parts)) == 40 * 2**20 + len("\nlast\n")
    assert follower.rest() == "rest"
