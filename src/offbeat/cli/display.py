"""Progress of a run on stderr: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from offbeat.cli.commands.watch import LivePage
from offbeat.errors import OffbeatError
from offbeat.monitor import Verdict
from offbeat.run.job import Job, Script
from offbeat.run.machines import placement
from offbeat.runtime.launch import LogFollower, Role
from offbeat.runtime.run.folder import RunFolder
from offbeat.runtime.run.report import kinds_in_words, pushes_in_words, shares, staleness_in_words, updates_in_words
from offbeat.runtime.state.checkpoint import newest

PANEL_WIDTH = 58
"""Most columns of a live panel: a resized terminal rewraps longer lines, and then it is unknown how many to erase."""
_LINE_EVERY = 5.0  # Seconds between plain lines of progress while nothing is reported.
_SCRIPT_LINE_EVERY = 60.0  # The same for a script that has joined no team: all that is known is that it runs.
_COLORS = {
    "input": "cyan",
    "compute": "green",
    "communicate": "yellow",
    "wait": "red",
    "bubble": "magenta",
    "evaluate": "blue",
    "other": "white",
}


class LivePanel(ABC):
    """Lines on stderr, and on a terminal a live panel below them."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self._panel())
            self._live.stop()
            self._live = None

    @abstractmethod
    def _panel(self) -> Group:
        """The panel as it is now."""

    def _open_panel(self) -> None:
        if self._console.is_terminal:
            self._live = Live(self._panel(), console=self._console, refresh_per_second=8, transient=True)
            self._live.start()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._panel())

    def _print(self, text: str, style: str = "") -> None:
        """Print a line above the panel."""
        console = self._console if self._live is None else self._live.console
        console.print(text, style=style, soft_wrap=True, markup=False)


class Display(LivePanel):
    """Shows one run; a `Watcher` of it."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._job: Job | None = None
        self._folder: RunFolder | None = None
        self._log: LogFollower | None = None
        self._page: LivePage | None = None
        self._progress: dict[str, Any] = {}
        self._reporter = "worker 0"
        self._metrics: dict[str, float] = {}
        self._stage, self._start = "starting", time.monotonic()
        self._script_alone = False  # a script runs that has joined no team
        self._last_line = self._start

    def __exit__(self, *error: object) -> None:
        self._echo(final=True)
        if self._page is not None:
            self._page.close()
        super().__exit__(*error)

    def begin(self, job: Job, folder: RunFolder) -> None:
        """Print what will run; on a terminal, open the live panel."""
        self._job, self._folder = job, folder
        self._log = LogFollower(folder.log("worker", 0)) if isinstance(job.what, Script) else None
        if self._quiet:
            return
        workers = f"{job.workers} worker{'s' if job.workers > 1 else ''}"
        how = f", {job.goal.strategy}" if job.goal.strategy else ""  # A script may still choose it.
        resumed = ", resumed" if job.resume else ""
        where = escape(f"on {workers}{how}{resumed} (logs in {folder.path / 'logs'})")
        self._console.print(f"[bold]{escape(str(job.what))}[/bold] {where}", soft_wrap=True)
        for line in placement(job) if job.hosts is not None else ():
            self._print(f"  {line}")
        if job.goal.watch:
            self._page = LivePage(folder.path)
            self._print(self._page.words)
        self._open_panel()

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """Take in a worker's progress; print whom it waits for at its end."""
        match message.get("kind"):
            case "script":
                self._enter(f"{Path(message['script']).name} is running", script_alone=True)
            case "ready":
                self._enter("training starts")
            case "progress":
                self._progress, self._reporter = dict(message), str(role)
            case "report":
                self._progress, self._reporter = dict(message), str(role)
                self._metrics = dict(message["metrics"])
                self._line()
            case "plan":
                self._print(message["text"])
            case "lingering" if role.rank or self._log is None:  # The log of worker 0 is shown.
                self._print(message["text"])
            case _:
                pass

    def _enter(self, stage: str, script_alone: bool = False) -> None:
        """Show a stage that the first worker has reached, until there is progress to show."""
        if self._stage != stage and not self._progress:
            self._stage, self._start = stage, time.monotonic()
            self._script_alone = script_alone

    def tick(self) -> None:
        """Refresh what is shown."""
        self._echo()
        self._refresh()
        alone = self._script_alone and not self._progress
        if time.monotonic() - self._last_line > (_SCRIPT_LINE_EVERY if alone else _LINE_EVERY):
            self._line()

    def verdict(self, verdict: Verdict) -> None:
        """Print a verdict, also with --format json: this is stderr."""
        self._print(str(verdict))

    def say_how_to_resume(self) -> None:
        """Print, after a failure, the last checkpoint and the command that resumes it."""
        kept = None if self._folder is None else newest(self._folder.checkpoints)
        if self._folder is not None and kept is not None:
            command = f"{this_command()} run --resume {shlex.quote(str(self._folder.path))}"
            self._print(f"The last checkpoint is complete ({kept.name}). Resume with: {command}")

    def result_so_far(self) -> dict[str, Any]:
        """The partial result in the run folder after a failure; empty if no run was started."""
        with suppress(OffbeatError):  # What has failed may be the disk.
            return (self._folder.read().get("result") or {}) if self._folder is not None else {}
        return {}

    def _echo(self, final: bool = False) -> None:
        """Print the output of worker 0 of a script; that of the others is in the logs."""
        if self._log is None:
            return
        text = self._log.rest() if final else self._log.new_text()
        if not text:
            return
        if self._quiet:
            sys.stderr.write(text)
        elif self._live is not None:
            self._live.console.out(text, end="", highlight=False)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _line(self) -> None:
        if not self._quiet and self._live is None:
            self._last_line = time.monotonic()
            self._print(self.in_words())

    def in_words(self) -> str:
        """Progress in one line."""
        if not self._progress:
            return self._waiting()
        return "  ".join([*self._numbers(), self._whose() + kinds_in_words(self._progress["seconds_by_kind"])])

    def _waiting(self) -> str:
        """The stage, before any progress was reported."""
        return f"{self._stage} … {time.monotonic() - self._start:.0f} s"

    def _whose(self) -> str:
        """Whose time is shown during the run; at the end it is the mean of all workers."""
        return f"{self._reporter}: " if self._job is not None and self._job.workers > 1 else ""

    def _numbers(self) -> list[str]:
        progress = self._progress
        speed = progress["samples"] / progress["seconds"] if progress.get("seconds") else 0.0
        parts = [
            f"{'round' if progress.get('rounds') else 'step'} {progress['step']}",
            "" if progress.get("epoch") is None else f"epoch {progress['epoch']}",
            "" if progress.get("loss") is None else f"loss {progress['loss']:.4f}",
            *(f"{name} {value:.4g}" for name, value in self._metrics.items()),
            "" if progress.get("epsilon") is None else f"epsilon {progress['epsilon']:.3g}",
            f"{speed:,.0f} examples/s" if speed else "",
            staleness_in_words(progress.get("staleness", {})),
            pushes_in_words(progress.get("pushes", {}), trouble_only=True),
            "updates: " + updates_in_words(progress["rounds"]) if progress.get("rounds") else "",
            f"replicas {progress['distance']:.2g} apart" if progress.get("distance") else "",
        ]
        return list(filter(None, parts))

    def _panel(self) -> Group:
        width = panel_width(self._console)
        if not self._progress:
            return panel([Text(self._waiting(), style="dim")], width)
        rows = folded([Text(part, style="bold") for part in self._numbers()], width)
        done = self._share_done()
        if done is not None:
            rows.insert(0, progress_bar(done, width))
        return panel([*rows, *_time_rows(self._progress["seconds_by_kind"], self._whose(), width)], width)

    def _share_done(self) -> float | None:
        goal = self._job.goal if self._job else None
        if goal is not None and goal.steps:
            return min(1.0, self._progress["step"] / goal.steps)
        if goal is not None and goal.epochs and self._progress.get("epoch"):
            return min(1.0, max(0, self._progress["epoch"] - 1) / goal.epochs)
        return None


def panel_width(console: Console) -> int:
    """Columns of a live panel at the terminal's current width."""
    return max(1, min(PANEL_WIDTH, console.width - 1))


def panel(rows: Iterable[Text], width: int) -> Group:
    """Rows, truncated to this width."""
    lines = list(rows)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def folded(parts: Iterable[Text], width: int) -> list[Text]:
    """Parts side by side, on as many rows as they need; none is split."""
    rows: list[Text] = []
    for part in parts:
        if rows and rows[-1].cell_len + 2 + part.cell_len <= width:
            rows[-1].append("  ").append_text(part)
        else:
            rows.append(part.copy())
    return rows


def progress_bar(share: float, width: int) -> Text:
    """A bar filled to this share."""
    full = round(width * share)
    return Text("━" * full, style="magenta").append("━" * (width - full), style="bright_black")


def _time_rows(seconds: Mapping[str, float], whose: str, width: int) -> list[Text]:
    """A bar of where the time went, and its legend."""
    split = shares(seconds)
    bar = Text()
    reached, drawn = 0.0, 0
    for kind, share in split:
        reached += width * share
        bar.append("█" * (round(reached) - drawn), style=_COLORS.get(kind, "white"))
        drawn = round(reached)
    names = [Text(f"{kind} {100 * share:.0f} %", style=_COLORS.get(kind, "white")) for kind, share in split]
    return [bar, *folded([Text(whose.strip()), *names] if whose else names, width)]


def this_command() -> str:
    """How to call this program again: by its name, if that is on the path."""
    if shutil.which("offbeat"):
        return "offbeat"
    return shlex.quote(sys.argv[0]) if Path(sys.argv[0]).name == "offbeat" else "python -m offbeat"
