"""`offbeat doctor`: what a bug report needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console

from offbeat.cli.options import DoctorOptions
from offbeat.cli.output import print_json
from offbeat.runtime.launch import Launcher
from offbeat.runtime.system.doctor import facts, self_test


def examine(options: DoctorOptions) -> None:
    """Print facts about the machine and the result of the self-test; the exit code is 1 if it failed."""
    with Launcher() as launcher:
        machine = facts()
        if not options.as_json:
            console = Console(highlight=False, soft_wrap=True)
            for name, value in machine.items():
                console.print(f"[bold]{name.replace('_', ' '):20}[/bold] {_in_words(value)}")
            console.print("[bold]self-test[/bold]            two processes communicate …", end=" ")
        test = self_test(launcher)
    if options.as_json:
        print_json(machine | {"self_test": test})
    elif test["ok"]:
        print(f"fine: {test['seconds']:.1f} s, a small sum takes {test['small_sum_microseconds']:.0f} microseconds")
    else:
        print(f"FAILED: {test.get('error', 'the sum was wrong')}")
    if not test["ok"]:
        raise typer.Exit(1)


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "-"  # pyright: ignore[reportUnknownVariableType]
    return "-" if value is None else str(value)
