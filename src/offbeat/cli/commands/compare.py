"""`offbeat compare`: from options to a comparison, and from its result to a table, a page or plain data."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.text import Text

from offbeat import limits
from offbeat.cli.commands.run import on_or_hosts
from offbeat.cli.display import Display, LivePanel, folded, panel, panel_width, progress_bar
from offbeat.cli.options import CompareOptions
from offbeat.cli.output import FailedError
from offbeat.errors import OffbeatError, UsageError
from offbeat.league import Entry, League, Planned, compare, report
from offbeat.league.report import fine_print, problems
from offbeat.runtime.run.folder import write_whole

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def compare_strategies(options: CompareOptions, goal: dict[str, Any]) -> None:
    """Run a comparison and print it."""
    chosen: dict[str, Any] = vars(options) | goal
    chosen |= {"tune": _factors(options.tune), "budget": _seconds(options.budget)}
    chosen["hosts"] = on_or_hosts(chosen.pop("on"), chosen["hosts"])
    form, file = chosen.pop("output"), chosen.pop("report")
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--report {file}: there is no folder {file.parent}. Make it first.")
    display = LeagueDisplay(quiet=form != "table")
    try:
        with display:
            league = compare(**chosen, spectator=display)
    except (OffbeatError, KeyboardInterrupt) as error:
        display.say_how_to_resume()
        raise FailedError(error, display.progress()) from error
    write_whole(league.folder / "league.html", report.page(league))
    write_whole(league.folder / "league.md", report.markdown(league))
    formats = {"json": report.json_of, "markdown": report.markdown, "csv": report.csv_of, "html": report.page}
    if form == "table" and file is None:
        _print_table(league, Console(highlight=False, width=None if sys.stdout.isatty() else report.WIDTH))
        return
    if form == "table":
        stream = io.StringIO()
        _print_table(league, Console(file=stream, highlight=False, width=report.WIDTH))
        text = stream.getvalue()
    else:
        text = formats[form](league)
    if file is None:
        sys.stdout.write(text)
    else:
        write_whole(file, text)


def _print_table(league: League, console: Console) -> None:
    console.print()
    console.print(report.table(league))
    console.print()
    for number, words in enumerate(league.outcome.words):
        console.print(escape(words), style="bold" if not number else "")
    console.print()
    for words in [*fine_print(league), *problems(league)]:
        console.print(escape(words), style="dim")
    console.print(f"Pictures and everything else: {escape(str(league.folder))}/league.html", soft_wrap=True)


def _factors(text: str) -> tuple[float, ...] | None:
    if text.strip() == "none":
        return None
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--tune {text!r} is neither none nor numbers such as 0.5,1,2.") from None


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|m|min|h|)\s*", text)
    if match is None:
        raise UsageError(f"--budget {text!r} is not a time. Write it like 90s, 10m or 1h.")
    seconds = float(match[1]) * _UNITS[match[2]]
    limits.seconds("--budget", seconds)
    return seconds


class LeagueDisplay(LivePanel):
    """Shows a comparison in progress on stderr: a line for each run, and on a terminal a live panel below them."""

    def __init__(self, quiet: bool) -> None:
        super().__init__(quiet)
        self._league: League | None = None
        self._done, self._left, self._seconds = 0, 0, 0.0
        self._current: Planned | None = None
        self._since = time.monotonic()
        self._run: _Run | None = None

    def begin(self, league: League, left: int, seconds: float) -> None:
        """Print what will be compared; on a terminal, open the live panel."""
        self._league, self._left, self._seconds = league, left, seconds
        if self._quiet:
            return
        names = ", ".join(contestant.name for contestant in league.contestants)
        self._print(f"Comparing {names}: {left} runs to do, in {league.folder}")
        for words in [*problems(league), *([league.facts["crowded"]] if league.facts.get("crowded") else [])]:
            self._print(words, "yellow")
        self._open_panel()

    def starting(self, planned: Planned) -> Display | None:
        """The display of the next run, which feeds the panel."""
        self._current, self._since = planned, time.monotonic()
        self._run = _Run(self._refresh)
        return self._run

    def ended(self, entry: Entry, league: League, left: int, seconds: float) -> None:
        """Print the result of a run."""
        self._done, self._left, self._seconds, self._league = self._done + 1, left, seconds, league
        if not self._quiet:
            remaining = _remaining(left, seconds) if self._live is None else ""  # The panel shows it, too.
            self._print(f"[{self._done}/{self._done + left}] {_name(entry)}: {_outcome(entry)}{remaining}")
            self._refresh()

    def say_how_to_resume(self) -> None:
        """Print, after an interruption or a failure, what is kept and the command that resumes it."""
        if self._league is not None:
            resume = f"offbeat compare --resume {self._league.folder}"
            self._print(f"{len(self._league.entries)} runs are kept. Resume with: {resume}")

    def progress(self) -> dict[str, Any]:
        """For JSON after a failure: the comparison's folder, and how many runs it has."""
        return {} if self._league is None else {"folder": str(self._league.folder), "runs": len(self._league.entries)}

    def _panel(self) -> Group:
        of, width = self._done + self._left, panel_width(self._console)
        spent = time.monotonic() - self._since
        line = f"{self._done} of {of} runs{_remaining(self._left, max(0.0, self._seconds - spent))}"
        rows = [progress_bar(self._done / max(of, 1), width), Text(line)]
        if self._current is not None:
            parts = [] if self._run is None else self._run.parts()
            rows += folded([Text(part) for part in (f"now: {_name(self._current)}", *parts)], width)
        return panel(rows, width)


class _Run(Display):
    """Progress of the current run, for the comparison's panel."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        super().__init__(quiet=True)
        self._refresh_all = refresh

    def begin(self, job: Any, folder: Any) -> None:
        """Print nothing: the output of scripts is in the logs."""
        del job, folder

    def _refresh(self) -> None:
        self._refresh_all()

    def parts(self) -> list[str]:
        """`step 57`, `score 0.94`."""
        if not self._progress:
            return [self._stage]
        return [f"step {self._progress['step']}", *(f"{name} {value:.4g}" for name, value in self._metrics.items())]


def _name(run: Planned | Entry) -> str:
    if run.tuning:
        return f"{run.name}, rate x{run.factor:g} (tuning)"
    return f"{run.name}, seed {run.seed}"


def _outcome(entry: Entry) -> str:
    if entry.reason is not None:
        return f"failed: {entry.reason.strip().splitlines()[0][:200]}"
    score = "" if entry.best_score is None else f", score {entry.best_score:.4g}"
    if entry.seconds_to_target is None:
        return f"missed the target in {entry.seconds:.2f} s{score}"
    return f"{entry.seconds_to_target:.2f} s to the target, {entry.steps} steps{score}"


def _remaining(left: int, seconds: float) -> str:
    if not left or not seconds:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"; about {f'{minutes} min ' if minutes else ''}{rest} s left"
