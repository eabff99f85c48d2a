"""`offbeat explain LOG`: what a log with vector clocks says, of whichever program."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from offbeat.cli.wanted import Wanted
from offbeat.errors import UsageError
from offbeat.monitor.accounts import account
from offbeat.monitor.scenes import Scene
from offbeat.protocols.causality.shiviz import parse


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
