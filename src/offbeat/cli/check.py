"""`offbeat check`: the contract suite on one strategy."""

from __future__ import annotations

import json
import time

import typer
from rich.console import Console
from rich.markup import escape

from offbeat.fitting import WARM
from offbeat.runtime.launch import Launcher
from offbeat.strategies import Combined, combined, parse
from offbeat.testing import Check, bench, checks_for


def check_strategy(text: str, workers: int, as_json: bool) -> None:
    """Run every check that its traits demand; the exit code is 1 if one fails."""
    strategy = combined(parse(text))
    strategy.check(workers)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{escape(str(strategy))}[/bold] on {workers} workers: what its traits promise, on real processes"
    )
    outcomes: dict[str, str | None] = {}
    with Launcher(WARM) as launcher:
        for check in checks_for(strategy):
            start = time.monotonic()
            outcomes[check.name] = failure = _failure(check, strategy, workers, launcher)
            mark = "[green]holds[/green]" if failure is None else "[red]FAILS[/red]"
            console.print(f"  {mark}  {check.name} ({time.monotonic() - start:.1f} s)")
            if failure is not None:
                console.print(f"         {failure}", markup=False)
    failed = [name for name, failure in outcomes.items() if failure is not None]
    if as_json:
        print(json.dumps({"strategy": str(strategy), "workers": workers, "failed": failed, "checks": outcomes}))
    else:
        console.print(f"{len(outcomes) - len(failed)} of {len(outcomes)} hold.")
    if failed:
        raise typer.Exit(1)


def _failure(check: Check, strategy: Combined, workers: int, launcher: Launcher) -> str | None:
    try:
        with bench(strategy, workers, launcher) as place:
            check.run(place)
    except Exception as error:
        return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return None
