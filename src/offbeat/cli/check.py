"""`offbeat check`: the contract suite on one strategy."""

from __future__ import annotations

import time
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from offbeat import limits
from offbeat.cli.output import print_json
from offbeat.fitting import WARM
from offbeat.jobs import agreed_workers
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.strategies import Combined, combined, parse
from offbeat.testing import Check, bench, checks_for


def check_strategy(text: str, wanted: int | None, file: Path | None, as_json: bool) -> None:
    """Run every check that its traits demand; the exit code is 1 if one fails."""
    strategy = combined(parse(text))
    hosts = None if file is None else Hosts.read(file)
    workers = agreed_workers(hosts, wanted, 2)
    limits.whole("--workers", workers, limits.WORKERS, why="each is a process")
    strategy.check(workers)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{escape(str(strategy))}[/bold] on {workers} workers: what its traits promise, on real processes"
    )
    outcomes: dict[str, str | None] = {}
    with Launcher(WARM) as launcher:
        for check in checks_for(strategy):
            start = time.monotonic()
            outcomes[check.name] = failure = _failure(check, strategy, workers, launcher, hosts)
            mark = "[green]holds[/green]" if failure is None else "[red]FAILS[/red]"
            console.print(f"  {mark}  {check.name} ({time.monotonic() - start:.1f} s)")
            if failure is not None:
                console.print(f"         {failure}", markup=False)
    failed = [name for name, failure in outcomes.items() if failure is not None]
    if as_json:
        print_json({"strategy": str(strategy), "workers": workers, "failed": failed, "checks": outcomes})
    else:
        console.print(f"{len(outcomes) - len(failed)} of {len(outcomes)} hold.")
    if failed:
        raise typer.Exit(1)


def _failure(check: Check, strategy: Combined, workers: int, launcher: Launcher, hosts: Hosts | None) -> str | None:
    try:
        with bench(strategy, workers, launcher, hosts) as place:
            check.run(place)
    except Exception as error:
        return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return None
