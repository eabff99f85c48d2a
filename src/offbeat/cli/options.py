"""What commands are asked for: settings types whose fields are their options (see `from_settings`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from offbeat.settings import Argument, Option


class Format(StrEnum):
    """How results are printed."""

    text = "text"
    json = "json"


class TableFormat(StrEnum):
    """How tables are printed."""

    table = "table"
    json = "json"


class LeagueFormat(StrEnum):
    """How a league is printed."""

    table = "table"
    json = "json"
    markdown = "markdown"
    csv = "csv"
    html = "html"


_TARGET = (
    "A script ([bold]train.py[/bold], its arguments after [bold]--[/bold]) or a task ([bold]file.py:Class[/bold], or a "
    "module such as [bold]offbeat.tasks.digits[/bold])."
)
_HOSTS = (
    "Hosts to put the workers on: a TOML file with a [bold]\\[\\[host]][/bold] for each: its name, its workers, and "
    "the rate of its link, e.g. [bold]100Mbit[/bold]. They are network namespaces of this machine, which needs root. "
    "See docs/hosts.md."
)
HostFile = Annotated[Path | None, typer.Option("--hosts", metavar="FILE", help=_HOSTS)]
_Target = Annotated[str, Argument(_TARGET, "TARGET")]
_TargetOrResume = Annotated[str | None, Argument(f"{_TARGET} May be left out with --resume.", "TARGET")]
_Arguments = Annotated[
    tuple[str, ...],
    Argument("Arguments of the script, or [bold]--name value[/bold] pairs of the task.", "[-- ARGS]"),
]
_Hosts = Annotated[Path | None, Option(_HOSTS, metavar="FILE")]
_Threads = Annotated[int | None, Option("Threads per worker. Default: cores divided by workers.")]
_Format = Annotated[
    Format, Option("[bold]json[/bold] prints the result object on stdout and nothing else.", name="format")
]


@dataclass(frozen=True)
class RunOptions:
    """The options of `offbeat run` beside those of its `Goal`."""

    what: _TargetOrResume = None
    arguments: _Arguments = ()
    workers: Annotated[
        int | None, Option("Processes that train. Default: 1; with a strategy that exchanges, one per core.", "-w")
    ] = None
    hosts: _Hosts = None
    threads: _Threads = None
    out: Annotated[Path, Option("Where run folders are made.", "-o")] = Path("runs")
    resume: Annotated[Path | None, Option("Go on with an earlier run, given by its folder.")] = None
    port: Annotated[int, Option("Port to meet at; 0 takes a free one.")] = 0
    output: _Format = Format.text

    @property
    def as_json(self) -> bool:
        """Whether the result object is printed, and nothing else."""
        return self.output is Format.json


@dataclass(frozen=True)
class CompareOptions:
    """The options of `offbeat compare`, in the words of `offbeat.compare`, and how the league is printed."""

    what: _TargetOrResume = None
    arguments: _Arguments = ()
    strategies: Annotated[
        tuple[str, ...],
        Option(
            "One that takes part; may be given several times, and a set means several: [bold]local({4,16})[/bold]. "
            "Default: allreduce, local({4,16}), gossip, hogwild, server(consistency=ssp(3)). [bold]ddp[/bold] always "
            "takes part, twice.",
            "-s",
            name="strategy",
        ),
    ] = ()
    workers: Annotated[int | None, Option("Processes that train. Default: one per core, at least 2.", "-w")] = None
    hosts: _Hosts = None
    target: Annotated[
        str | None,
        Option(
            "The score to be reached: [bold]0.97[/bold]; for scripts [bold]accuracy=0.97[/bold] or "
            "[bold]loss<=0.1[/bold].",
            "-t",
        ),
    ] = None
    seeds: Annotated[int | None, Option("Runs of each strategy that count. Default: 5.")] = None
    seed: Annotated[int, Option("The first seed; the others follow it.")] = 0
    tune: Annotated[
        str,
        Option(
            "What learning rates are multiplied by, so that each strategy can choose its own on a seed that does not "
            "count.",
            metavar="none|0.5,1,2",
        ),
    ] = "0.5,1,2"
    single: Annotated[bool, Option("Whether one worker alone takes part, for the speed-up.")] = True
    budget: Annotated[
        str | None,
        Option(
            "How long the league may take, e.g. [bold]10m[/bold]; if that is too short, all strategies have fewer "
            "seeds, at least one.",
            metavar="TIME",
        ),
    ] = None
    epochs: Annotated[int | None, Option("Passes over the training data at most, of each run.")] = None
    steps: Annotated[int | None, Option("Updates at most, of each run.")] = None
    disturb: Annotated[
        tuple[str, ...],
        Option(
            "A fault that is to happen in every run, e.g. [bold]worker 1: pause 200ms every 1s[/bold]; may be given "
            "several times.",
            metavar="SENTENCE",
        ),
    ] = ()
    parts: Annotated[str, Option("How training data is divided: iid, or by label with dirichlet(alpha).")] = "iid"
    device: Annotated[str, Option("Where tensors live; cpu is what is tested.")] = "cpu"
    threads: _Threads = None
    timeout: Annotated[float, Option("Seconds that any wait for another worker may take.")] = 600.0
    out: Annotated[Path, Option("Where the league's folder is made.", "-o")] = Path("runs")
    resume: Annotated[Path | None, Option("Go on with a league, given by its folder.", metavar="LEAGUE")] = None
    form: Annotated[LeagueFormat, Option("How the league is printed.", name="format")] = LeagueFormat.table
    output: Annotated[Path | None, Option("Write it here instead of to stdout.", metavar="FILE")] = None


@dataclass(frozen=True)
class _Measuring:
    """The options that `offbeat scale` and `offbeat batch-size` share."""

    what: _Target
    arguments: _Arguments = ()
    steps: Annotated[int | None, Option("Steps of a run, instead of a time.")] = None
    threads: Annotated[int, Option("Threads per worker, the same on any number of workers.")] = 1
    seed: Annotated[int, Option("Fixes the initial model, the data's order and all other chance.")] = 0
    out: Annotated[Path | None, Option("Keep the run folders here.", "-o")] = None
    output: _Format = Format.text


@dataclass(frozen=True)
class ScaleOptions(_Measuring):
    """The options of `offbeat scale`."""

    strategy: Annotated[str, Option("How to distribute. See `offbeat strategies`.", "-s")] = "allreduce"
    workers: Annotated[str, Option("Numbers of workers; one is always measured, too.", "-w")] = "1,2,4"
    weak: Annotated[bool, Option("Let the batch grow with the workers, instead of dividing one batch.")] = False
    repeats: Annotated[int, Option("Runs on each number of workers, interleaved.")] = 3
    seconds: Annotated[float, Option("How long one worker's run should take, roughly.")] = 3.0


@dataclass(frozen=True)
class BatchSizeOptions(_Measuring):
    """The options of `offbeat batch-size`."""

    workers: Annotated[int, Option("Workers to measure with: noise is how their gradients differ.", "-w")] = 2
    seconds: Annotated[float, Option("How long the run should take, roughly.")] = 20.0
    times: Annotated[
        int, Option("Make every batch so many times as large as usual: the larger, the more the noise shows.")
    ] = 1
    delta: Annotated[
        float, Option("Examples of the largest batch count at least 1 / (1 + delta) of what one alone would.")
    ] = 0.25
    check: Annotated[
        bool,
        Option(
            "Also take gradients of single examples now and then (tasks with small models), and compare ways to raise "
            "diversity."
        ),
    ] = False


@dataclass(frozen=True)
class DrawOptions:
    """The options of `offbeat draw`."""

    strategy: Annotated[
        str,
        Argument(
            "What to draw: a strategy such as [bold]gossip(exponential)[/bold], [bold]server(consistency=asp)[/bold] "
            "or [bold]local(4) + topk(0.01)[/bold]; an algorithm of a collective, such as [bold]all_gather(ring)"
            "[/bold]; or a schedule or contract of machines of your own, [bold]mine.py:my_ring[/bold].",
            "STRATEGY",
        ),
    ]
    workers: Annotated[int | None, Option("How many take part. Default: 4, or the hosts'.", "-w")] = None
    network: Annotated[
        str,
        Option(
            "Between hosts: rate and latency, e.g. [bold]10Gbit,50us[/bold]; a third part such as [bold]8GB/s[/bold] "
            "says how fast numbers are added up."
        ),
    ] = "10Gbit,50us"
    inside: Annotated[str | None, Option("Inside a host, written the same. Default: [bold]100Gbit,1us[/bold].")] = None
    size: Annotated[str, Option("Bytes of the model, or of a collective's buffer.")] = "100MB"
    hosts: Annotated[
        str | None,
        Option("Hosts times workers on each, e.g. [bold]2x4[/bold]. Default: a host for each worker.", metavar="HxW"),
    ] = None
    steps: Annotated[int | None, Option("Steps to draw. Default: one turn of what is exchanged.")] = None
    step: Annotated[str, Option("What an undisturbed step takes to compute.")] = "40ms"
    stragglers: Annotated[
        str,
        Option(
            "What makes steps longer, as in `offbeat bench server`: [bold]permanent(2)[/bold], "
            "[bold]transient(0.2, 0.15)[/bold] …"
        ),
    ] = "none"
    collective: Annotated[str | None, Option("What a schedule of your own is to achieve. Default: all_reduce.")] = None
    seed: Annotated[int, Option("Of stragglers, and of machines' chance.")] = 0
    out: Annotated[
        Path | None, Option("Draw it here: .svg, or .png (which needs matplotlib).", "-o", metavar="FILE")
    ] = None
    output: Annotated[
        TableFormat, Option("[bold]json[/bold] prints every round, message and interval.", name="format")
    ] = TableFormat.table
