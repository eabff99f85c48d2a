"""`offbeat ps`, `stop` and `logs`: runs that go on elsewhere. What they need is imported when they are called."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.options import OutputFormat
from offbeat.errors import UsageError
from offbeat.limits import seconds

if TYPE_CHECKING:
    from offbeat.runtime.run.folder import RunFolder
    from offbeat.runtime.run.status import Status

_FOLLOW_EVERY = 0.2
RunName = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or its name below --out, e.g. latest.")]
Runs = Annotated[Path, typer.Option("--out", "-o", help="Directory of run folders.")]


def ps(
    folder: Annotated[Path, typer.Argument(metavar="[RUNS]", help="Directory of run folders.")] = Path("runs"),
    everything: Annotated[bool, typer.Option("--all", "-a", help="Include finished runs.")] = False,
    output: Annotated[
        OutputFormat, typer.Option("--format", help="[bold]json[/bold] prints a list on stdout.")
    ] = OutputFormat.text,
) -> None:
    """List running runs, with their processes and progress."""
    from offbeat.cli.output import print_json, printable
    from offbeat.runtime.run.status import statuses

    rows = [row for row in statuses(folder) if everything or row.alive]
    if output is OutputFormat.json:
        print_json([row.plain() for row in rows])
        return
    if not rows:
        typer.echo(f"No run in {folder} {'at all' if everything else 'is alive; offbeat ps --all shows those before'}.")
    for row in rows:
        for line in _lines(row):
            typer.echo(printable(line).replace("\n", "\\n"))


def _lines(row: Status) -> Iterator[str]:
    from offbeat.runtime.run.folder import strategy_in_words

    since = "" if row.started is None else f" since {row.started[:19].replace('T', ' ')}{_for(row)}"
    yield f"{Path(row.run).name}: {row.state}{since if row.alive else ''}"
    if not row.strategy:  # Its folder cannot be read: what it was is why.
        yield f"  {row.what}"
        return
    far = [] if row.step is None else [f"step {row.step:,}"]
    far += [] if row.score is None else [f"score {row.score:.4g}"]
    far += [] if row.seconds is None else [f"{row.seconds:.1f} s of training"]
    who = f"{row.workers} worker{'' if row.workers == 1 else 's'}"
    yield f"  {row.what} on {who}, {strategy_in_words(row.strategy)}{'; ' if far else ''}{', '.join(far)}"
    for one in row.processes:
        used = f"{one.cpu_seconds:8.1f} s CPU  {one.memory_bytes / 1e6:6.0f} MB"
        yield f"    {one.role:<10} pid {one.pid:<8} {one.state:<16} {used}"


def _for(row: Status) -> str:
    try:
        began = datetime.fromisoformat(row.started or "")
    except ValueError:
        return ""
    seconds = (datetime.now(began.tzinfo) - began).total_seconds()
    return f", for {seconds:.0f} s" if seconds < 600 else f", for {seconds / 60:.0f} min"


def stop(
    run: RunName,
    kill: Annotated[
        bool, typer.Option("--kill", help="At once, by SIGKILL: no checkpoint is written, no result is kept.")
    ] = False,
    within: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = 30.0,
    out: Runs = Path("runs"),
) -> None:
    """Stop a run as Ctrl-C in its terminal would, and wait until all of its processes have ended."""
    from offbeat.runtime.run.status import find_run
    from offbeat.runtime.run.status import stop as end

    seconds("--within", within)
    folder = find_run(run, out)
    state = end(folder, within, kill)
    typer.echo(f"{folder.path.name} has ended: {state}.")


def logs(
    run: RunName,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", "-r", help="Of this worker; may be given several times.")
    ] = None,
    server: Annotated[
        list[str] | None, typer.Option(help="Of this server: shard and copy, [bold]0.1[/bold], or the shard alone.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as long as the run does.")] = False,
    out: Runs = Path("runs"),
) -> None:
    """Print the output of a run's workers and servers, each line with its process."""
    from offbeat.runtime.launch import LogFollower
    from offbeat.runtime.run.status import find_run, status

    folder = find_run(run, out)
    files = _files(folder, rank or [], server or [])
    followers = {name: LogFollower(file, whole=True) for name, file in files.items()}
    while follow and status(folder).alive:
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


def _files(folder: RunFolder, ranks: list[int], servers: list[str]) -> dict[str, Path]:
    """The logs that are asked for, by whose they are."""
    there = _named(folder)
    wanted = [f"worker {rank}" for rank in ranks]
    wanted += [f"server {number if '.' in number else f'{number}.0'}" for number in servers]
    missing = [name for name in wanted if name not in there]
    if missing:
        raise UsageError(f"{folder.path} has no log of {', '.join(missing)}. There are: {', '.join(there) or 'none'}.")
    return {name: there[name] for name in wanted} if wanted else there


def _is_plain(path: Path) -> bool:
    """Whether it is a file of the folder itself: no link to elsewhere, no pipe."""
    return path.is_file() and not path.is_symlink()


def _named(folder: RunFolder) -> dict[str, Path]:
    """All logs of a run, by whose they are."""
    from offbeat.runtime.run.status import in_order

    found = {path.stem.replace("-", " "): path for path in (folder.path / "logs").glob("*-*.log") if _is_plain(path)}
    return {name: found[name] for name in sorted(found, key=in_order)}
