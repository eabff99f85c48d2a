"""`offbeat explain` of a run or of any program's log with vector clocks, with a picture, cuts or an export."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import typer

from offbeat.cli.commands.explain import check_checkpoint, explain_run
from offbeat.cli.commands.explain_options import ActionOptions, ActionsDone
from offbeat.cli.options import ExplainTarget
from offbeat.cli.output import print_json, printable
from offbeat.errors import UsageError
from offbeat.monitor import recorded
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.foreign_log import account
from offbeat.protocols.causality.shiviz import parse_all
from offbeat.runtime.run.folder import RunFolder
from offbeat.runtime.run.untrusted_files import is_file

LARGEST: Final = 256 * 2**20
"""Largest log, in bytes."""
MATCHING: Final = 20.0
"""CPU seconds for finding the events in a log."""


def explain(target: ExplainTarget, options: dict[str, Any]) -> None:
    """Explain a run by its folder, or a log of any program by its file; or verify a checkpoint."""
    path, actions = target.path, ActionOptions(**options)
    if target.check:
        check_checkpoint(path, target.as_json)
    elif is_file(path):
        if actions.of_runs is not None:
            raise UsageError(
                f"{actions.of_runs} is for runs recorded with `offbeat run --monitor`, and {path} is a log: give a run "
                f"folder, or omit it."
            )
        _explain_log(path, actions, target.as_json)
    elif actions.of_logs is not None:
        raise UsageError(
            f"{actions.of_logs} is for logs of other programs, and {path} is not a file: give one, or omit it."
        )
    else:
        _explain_run(path, actions, target.as_json)


def _explain_run(path: Path, actions: ActionOptions, as_json: bool) -> None:
    done = actions.done(_scene(path)) if actions.anything else ActionsDone()
    if actions.of_runs is not None:
        answers = actions.answers(recorded(RunFolder.open(path).path))
        done.lines += answers.lines
        done.plain |= answers.plain
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


def _explain_log(path: Path, actions: ActionOptions, as_json: bool) -> None:
    """Print what a log shows of each of its executions, with pictures, cuts and exports."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a log: {error}. Give a text file with vector clocks.") from error
    if len(raw) > LARGEST:
        raise UsageError(f"{path} has more than {LARGEST:,} bytes: cut it to the part that matters.")
    with _computing_at_most(MATCHING, f"finding the events of {path}"):
        logs = parse_all(text, actions.pattern, actions.delimiter, actions.execution)
    if len(logs) > 1 and actions.anything:
        raise UsageError(
            f"{path} holds several executions, and pictures, cuts and exports are of one: name it, e.g. --execution "
            f"'{next(iter(logs))}'. There are: {', '.join(logs)}."
        )
    code = 0
    results: list[dict[str, Any]] = []
    for name, log in logs.items():
        summary = account(log)
        title = " ".join([path.name, *([actions.execution] if actions.execution else [])])
        done = actions.done(Scene(log.computation, title)) if len(logs) == 1 else ActionsDone()
        results.append({**summary.plain(), **done.plain})
        for line in (
            () if as_json else (*([f"Execution {name}:"] if len(logs) > 1 else []), *summary.lines(), *done.lines)
        ):
            typer.echo(printable(line))
        code = code or done.code
    if as_json:
        several = {"executions": [{"execution": name, **result} for name, result in zip(logs, results, strict=True)]}
        print_json({"log": str(path), **(results[0] if len(results) == 1 else several)})
    raise typer.Exit(code)


@contextmanager
def _computing_at_most(seconds: float, what: str) -> Generator[None]:
    """Give up after these CPU seconds: a pattern from a stranger may backtrack forever."""

    def give_up(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise UsageError(
            f"{what} was given up after {seconds:g} s of computing: the pattern can match in too many ways. Let each "
            f"of its parts exclude what follows it: [^{{]* instead of .* before a clock."
        )

    if threading.current_thread() is not threading.main_thread():  # Only the main thread gets signals.
        yield
        return
    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
