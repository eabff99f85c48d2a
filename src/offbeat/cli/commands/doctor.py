"""`offbeat doctor`: what a bug report needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console

from offbeat.cli.output import print_json
from offbeat.runtime.launch import Launcher
from offbeat.runtime.system.doctor import facts, self_test


def examine(as_json: bool) -> None:
    """Print the facts and the self-test's outcome; the exit code is 1 if it failed."""
    with Launcher() as launcher:
        found = facts()
        if not as_json:
            console = Console(highlight=False, soft_wrap=True)
            for name, value in found.items():
                console.print(f"[bold]{name.replace('_', ' '):20}[/bold] {_in_words(value)}")
            console.print("[bold]self-test[/bold]            two processes meet …", end=" ")
        outcome = self_test(launcher)
    if as_json:
        print_json(found | {"self_test": outcome})
    elif outcome["ok"]:
        print(
            f"fine: {outcome['seconds']:.1f} s, a small sum takes {outcome['small_sum_microseconds']:.0f} microseconds"
        )
    else:
        print(f"FAILED: {outcome.get('error', 'the sum was wrong')}")
    if not outcome["ok"]:
        raise typer.Exit(1)


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "-"  # pyright: ignore[reportUnknownVariableType]
    return "-" if value is None else str(value)
