"""The options of `offbeat scale` and `offbeat batch-size`; nothing heavy is imported before they are used."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

SCALE_EXAMPLES = (
    "Examples: offbeat scale offbeat.tasks.digits --workers 1,2 [dim]|[/dim] "
    "offbeat scale train.py --strategy 'local(8)' --workers 1,2,4 --weak -- --lr 0.1"
)
BATCH_EXAMPLES = (
    "Examples: offbeat batch-size offbeat.tasks.digits --check [dim]|[/dim] "
    "offbeat batch-size train.py --seconds 30 -- --lr 0.1"
)


class _Format(StrEnum):
    text = "text"
    json = "json"


What = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A script ([bold]train.py[/bold], its arguments after [bold]--[/bold]) or a task "
        "([bold]file.py:Class[/bold], or a module such as [bold]offbeat.tasks.digits[/bold]).",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- ARGS]", help="Arguments of the script, or [bold]--name value[/bold] pairs of the task."
    ),
]
Threads = Annotated[int, typer.Option(help="Threads per worker, the same on any number of workers.")]
Seed = Annotated[int, typer.Option(help="Fixes the initial model, the data's order and all other chance.")]
Steps = Annotated[int | None, typer.Option(help="Steps of a run, instead of a time.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Keep the run folders here.")]
Format = Annotated[
    _Format, typer.Option("--format", help="[bold]json[/bold] prints the result object on stdout and nothing else.")
]


def scale(
    what: What,
    arguments: Arguments = None,
    strategy: Annotated[
        str, typer.Option("--strategy", "-s", help="How to distribute. See `offbeat strategies`.")
    ] = "allreduce",
    workers: Annotated[
        str, typer.Option("--workers", "-w", help="Numbers of workers; one is always measured, too.")
    ] = "1,2,4",
    weak: Annotated[
        bool, typer.Option("--weak", help="Let the batch grow with the workers, instead of dividing one batch.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Runs on each number of workers, interleaved.")] = 3,
    steps: Steps = None,
    seconds: Annotated[float, typer.Option(help="How long one worker's run should take, roughly.")] = 3.0,
    threads: Threads = 1,
    seed: Seed = 0,
    out: Out = None,
    output: Format = _Format.text,
) -> None:
    """Measure the speed-up on several numbers of workers, and fit Amdahl's and Gunther's laws to it."""
    from offbeat.cli.scale import scale_target

    given, length = tuple(arguments or ()), (steps, seconds)
    as_json = output is _Format.json
    scale_target(what, given, strategy, workers, weak, repeats, length, threads, seed, out, as_json)


def batch_size(
    what: What,
    arguments: Arguments = None,
    workers: Annotated[
        int, typer.Option("--workers", "-w", help="Workers to measure with: noise is how their gradients differ.")
    ] = 2,
    steps: Steps = None,
    seconds: Annotated[float, typer.Option(help="How long the run should take, roughly.")] = 20.0,
    times: Annotated[
        int, typer.Option(help="Make every batch so many times as large as usual: the larger, the more noise is told.")
    ] = 1,
    delta: Annotated[
        float,
        typer.Option(help="Examples of the largest batch count at least 1 / (1 + delta) of what one alone would."),
    ] = 0.25,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Also take gradients of single examples now and then (tasks with small models), and compare ways to "
            "raise diversity.",
        ),
    ] = False,
    threads: Threads = 1,
    seed: Seed = 0,
    out: Out = None,
    output: Format = _Format.text,
) -> None:
    """Measure the noise in gradients in a short run, and say how large a batch may be, and for how many workers."""
    from offbeat.cli.batch_size import measure_batch_size

    given, length = tuple(arguments or ()), (steps, seconds)
    as_json = output is _Format.json
    measure_batch_size(what, given, workers, length, times, delta, check, threads, seed, out, as_json)
