"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

What = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="A script ([bold]train.py[/bold], its arguments after [bold]--[/bold]) or a task "
        "([bold]file.py:Class[/bold], or a module such "
        "as [bold]offbeat.tasks.digits[/bold]). May be left out with --resume.",
    ),
]
TargetScore = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        help="Stop at this score: [bold]0.97[/bold]; for scripts [bold]accuracy=0.97[/bold] or [bold]loss<=0.1[/bold].",
    ),
]
Disturb = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SENTENCE",
        help="A fault that is to happen, e.g. [bold]worker 1: pause 200ms every 1s[/bold] or [bold]worker 2: kill at "
        "step 50[/bold]; may be given several times.",
    ),
]
HostFile = Annotated[
    Path | None,
    typer.Option(
        "--hosts",
        metavar="FILE",
        help="Hosts to put the workers on: a TOML file with a [bold]\\[\\[host]][/bold] for each: its name, its "
        "workers, and the rate of its link, e.g. [bold]100Mbit[/bold]. They are network namespaces of this machine, "
        "which needs root. See docs/hosts.md.",
    ),
]
