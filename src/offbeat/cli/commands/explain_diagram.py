"""`offbeat explain` with a picture, cuts or an export, of a run or of a log with vector clocks of any program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import typer

from offbeat.cli.commands.explain import explain_run
from offbeat.cli.commands.explain_options import ActionOptions, ActionsDone
from offbeat.cli.output import print_json, printable
from offbeat.errors import UsageError
from offbeat.monitor import recorded
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.foreign_log import account
from offbeat.protocols.causality.shiviz import parse_all
from offbeat.runtime.run.folder import RunFolder
from offbeat.runtime.run.untrusted_files import is_file

LARGEST: Final = 256 * 2**20
"""Bytes of a log."""
MATCHING: Final = 20.0
"""Seconds of computing for finding the events in a log."""


def explain(path: Path, wanted: ActionOptions, as_json: bool) -> None:
    """A run by its folder, or a log of any program by its file."""
    if is_file(path):
        if wanted.of_runs is not None:
            raise UsageError(
                f"{wanted.of_runs} is for runs that were made with `offbeat run --watch`, and {path} is a log: give a "
                f"run's folder, or omit it."
            )
        explain_log(path, wanted, as_json)
    elif wanted.of_logs is not None:
        raise UsageError(
            f"{wanted.of_logs} is for logs of other programs, and {path} is not a file: give one, or omit it."
        )
    else:
        _explain_run(path, wanted, as_json)


def _explain_run(path: Path, wanted: ActionOptions, as_json: bool) -> None:
    done = wanted.done(_scene(path)) if wanted.anything else ActionsDone()
    if wanted.of_runs is not None:
        replies = wanted.asked_of(recorded(RunFolder.open(path).path))
        done.lines += replies.lines
        done.plain |= replies.plain
    try:
        explain_run(path, as_json, done.plain)
    except typer.Exit as end:
        if not as_json:
            for line in done.lines:
                typer.echo(line)
        raise typer.Exit(end.exit_code or done.code) from None


def _scene(path: Path) -> Scene:
    folder = RunFolder.open(path)
    events = recorded(folder.path)
    return Scene.of(events.stamps, folder.path.name, events.dropped, events.servers)


def explain_log(path: Path, wanted: ActionOptions, as_json: bool) -> None:
    """Print what a log says, of each execution that it tells of, and do what else is wanted with it."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a log: {error}. Give a text file with vector clocks.") from error
    if len(raw) > LARGEST:
        raise UsageError(f"{path} has more than {LARGEST:,} bytes: cut it down to the part that matters.")
    with _computing_at_most(MATCHING, f"finding the events of {path}"):
        logs = parse_all(text, wanted.pattern, wanted.delimiter, wanted.execution)
    if len(logs) > 1 and wanted.anything:
        raise UsageError(
            f"{path} holds several executions, and pictures, cuts and exports are of one: name it, e.g. --execution "
            f"'{next(iter(logs))}'. There are: {', '.join(logs)}."
        )
    code = 0
    told: list[dict[str, Any]] = []
    for name, log in logs.items():
        found = account(log)
        title = " ".join([path.name, *([wanted.execution] if wanted.execution else [])])
        done = wanted.done(Scene(log.computation, title)) if len(logs) == 1 else ActionsDone()
        told.append({**found.plain(), **done.plain})
        for line in (
            () if as_json else (*([f"Execution {name}:"] if len(logs) > 1 else []), *found.lines(), *done.lines)
        ):
            typer.echo(printable(line))
        code = code or done.code
    if as_json:
        several = {"executions": [{"execution": name, **one} for name, one in zip(logs, told, strict=True)]}
        print_json({"log": str(path), **(told[0] if len(told) == 1 else several)})
    raise typer.Exit(code)


@contextmanager
def _computing_at_most(seconds: float, what: str) -> Generator[None]:
    """Give up what computes for longer: a pattern that a log brings along may try more ways than there are atoms."""

    def give_up(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise UsageError(
            f"{what} was given up after {seconds:g} s of computing: the pattern can fit in too many ways. Let each of "
            f"its parts exclude what follows it, as [^{{]* does where .* stands before a clock."
        )

    if threading.current_thread() is not threading.main_thread():  # Only there are signals heard.
        yield
        return
    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
