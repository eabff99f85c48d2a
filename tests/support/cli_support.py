"""What the tests of the command line share: `offbeat ...` run inside the test's process, and files to run it on."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.runtime.launch import Launcher

Offbeat = Callable[..., "Said"]


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str


def in_process(
    launcher: Launcher, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    """`offbeat ...` from its entry point on, in this process and on a fork server that is already warm.

    A real command spends seconds on importing torch twice; the few tests that need one use the `cli` fixture.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr("offbeat.cli.commands.run.Launcher", lambda _preload: nullcontext(launcher))

    def run(*words: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["offbeat", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Said(end.value.code, said.out, said.err)

    return run


POINTS = """\
import os, time, torch, offbeat
from torch.utils.data import TensorDataset

RANK = int(os.environ.get("RANK", "0"))

class Points(offbeat.Task):
    global_batch = 4
    epochs = 2

    def __init__(self, examples: int = 16, rate: float = 0.1):
        self.examples, self.rate = examples, rate
        self.seen = 0

    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self):
        x = torch.linspace(-1, 1, self.examples).unsqueeze(1)
        part = TensorDataset(x, 2 * x)
        return offbeat.Data(part, part, part)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.rate)

    def criterion(self, output, target):
        self.seen += 1
        return self.disturbed(torch.nn.functional.mse_loss(output, target))

    def disturbed(self, loss):
        return loss

    def score(self, model, data):
        return -sum(float((model(x) - y).square().mean()) for x, y in data)

"""
"""A small task of a user's own; `self.seen` counts this worker's batches."""


def points(path: Path, more: str = "", after: str = "") -> Path:
    """A file with the small task; what `more` defines goes before what is there, `after` follows the class."""
    return write(path, POINTS + textwrap.indent(textwrap.dedent(more), "    ") + "\n" + textwrap.dedent(after))


def write(path: Path, text: str) -> Path:
    """A file with this text, less its indentation."""
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path
