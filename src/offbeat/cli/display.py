"""How a run is shown while it goes, on stderr: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from offbeat.cli.commands.watch import LivePage
from offbeat.cli.next_steps import this_command
from offbeat.errors import OffbeatError
from offbeat.monitor import Verdict
from offbeat.run.job import Job, Script
from offbeat.runtime.launch import LogFollower, Role
from offbeat.runtime.run.folder import RunFolder
from offbeat.runtime.run.report import kinds_in_words, pushes_in_words, shares, staleness_in_words
from offbeat.runtime.state.checkpoint import newest

PANEL_WIDTH = 58
"""Columns that a live panel takes at most.

Less than the narrowest terminal that it is made for has: when a window is resized, terminals fold lines anew that are
longer than it is wide, and nobody can tell afterwards how many lines are to be erased.
"""
_LINE_EVERY = 5.0
"""Seconds between two plain lines of progress, when nothing is reported."""
_SCRIPT_LINE_EVERY = 60.0
"""The same while a script that has joined no team runs: all there is to tell is that it does."""
_COLORS = {
    "input": "cyan",
    "compute": "green",
    "communicate": "yellow",
    "wait": "red",
    "evaluate": "blue",
    "other": "white",
}


class Display:
    """Shows one run; told about it as a `Watcher`."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._job: Job | None = None
        self._folder: RunFolder | None = None
        self._log: LogFollower | None = None
        self._page: LivePage | None = None
        self._far: dict[str, Any] = {}
        self._teller = "worker 0"
        self._metrics: dict[str, float] = {}
        self._stage, self._start = "starting", time.monotonic()
        self._script_alone = False  # a script runs that has joined no team
        self._last_line = self._start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._echo(final=True)
        if self._page is not None:
            self._page.close()
        if self._live is not None:
            self._live.update(self._panel())
            self._live.stop()
            self._live = None

    def begin(self, job: Job, folder: RunFolder) -> None:
        """Say what is about to run; on a terminal, open the live panel."""
        self._job, self._folder = job, folder
        self._log = LogFollower(folder.log("worker", 0)) if isinstance(job.what, Script) else None
        if self._quiet:
            return
        workers = f"{job.workers} worker{'s' if job.workers > 1 else ''}"
        how = f", {job.goal.strategy}" if job.goal.strategy else ""  # A script may still say it.
        again = ", resumed" if job.resume else ""
        self._console.print(
            f"[bold]{escape(str(job.what))}[/bold] "
            + escape(f"on {workers}{how}{again} (logs in {folder.path / 'logs'})"),
            soft_wrap=True,
        )
        if job.goal.watch:
            self._page = LivePage(folder.path)
            self._console.print(self._page.words, soft_wrap=True, markup=False)
        if self._console.is_terminal:
            self._live = Live(self._panel(), console=self._console, refresh_per_second=8, transient=True)
            self._live.start()

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """Take in how far a worker is; pass on whom it waits for at its end."""
        match message.get("kind"):
            case "script":
                self._enter(f"{Path(message['script']).name} is running", script_alone=True)
            case "ready":
                self._enter("training starts")
            case "progress":
                self._far, self._teller = dict(message), str(role)
            case "report":
                self._far, self._teller = dict(message), str(role)
                self._metrics = dict(message["metrics"])
                self._line()
            case "lingering" if role.rank or self._log is None:  # The log of worker 0 is shown.
                console = self._console if self._live is None else self._live.console
                console.print(message["text"], soft_wrap=True, markup=False)
            case _:
                pass

    def _enter(self, stage: str, script_alone: bool = False) -> None:
        """A run goes through its stages once, whichever worker says it first; then its progress is shown."""
        if self._stage != stage and not self._far:
            self._stage, self._start = stage, time.monotonic()
            self._script_alone = script_alone

    def tick(self) -> None:
        """Refresh what is shown."""
        self._echo()
        alone = self._script_alone and not self._far
        if self._live is not None:
            self._live.update(self._panel())
        elif time.monotonic() - self._last_line > (_SCRIPT_LINE_EVERY if alone else _LINE_EVERY):
            self._line()

    def verdict(self, verdict: Verdict) -> None:
        """Say what may be wrong, also to those who read the result as JSON: this is stderr."""
        console = self._console if self._live is None else self._live.console
        console.print(str(verdict), soft_wrap=True, markup=False)

    def say_how_to_resume(self) -> None:
        """After a failure: what is kept, and how to go on from it."""
        if self._folder is None:
            return
        kept = newest(self._folder.checkpoints)
        if kept is not None:
            command = f"{this_command()} run --resume {shlex.quote(str(self._folder.path))}"
            text = f"The last checkpoint is whole ({kept.name}). Go on with: {command}"
            self._console.print(text, soft_wrap=True, markup=False)

    def result_so_far(self) -> dict[str, Any]:
        """After a failure: what the run's folder keeps of its result; nothing if no run was started."""
        with suppress(OffbeatError):  # What has failed may be the disk.
            return (self._folder.read().get("result") or {}) if self._folder is not None else {}
        return {}

    def _echo(self, final: bool = False) -> None:
        """Pass on what worker 0 of a script prints; the others are in the logs."""
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
        if self._quiet or self._live is not None:
            return
        self._last_line = time.monotonic()
        self._console.print(self.in_words(), soft_wrap=True, markup=False)

    def in_words(self) -> str:
        """How far it is, in a line."""
        if not self._far:
            return self._waiting()
        return "  ".join([*self._numbers(), self._of_whom() + kinds_in_words(self._far["seconds_by_kind"])])

    def _waiting(self) -> str:
        """What is known as long as nobody has told of any progress."""
        return f"{self._stage} … {time.monotonic() - self._start:.0f} s"

    def _of_whom(self) -> str:
        """Whose time is split up while a run goes; in the end it is the mean of all workers."""
        return f"{self._teller}: " if self._job is not None and self._job.workers > 1 else ""

    def _numbers(self) -> list[str]:
        far = self._far
        speed = far["samples"] / far["seconds"] if far.get("seconds") else 0.0
        epoch = "" if far.get("epoch") is None else f"epoch {far['epoch']}"
        loss = "" if far.get("loss") is None else f"loss {far['loss']:.4f}"
        scores = [f"{name} {value:.4g}" for name, value in self._metrics.items()]
        return [
            part
            for part in (
                f"step {far['step']}",
                epoch,
                loss,
                *scores,
                f"{speed:,.0f} examples/s" if speed else "",
                staleness_in_words(far.get("staleness", {})),
                pushes_in_words(far.get("pushes", {}), trouble_only=True),
                f"replicas {far['distance']:.2g} apart" if far.get("distance") else "",
            )
            if part
        ]

    def _panel(self) -> Group:
        width = panel_width(self._console)
        if not self._far:
            return panel([Text(self._waiting(), style="dim")], width)
        rows = folded([Text(part, style="bold") for part in self._numbers()], width)
        done = self._share_done()
        if done is not None:
            rows.insert(0, progress_bar(done, width))
        return panel([*rows, *_time_rows(self._far["seconds_by_kind"], self._of_whom(), width)], width)

    def _share_done(self) -> float | None:
        goal = self._job.goal if self._job else None
        if goal is not None and goal.steps:
            return min(1.0, self._far["step"] / goal.steps)
        if goal is not None and goal.epochs and self._far.get("epoch"):
            return min(1.0, max(0, self._far["epoch"] - 1) / goal.epochs)
        return None


def panel_width(console: Console) -> int:
    """Columns of a live panel on this terminal as it is now."""
    return max(1, min(PANEL_WIDTH, console.width - 1))


def panel(rows: Iterable[Text], width: int) -> Group:
    """Rows, none of them wider than this."""
    fitting = list(rows)
    for row in fitting:
        row.truncate(width, overflow="ellipsis")
    return Group(*fitting)


def folded(parts: Iterable[Text], width: int) -> list[Text]:
    """Parts side by side, on as many rows as they need; none is torn apart."""
    rows: list[Text] = []
    for part in parts:
        if rows and rows[-1].cell_len + 2 + part.cell_len <= width:
            rows[-1].append("  ").append_text(part)
        else:
            rows.append(part.copy())
    return rows


def progress_bar(share: float, width: int) -> Text:
    """So much of a row is filled."""
    full = round(width * share)
    return Text("━" * full, style="magenta").append("━" * (width - full), style="bright_black")


def _time_rows(seconds: Mapping[str, float], whose: str, width: int) -> list[Text]:
    """A bar of where the time went, and what its colours mean."""
    split = shares(seconds)
    bar = Text()
    reached, drawn = 0.0, 0
    for kind, share in split:
        reached += width * share
        bar.append("█" * (round(reached) - drawn), style=_COLORS.get(kind, "white"))
        drawn = round(reached)
    names = [Text(f"{kind} {100 * share:.0f} %", style=_COLORS.get(kind, "white")) for kind, share in split]
    return [bar, *folded([Text(whose.strip()), *names] if whose else names, width)]
