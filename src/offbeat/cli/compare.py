"""`offbeat compare`: its options. What it does is in `leagues`, which imports torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.cli.options import Disturb, HostFile, TargetScore, What

EPILOG = (
    "Examples: offbeat compare offbeat.tasks.digits --workers 2 [dim]|[/dim] "
    "offbeat compare train.py --target accuracy=0.97 --workers 2 --strategy allreduce --strategy 'local({4,16})' "
    "--budget 10m -- --its own --arguments [dim]|[/dim] offbeat compare --resume runs/latest-league"
)


class LeagueFormat(StrEnum):
    """How a league is printed."""

    table = "table"
    json = "json"
    markdown = "markdown"
    csv = "csv"
    html = "html"


Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- ARGS]", help="Arguments of the script, or [bold]--name value[/bold] pairs of the task."
    ),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        "-s",
        help="One that takes part; may be given several times, and a set means several: "
        "[bold]local({4,16})[/bold]. Default: allreduce, local({4,16}), gossip, hogwild, "
        "server(consistency=ssp(3)). [bold]ddp[/bold] always takes part, twice.",
    ),
]
Workers = Annotated[
    int | None, typer.Option("--workers", "-w", help="Processes that train. Default: one per core, at least 2.")
]
Seeds = Annotated[int | None, typer.Option(help="Runs of each strategy that count. Default: 5.")]
Tune = Annotated[
    str,
    typer.Option(
        metavar="none|0.5,1,2",
        help="What learning rates are multiplied by, so that each strategy can choose its own on a seed that does not "
        "count.",
    ),
]
Single = Annotated[
    bool, typer.Option("--single/--no-single", help="Whether one worker alone takes part, for the speed-up.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="How long the league may take, e.g. [bold]10m[/bold]; if that is too short, all strategies have fewer "
        "seeds, at least one.",
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the training data at most, of each run.")]
Steps = Annotated[int | None, typer.Option(help="Updates at most, of each run.")]
Parts = Annotated[str, typer.Option(help="How training data is divided: iid, or by label with dirichlet(alpha).")]
Threads = Annotated[int | None, typer.Option(help="Threads per worker. Default: cores divided by workers.")]
Timeout = Annotated[float, typer.Option(help="Seconds that any wait for another worker may take.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where the league's folder is made.")]
Resume = Annotated[Path | None, typer.Option(metavar="LEAGUE", help="Go on with a league, given by its folder.")]
Form = Annotated[LeagueFormat, typer.Option("--format", help="How the league is told.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write it here instead of to stdout.")]


def compare(
    what: What = None,
    arguments: Arguments = None,
    strategy: Strategies = None,
    workers: Workers = None,
    hosts: HostFile = None,
    target: TargetScore = None,
    seeds: Seeds = None,
    seed: Annotated[int, typer.Option(help="The first seed; the others follow it.")] = 0,
    tune: Tune = "0.5,1,2",
    single: Single = True,
    budget: Budget = None,
    epochs: Epochs = None,
    steps: Steps = None,
    disturb: Disturb = None,
    parts: Parts = "iid",
    device: Annotated[str, typer.Option(help="Where tensors live; cpu is what is tested.")] = "cpu",
    threads: Threads = None,
    timeout: Timeout = 600.0,
    out: Out = Path("runs"),
    resume: Resume = None,
    form: Form = LeagueFormat.table,
    output: Output = None,
) -> None:
    """Find out which strategy is the first to reach a target, here, on your script or task."""
    from offbeat.cli.leagues import Wanted, compare_strategies

    options: dict[str, Any] = {
        "what": what,
        "strategies": tuple(strategy or ()),
        "arguments": tuple(arguments or ()),
        "workers": workers,
        "hosts": hosts,
        "target": target,
        "seeds": seeds,
        "seed": seed,
        "tune": tune,
        "single": single,
        "budget": budget,
        "epochs": epochs,
        "steps": steps,
        "disturb": tuple(disturb or ()),
        "parts": parts,
        "device": device,
        "threads": threads,
        "timeout": timeout,
        "out": out,
        "resume": resume,
    }
    compare_strategies(options, Wanted(form.value, output))
