"""`offbeat explain` with a picture, cuts or an export, of a run or of a log with vector clocks of any program."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from offbeat.cli.explain import explain_run
from offbeat.cli.wanted import Done, Wanted
from offbeat.errors import UsageError
from offbeat.monitor import recorded
from offbeat.monitor.accounts import account
from offbeat.monitor.scenes import Scene
from offbeat.protocols.causality.shiviz import parse
from offbeat.runtime.records import RunFolder


def explain(path: Path, wanted: Wanted, as_json: bool) -> None:
    """A run by its folder, or a log of any program by its file."""
    if path.is_file():
        explain_log(path, wanted, as_json)
    elif wanted.pattern is not None or wanted.execution is not None:
        option = "--pattern" if wanted.pattern is not None else "--execution"
        raise UsageError(f"{option} is for logs of other programs, and {path} is no file: give one, or leave it away.")
    else:
        _explain_run(path, wanted, as_json)


def _explain_run(path: Path, wanted: Wanted, as_json: bool) -> None:
    done = wanted.done(_scene(path)) if wanted.anything else Done()
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


def explain_log(path: Path, wanted: Wanted, as_json: bool) -> None:
    """Print what a log says, and do what else is wanted with it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a log: {error}. Give a text file with vector clocks.") from error
    log = parse(text, wanted.pattern, wanted.execution)
    found = account(log)
    done = wanted.done(Scene(log.computation, " ".join([path.name, *([wanted.execution] if wanted.execution else [])])))
    if as_json:
        print(json.dumps({"log": str(path), **found.plain(), **done.plain}))
    else:
        for line in (*found.lines(), *done.lines):
            typer.echo(line)
    raise typer.Exit(done.code)
