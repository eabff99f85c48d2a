"""The run folder: `run.json` (configuration, environment, result), `metrics.jsonl`, logs, checkpoints."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import msgspec

from offbeat._version import __version__
from offbeat.errors import CheckpointError, OutputError, UsageError
from offbeat.runtime.run.untrusted_files import is_file, read_object

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
MODEL_FILE = "model.safetensors"
BY_SCRIPT = "script"
"""The strategy of a run whose script distributes itself, as one for torchrun does, without offbeat."""
FINISHED = ("finished", "finished without a team")
"""States of a completed run: with the result of a team, or of a script that distributes itself."""


class _TaskRecord(msgspec.Struct):
    source: str
    name: str | None = None
    arguments: dict[str, Any] = {}


class _What(msgspec.Struct):
    script: str = ""
    arguments: tuple[str, ...] = ()
    task: _TaskRecord | None = None


class _Goal(msgspec.Struct):
    strategy: str | None = None


class _Config(msgspec.Struct):
    what: _What = msgspec.field(default_factory=_What)
    goal: _Goal = msgspec.field(default_factory=_Goal)
    workers: int | None = None
    threads: int | None = None
    hosts: dict[str, Any] | None = None


class _EnvironmentRecord(msgspec.Struct):
    started: str | None = None
    command: tuple[str, ...] = ()


class _Result(msgspec.Struct):
    steps: int | None = None
    score: float | None = None
    seconds: float | None = None


class _Verdict(msgspec.Struct):
    kind: str
    message: str
    stacks: dict[str, str] = {}


class _RunFile(msgspec.Struct):
    """The parts of run.json that are read here. All may be missing."""

    state: str = ""
    config: _Config = msgspec.field(default_factory=_Config)
    environment: _EnvironmentRecord = msgspec.field(default_factory=_EnvironmentRecord)
    result: _Result | None = None
    verdict: _Verdict | None = None


class RunFolder:
    """One run's folder. Every write is atomic."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path, task: str, strategy: str) -> RunFolder:
        """A new folder `<parent>/<time>-<task>-<strategy>`, and the link `<parent>/latest` to it."""
        name = f"{_slug(Path(task.split(':')[0]).stem if task.endswith('.py') else task)}-{_slug(strategy)}"
        return cls(new_folder(parent, name, "latest", "logs"))

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an earlier run, to resume or read."""
        if not is_file(path / RUN_FILE):
            raise CheckpointError(
                f"{path} is not a run folder: it has no {RUN_FILE}. Give a folder that `offbeat run` has made."
            )
        folder = cls(path.resolve())
        folder.read()
        return folder

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoint"

    def log(self, kind: str, number: int | str) -> Path:
        """The log file of one process; a server's number is `shard.replica`."""
        return self.path / "logs" / f"{kind}-{number}.log"

    def read(self) -> dict[str, Any]:
        """The contents of run.json."""
        try:
            data = read_object(self.path / RUN_FILE)
            msgspec.convert(data, _RunFile)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path / RUN_FILE} cannot be read: {error}. It may have been edited, or be another program's."
            ) from error
        return data

    def write(self, **changes: Any) -> None:
        """Replace entries of run.json; others stay."""
        target = self.path / RUN_FILE
        known: dict[str, Any] = self.read() if target.exists() else {}
        write_whole(target, json.dumps(known | changes, indent=2, default=str) + "\n")


def new_folder(parent: Path, name: str, latest: str, *inside: str) -> Path:
    """A new folder `<parent>/<time>-<name>` with the given subfolders, and a link `latest` to it beside it."""
    stamped = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    with _writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = parent / (stamped if number == 1 else f"{stamped}-{number}")
            with suppress(FileExistsError):
                path.mkdir()
                for subfolder in inside:
                    (path / subfolder).mkdir()
                _point_to(path, parent / latest)
                return path
    raise OutputError(f"{parent} already holds a thousand runs called {stamped}. Choose another --out.")


def strategy_of(known: Mapping[str, Any]) -> str:
    """The strategy in run.json; `script` if the script has not joined a team."""
    return str(part(known, "result").get("strategy") or part(known, "config", "goal").get("strategy") or BY_SCRIPT)


def strategy_in_words(strategy: str) -> str:
    """A strategy in words: `script` says little."""
    return "distributed by the script itself" if strategy == BY_SCRIPT else strategy


def part(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A nested table of JSON data; empty if there is none."""
    table: Any = data
    for name in names:
        table = cast("dict[str, Any]", table).get(name) if isinstance(table, dict) else None
    return cast("dict[str, Any]", table) if isinstance(table, dict) else {}


class MetricsWriter:
    """Appends one JSON line per report to `metrics.jsonl`."""

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self._path = path
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UsageError("--tensorboard needs TensorBoard: pip install 'offbeat[tensorboard]'.") from error
            self._board = SummaryWriter(str(tensorboard))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line."""
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(name, value, record["step"])
            self._board.flush()
        with _writing(self._path), self._path.open("a") as file:
            file.write(json.dumps(dict(record)) + "\n")

    def keep_first(self, lines: int) -> None:
        """Drop lines written after the checkpoint that the run resumes from, and a line cut short by a kill."""
        if self._path.exists():
            written = self._path.read_text(errors="replace").splitlines(keepends=True)
            write_whole(self._path, "".join(line for line in written[:lines] if line.endswith("\n")))


def environment() -> dict[str, Any]:
    """The machine and the versions of a run."""
    import numpy as np
    import torch

    return {
        "offbeat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    model = re.search(r"model name\s*:\s*(.+)", text)
    return model[1] if model else platform.machine()


def write_whole(target: Path, text: str) -> None:
    """Write a text file atomically."""
    draft = target.with_name(f".{target.name}.draft")
    with _writing(target, draft):
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)


def _point_to(path: Path, link: Path) -> None:
    draft = link.with_name(f".{link.name}-{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(path.name)
    with _writing(link, draft):
        draft.replace(link)


@contextmanager
def _writing(path: Path, draft: Path | None = None) -> Generator[None]:
    """Report a failed write of this path, and remove its draft."""
    try:
        yield
    except OSError as error:
        if draft is not None:
            with suppress(OSError):
                draft.unlink()
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}. Free some space, or choose another folder with "
            f"--out."
        ) from error


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[-60:] or "run"
