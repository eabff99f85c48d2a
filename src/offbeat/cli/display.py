"""How a run is shown while it goes, on stderr: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offbeat.cli.watch import LivePage
from offbeat.jobs import Job, Script
from offbeat.monitor import Verdict
from offbeat.runtime.checkpoint import newest
from offbeat.runtime.launch import LogFollower, Role
from offbeat.runtime.records import RunFolder

_LINE_EVERY = 5.0
"""Seconds between two plain lines of progress, when nothing is reported."""
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
        self._metrics: dict[str, float] = {}
        self._start = time.monotonic()
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
        again = ", resumed" if job.resume else ""
        self._console.print(
            f"[bold]{escape(str(job.what))}[/bold] "
            + escape(f"on {workers}, {job.goal.strategy}{again} (logs in {folder.path / 'logs'})"),
            soft_wrap=True,
        )
        if job.goal.watch:
            self._page = LivePage(folder.path)
            self._console.print(self._page.words, soft_wrap=True, markup=False)
        if self._console.is_terminal:
            self._live = Live(self._panel(), console=self._console, refresh_per_second=8, transient=True)
            self._live.start()

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """Take in how far a worker is."""
        if message.get("kind") not in ("progress", "report"):
            return
        self._far = dict(message)
        if message["kind"] == "report":
            self._metrics = dict(message["metrics"])
            self._line()
        del role

    def tick(self) -> None:
        """Refresh what is shown."""
        self._echo()
        if self._live is not None:
            self._live.update(self._panel())
        elif time.monotonic() - self._last_line > _LINE_EVERY:
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
            text = f"The last checkpoint is whole ({kept.name}). Go on with: offbeat run --resume {self._folder.path}"
            self._console.print(text, soft_wrap=True, markup=False)

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
        if not self._far:
            self._console.print(f"starting … {time.monotonic() - self._start:.0f} s", soft_wrap=True)
            return
        self._console.print(
            "  ".join(self._numbers()) + "  " + kinds_in_words(self._far["seconds_by_kind"]), soft_wrap=True
        )

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

    def _panel(self) -> Group | Text:
        if not self._far:
            return Text(f"starting … {time.monotonic() - self._start:.0f} s", style="dim")
        table = Table.grid(padding=(0, 2))
        table.add_row(Text("  ".join(self._numbers()), style="bold"))
        table.add_row(_split_bar(self._far["seconds_by_kind"]))
        done = self._share_done()
        return Group(ProgressBar(total=1.0, completed=done, width=60), table) if done is not None else Group(table)

    def _share_done(self) -> float | None:
        goal = self._job.goal if self._job else None
        if goal is not None and goal.steps:
            return min(1.0, self._far["step"] / goal.steps)
        if goal is not None and goal.epochs and self._far.get("epoch"):
            return min(1.0, max(0, self._far["epoch"] - 1) / goal.epochs)
        return None


def staleness_in_words(counts: Mapping[str, int]) -> str:
    """`reads 0.8 steps old (most 3)`; nothing if all were fresh."""
    total = sum(counts.values())
    mean = sum(int(steps) * count for steps, count in counts.items()) / total if total else 0.0
    return f"reads {mean:.2g} steps old (most {max(map(int, counts))})" if mean else ""


def gossip_in_words(gossip: Mapping[str, Any]) -> str:
    """What the graph promises of the replicas' coming together, and what was measured."""
    said = f"spectral gap {gossip['spectral_gap']:.3g}: a step leaves at most {gossip['rate']:.3g} of the distance"
    if gossip.get("measured_rate") is not None:
        said += f"; measured {gossip['measured_rate']:.3g}, expected of random ones {gossip['usual_rate']:.3g}"
    return said


def pushes_in_words(counts: Mapping[str, int], trouble_only: bool = False) -> str:
    """`229 applied, 1 late`, largest first."""
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {what}" for what, count in ranked if not (trouble_only and what == "applied"))


def kinds_in_words(seconds: Mapping[str, float]) -> str:
    """`compute 61 %, communicate 20 %, …`, largest first."""
    total = sum(seconds.values()) or 1.0
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {100 * spent / total:.0f} %" for kind, spent in ranked if spent / total >= 0.005)


def _split_bar(seconds: Mapping[str, float], width: int = 60) -> Text:
    total = sum(seconds.values()) or 1.0
    bar = Text()
    for kind, spent in seconds.items():
        bar.append("█" * round(width * spent / total), style=_COLORS.get(kind, "white"))
    bar.append("\n")
    for kind, spent in seconds.items():
        if spent / total >= 0.01:
            bar.append(f"{kind} {100 * spent / total:.0f}% ", style=_COLORS.get(kind, "white"))
    return bar
