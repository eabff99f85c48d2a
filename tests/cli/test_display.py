"""The live panel on a real terminal of any width, and when its window is resized."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from conftest import DEADLINE, clean_environment
from offbeat.cli.display import PANEL_WIDTH, Display, folded, panel_width
from offbeat.run.job import Job, Script
from offbeat.runtime.launch import Role
from offbeat.runtime.run.folder import RunFolder
from offbeat.runtime.run.settings import Goal

pyte = pytest.importorskip("pyte", reason="a terminal emulator, of requirements-dev.txt")

PROGRESS = {
    "kind": "report",
    "step": 4711,
    "epoch": 13,
    "samples": 301504,
    "seconds": 12.5,
    "loss": 0.1234,
    "seconds_by_kind": {"input": 1, "compute": 6, "communicate": 3, "wait": 1.5, "evaluate": 0.75, "other": 0.25},
    "metrics": {"accuracy": 0.9712, "perplexity": 12.25},
    "staleness": {"0": 5, "3": 5},
}
PARTS = ["step 4711", "epoch 13", "loss 0.1234", "accuracy 0.9712", "perplexity 12.25", "24,120 examples/s"]
PARTS += ["reads 1.5 steps old (most 3)", "worker 0:", "compute 48 %", "communicate 24 %", "other 2 %"]
PROGRAM = f"""
import sys
from pathlib import Path
from offbeat.cli.display import Display
from offbeat.run.job import Job, Script
from offbeat.runtime.run.settings import Goal
from offbeat.runtime.launch import Role
from offbeat.runtime.run.folder import RunFolder
import select

display = Display()
with display:
    display.begin(Job(Script("train.py"), Goal(steps=9422), 2), RunFolder.create(Path("runs"), "train", "script"))
    display.message(Role("worker", 0, "a:b", {{}}, {{}}, Path("log")), {PROGRESS!r})
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        display.tick()
print("The end.")
"""


class Terminal:
    """A terminal that a program runs in, and what is to be seen on it."""

    def __init__(self, columns: int, program: str, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        settings = termios.tcgetattr(theirs)
        settings[3] &= ~termios.ECHO  # What is typed would be shown, and is not part of what it draws.
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        self.screen = pyte.Screen(columns, 24)
        self.frames = 0
        self._stream = pyte.ByteStream(self.screen)
        self.resize(columns)
        environment = clean_environment() | {"TERM": "xterm-256color"}
        del environment["COLUMNS"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=folder,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def resize(self, columns: int) -> None:
        self.screen.resize(24, columns)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    @property
    def rows(self) -> list[str]:
        return [row.rstrip() for row in self.screen.display if row.strip()]

    def until(self, seen: Callable[[list[str]], bool], what: str) -> list[str]:
        deadline = time.monotonic() + DEADLINE
        while not seen(self.rows):
            assert time.monotonic() < deadline, f"never saw {what}:\n" + "\n".join(self.rows)
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self._feed(os.read(self._ours, 65536))
                except OSError:
                    pytest.fail(f"it ended before {what}:\n" + "\n".join(self.rows))
        return self.rows

    def _feed(self, shown: bytes) -> None:
        self.frames += shown.count(b"step 4711")
        self._stream.feed(shown)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(80, textwrap.dedent(PROGRAM), tmp_path)
    yield opened
    opened.close()


@pytest.mark.slow
def test_the_panel_is_whole_at_any_width_and_leaves_nothing_when_resized(terminal: Terminal) -> None:
    def is_whole(rows: list[str]) -> bool:
        shown = "\n".join(rows)
        return all(shown.count(part) == 1 for part in PARTS)

    terminal.until(is_whole, "the whole panel at 80 columns")
    for columns in (60, 200, 60, 120, 80):
        terminal.resize(columns)
        drawn = terminal.frames + 3
        terminal.until(lambda _, drawn=drawn: terminal.frames >= drawn, "that it is drawn again")
        rows = terminal.until(is_whole, f"the whole panel, once, at {columns} columns")
        below = rows[next(i for i, row in enumerate(rows) if "━" in row) :]
        assert max(map(len, below)) <= PANEL_WIDTH, "so that no terminal folds it when it is made narrower"
    terminal.type("\n")
    rows = terminal.until(lambda rows: "The end." in rows, "the end")
    assert not [row for row in rows if "━" in row or "█" in row or "compute" in row]


def lines_of(display: Display, capsys: pytest.CaptureFixture[str]) -> list[str]:
    display.__exit__(None, None, None)
    return capsys.readouterr().err.splitlines()


def test_what_is_said_before_any_progress_is_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    display.begin(Job(Script("train.py"), Goal(), 2), RunFolder.create(tmp_path, "train", "script"))
    role = Role("worker", 0, "a:b", {}, {}, tmp_path / "log")
    assert display.in_words().startswith("starting …")
    display.message(role, {"kind": "script", "script": "/far/away/train.py"})
    assert display.in_words().startswith("train.py is running …")
    display.message(role, {"kind": "ready", "rank": 0, "strategy": "allreduce"})
    assert display.in_words().startswith("training starts …")
    display.message(role, PROGRESS)
    assert display.in_words().startswith("step 4711  epoch 13")
    assert "  worker 0: compute 48 %, communicate 24 %" in display.in_words()
    assert "train.py on 2 workers (logs in" in lines_of(display, capsys)[0]


def test_one_worker_need_not_be_named() -> None:
    display = Display(quiet=True)
    display.message(Role("worker", 0, "a:b", {}, {}, Path("log")), PROGRESS)
    assert "worker" not in display.in_words()


def test_parts_are_folded_but_never_torn() -> None:
    rows = folded([Text("step 40"), Text("epoch 3"), Text("loss 0.5")], 17)
    assert [row.plain for row in rows] == ["step 40  epoch 3", "loss 0.5"]
    assert [row.plain for row in folded([Text("much too long"), Text("a")], 5)] == ["much too long", "a"]
    assert panel_width(Console(width=200)) == PANEL_WIDTH
    assert panel_width(Console(width=20)) == 19
