"""`offbeat ps`, `stop` and `logs`: runs in other terminals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import typer

from offbeat.cli.options import LogsOptions, PsOptions, StopOptions
from offbeat.cli.output import print_json, printable
from offbeat.errors import UsageError
from offbeat.limits import seconds
from offbeat.runtime.launch import LogFollower
from offbeat.runtime.run import status
from offbeat.runtime.run.folder import RunFolder, strategy_in_words

_FOLLOW_EVERY = 0.2


def ps(options: PsOptions) -> None:
    """List running runs, with their processes and progress."""
    rows = [row for row in status.statuses(options.folder) if options.everything or row.alive]
    if options.as_json:
        print_json([row.plain() for row in rows])
        return
    if not rows:
        none = "at all" if options.everything else "is running; offbeat ps --all includes finished ones"
        typer.echo(f"No run in {options.folder} {none}.")
    for row in rows:
        for line in _lines(row):
            typer.echo(printable(line).replace("\n", "\\n"))


def _lines(row: status.Status) -> Iterator[str]:
    since = "" if row.started is None else f" since {row.started[:19].replace('T', ' ')}{_for(row)}"
    yield f"{Path(row.run).name}: {row.state}{since if row.alive else ''}"
    if not row.strategy:  # Its folder cannot be read; `what` says why.
        yield f"  {row.what}"
        return
    far = [] if row.step is None else [f"step {row.step:,}"]
    far += [] if row.score is None else [f"score {row.score:.4g}"]
    far += [] if row.seconds is None else [f"{row.seconds:.1f} s of training"]
    who = f"{row.workers} worker{'' if row.workers == 1 else 's'}"
    yield f"  {row.what} on {who}, {strategy_in_words(row.strategy)}{'; ' if far else ''}{', '.join(far)}"
    for process in row.processes:
        used = f"{process.cpu_seconds:8.1f} s CPU  {process.memory_bytes / 1e6:6.0f} MB"
        yield f"    {process.role:<10} pid {process.pid:<8} {process.state:<16} {used}"


def _for(row: status.Status) -> str:
    try:
        began = datetime.fromisoformat(row.started or "")
    except ValueError:
        return ""
    seconds = (datetime.now(began.tzinfo) - began).total_seconds()
    return f", for {seconds:.0f} s" if seconds < 600 else f", for {seconds / 60:.0f} min"


def stop(options: StopOptions) -> None:
    """Stop a run, and wait until all of its processes have ended."""
    seconds("--within", options.within)
    folder = status.find_run(options.run, options.out)
    state = status.stop(folder, options.within, options.kill)
    typer.echo(f"{folder.path.name} has ended: {state}.")


def logs(options: LogsOptions) -> None:
    """Print the output of a run's workers and servers, each line with its process."""
    folder = status.find_run(options.run, options.out)
    files = _files(folder, options)
    followers = {name: LogFollower(file, whole=True) for name, file in files.items()}
    while options.follow and status.status(folder).alive:
        for name, follower in followers.items():
            _print(name, follower.new_text(), len(files) > 1)
        time.sleep(_FOLLOW_EVERY)
    for name, follower in followers.items():
        while text := follower.new_text():  # In parts: a log may be larger than the memory.
            _print(name, text, len(files) > 1)
        _print(name, follower.rest(), len(files) > 1)


def _print(name: str, text: str, named: bool) -> None:
    for line in text.splitlines():
        typer.echo(f"{name} | {line}" if named else line)


def _files(folder: RunFolder, options: LogsOptions) -> dict[str, Path]:
    """The requested logs, by process."""
    files = _named(folder)
    requested = [f"worker {rank}" for rank in options.rank]
    requested += [f"server {number if '.' in number else f'{number}.0'}" for number in options.server]
    missing = [name for name in requested if name not in files]
    if missing:
        raise UsageError(f"{folder.path} has no log of {', '.join(missing)}. There are: {', '.join(files) or 'none'}.")
    return {name: files[name] for name in requested} if requested else files


def _named(folder: RunFolder) -> dict[str, Path]:
    """All logs of a run, by process; only plain files of the folder itself, not links or pipes."""
    paths = (folder.path / "logs").glob("*-*.log")
    files = {path.stem.replace("-", " "): path for path in paths if path.is_file() and not path.is_symlink()}
    return {name: files[name] for name in sorted(files, key=status.in_order)}
