"""Run folders as the page sees them: the list of runs, a summary of each, its logs, and its metrics as they grow.

Everything is read from disk while another process writes it: what is incomplete is left for the next look.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.runtime.run.folder import METRICS_FILE, RUN_FILE, part, strategy_of
from offbeat.runtime.run.untrusted_files import LARGEST, is_file, is_folder, parse_json, read_object, regular_file

MOST_RUNS: Final = 500  # Maximum number of runs in the list, the newest ones.
MOST_LINES: Final = 200_000  # Maximum number of lines of metrics that are kept, the first ones.
LOG_TAIL: Final = 32 * 1024  # Number of bytes of a log that are shown, the last ones.


class Brief(Struct, frozen=True, omit_defaults=True):
    """One line in the list of runs."""

    name: str  # Its folder, relative to the folder of all runs.
    state: str
    strategy: str
    workers: int
    task: str
    started: str = ""
    score: float | None = None
    reached_target: bool | None = None
    seconds: float | None = None
    seconds_to_target: float | None = None
    samples_per_second: float | None = None
    verdict: str | None = None


class Folder:
    """A folder of runs, two levels deep, so that the runs of a comparison are included."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[Path, tuple[tuple[int, int], Brief]] = {}

    def runs(self) -> dict[str, Path]:
        """The runs by name, the newest first. Links, such as `latest`, are not followed."""
        files = [file for pattern in (RUN_FILE, f"*/{RUN_FILE}", f"*/*/{RUN_FILE}") for file in self.path.glob(pattern)]
        folders = [file.parent for file in files if not _linked(file.parent, self.path)]
        newest = sorted(folders, key=lambda folder: folder.name, reverse=True)[:MOST_RUNS]
        return {self.name_of(folder): folder for folder in newest}

    def name_of(self, folder: Path) -> str:
        """The name of a run on the page."""
        return folder.name if folder == self.path else folder.relative_to(self.path).as_posix()

    def find(self, name: str) -> Path:
        """The run of that name, which must be in the list."""
        folder = self.runs().get(name)
        if folder is None:
            raise UsageError(f"there is no run {name[:200]!r} in {self.path}.")
        return folder

    def briefs(self) -> list[Brief]:
        """The list of runs; those that have not changed are not read again."""
        briefs: list[Brief] = []
        for name, folder in self.runs().items():
            with suppress(OSError):
                status = (folder / RUN_FILE).stat()
                mark = (status.st_mtime_ns, status.st_ino)
                if self._read.get(folder, (None,))[0] != mark:
                    self._read[folder] = (mark, _brief(name, run_of(folder)))
                briefs.append(self._read[folder][1])
        return briefs


def opened(path: Path) -> tuple[Folder, str | None]:
    """The folder of all runs, and the name of the requested run if `path` is one."""
    real = path.resolve()
    if is_file(real / RUN_FILE):
        folder = Folder(real.parent)
        return folder, folder.name_of(real)
    if not is_folder(real):
        raise UsageError(
            f"{path} is not a folder. Give a run's folder, or the folder that runs are in (by default `runs`), or "
            f"start a run first: offbeat run offbeat.tasks.digits --monitor"
        )
    return Folder(real), None


def run_of(folder: Path) -> dict[str, Any]:
    """The contents of run.json; empty if it cannot be read."""
    try:
        return read_object(folder / RUN_FILE)
    except (OSError, ValueError):
        return {}


def log_of(folder: Path, name: str) -> str:
    """The end of a process's log."""
    if name not in logs_of(folder):
        raise UsageError(f"there is no log {name[:200]!r} in {folder.name}.")
    try:
        with regular_file(folder / "logs" / f"{name}.log") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_TAIL))
            text = file.read(LOG_TAIL).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise UsageError(f"the log {name!r} in {folder.name} cannot be read: {error}.") from error
    return text if size <= LOG_TAIL else f"…{text.partition(chr(10))[2]}"


def logs_of(folder: Path) -> list[str]:
    """Names of the processes that have a log."""
    return sorted(file.stem for file in (folder / "logs").glob("*.log") if not file.is_symlink())


class MetricsReader:
    """Reads `metrics.jsonl`, or the like, as it grows. A line that is incomplete or not an object is skipped."""

    def __init__(self, folder: Path, file: str = METRICS_FILE) -> None:
        self._path = folder / file
        self._at = 0
        self._mark: int | None = None
        self.lines: list[dict[str, Any]] = []
        self.epoch = 0  # How often the file was started anew: a resumed run drops what came after its checkpoint.

    def read(self) -> None:
        """Read what is new."""
        try:
            status = self._path.stat()
        except OSError:
            return
        if status.st_size < self._at or (self._mark is not None and status.st_ino != self._mark):
            self.lines, self._at, self.epoch = [], 0, self.epoch + 1
        self._mark = status.st_ino
        if status.st_size == self._at:
            return
        try:
            with regular_file(self._path) as file:
                file.seek(self._at)
                text = file.read(LARGEST)
        except (OSError, ValueError):
            return
        # A line longer than what is read at once is not one of ours: it is skipped.
        whole = text[: text.rfind(b"\n") + 1] if len(text) < LARGEST or b"\n" in text else text
        self._at += len(whole)
        for line in whole.split(b"\n"):
            with suppress(ValueError):
                data: Any = parse_json(line.decode())
                if isinstance(data, dict) and len(self.lines) < MOST_LINES:
                    self.lines.append(_finite(cast("dict[str, Any]", data)))


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Without numbers that JSON cannot represent."""
    return {name: value for name, value in line.items() if not isinstance(value, float) or value - value == 0.0}


def _brief(name: str, data: Mapping[str, Any]) -> Brief:
    config, result, verdict = (part(data, name) for name in ("config", "result", "verdict"))
    what = part(config, "what")
    reached = result.get("reached_target")
    figures = ("score", "seconds", "seconds_to_target", "samples_per_second")
    return Brief(
        name,
        str(data.get("state", "not readable")),
        strategy_of(data),
        _number(config.get("workers")) or 0,
        str(result.get("task") or what.get("script") or part(what, "task").get("source") or ""),
        str(part(data, "environment").get("started") or ""),
        reached_target=reached if isinstance(reached, bool) else None,
        verdict=str(verdict["kind"]) if "kind" in verdict else None,
        **{figure: _number(result.get(figure)) for figure in figures},
    )


def _number(value: Any) -> Any:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0
    return value if usable and abs(value) < 2**63 else None


def _linked(folder: Path, root: Path) -> bool:
    between = [folder, *folder.parents]
    return any(path.is_symlink() for path in between[: between.index(root)])
