"""The options of every command: settings types whose fields they are (see `from_settings`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from offbeat.cli.from_settings import CONFIG
from offbeat.errors import UsageError
from offbeat.settings import Argument, Option


class OutputFormat(StrEnum):
    """How results are printed."""

    text = "text"
    json = "json"


class TableFormat(StrEnum):
    """How tables are printed."""

    table = "table"
    json = "json"


class LeagueFormat(StrEnum):
    """How a comparison is printed."""

    table = "table"
    json = "json"
    markdown = "markdown"
    csv = "csv"
    html = "html"


@dataclass(frozen=True, kw_only=True)
class Printed:
    """Options of a command whose result is printed as text or JSON."""

    output: Annotated[
        OutputFormat, Option("[bold]json[/bold] prints the result on stdout and nothing else.", name="format")
    ] = OutputFormat.text

    @property
    def as_json(self) -> bool:
        """Whether JSON is printed on stdout, and nothing else."""
        return self.output is OutputFormat.json


_TARGET = (
    "A script ([bold]train.py[/bold], its arguments after [bold]--[/bold]) or a task ([bold]file.py:Class[/bold], or a "
    "module such as [bold]offbeat.tasks.digits[/bold])."
)
_HOSTS = (
    "TOML file of the hosts to run on: a [bold]\\[\\[host]][/bold] table each, with name, number of workers and link "
    "rate ([bold]100Mbit[/bold]). Hosts are network namespaces of this machine, which needs root; see docs/hosts.md."
)
_Target = Annotated[str, Argument(_TARGET, "TARGET")]
_TargetOrResume = Annotated[str | None, Argument(f"{_TARGET} Omit it with --resume.", "TARGET")]
_Arguments = Annotated[
    tuple[str, ...],
    Argument("Arguments of the script, or [bold]--name value[/bold] pairs of the task.", "[-- ARGS]"),
]
_Hosts = Annotated[Path | None, Option(_HOSTS, metavar="FILE")]
_Threads = Annotated[int | None, Option("Threads per worker. Default: cores divided by workers.")]


@dataclass(frozen=True)
class RunOptions(Printed):
    """The options of `offbeat run` beside those of its `Goal`."""

    what: _TargetOrResume = None
    arguments: _Arguments = ()
    workers: Annotated[
        int | None, Option("Number of workers. Default: 1, or one per core with a distributed strategy.", "-w")
    ] = None
    hosts: _Hosts = None
    threads: _Threads = None
    out: Annotated[Path, Option("Directory for run folders.", "-o", metavar="FOLDER")] = Path("runs")
    resume: Annotated[Path | None, Option("Resume the run in this folder.", command_line_only=True)] = None
    port: Annotated[int, Option("Rendezvous port; 0 picks a free one.")] = 0


@dataclass(frozen=True)
class CompareOptions:
    """The options of `offbeat compare` beside those of its runs' `Goal`, and how the result is printed."""

    what: _TargetOrResume = None
    arguments: _Arguments = ()
    strategies: Annotated[
        tuple[str, ...],
        Option(
            "A strategy to compare. Repeat it for several; a set is a sweep: [bold]local({4,16})[/bold]. Default: "
            "allreduce, local({4,16}), gossip, hogwild, server(consistency=ssp(3)). The baseline [bold]ddp[/bold] is "
            "always included, twice.",
            "-s",
            name="strategy",
        ),
    ] = ()
    workers: Annotated[int | None, Option("Number of workers. Default: one per core, at least 2.", "-w")] = None
    hosts: _Hosts = None
    seeds: Annotated[int | None, Option("Seeds per strategy. Default: 5.")] = None
    seed: Annotated[int, Option("First seed; the others follow it.")] = 0
    tune: Annotated[
        str,
        Option(
            "Learning-rate factors to try for each strategy, on a separate seed, before the comparison.",
            metavar="none|0.5,1,2",
        ),
    ] = "0.5,1,2"
    single: Annotated[bool, Option("Include a single worker, to report the speed-up.")] = True
    budget: Annotated[
        str | None,
        Option(
            "Time limit of the comparison, e.g. [bold]10m[/bold]. If it is short, every strategy gets fewer seeds.",
            metavar="TIME",
        ),
    ] = None
    threads: _Threads = None
    out: Annotated[Path, Option("Directory for the comparison's folder.", "-o", metavar="FOLDER")] = Path("runs")
    resume: Annotated[
        Path | None, Option("Resume the comparison in this folder.", metavar="FOLDER", command_line_only=True)
    ] = None
    output: Annotated[LeagueFormat, Option("Output format.", name="format")] = LeagueFormat.table
    report: Annotated[Path | None, Option("Write the report to this file instead of stdout.", metavar="FILE")] = None


@dataclass(frozen=True)
class _Measuring(Printed):
    """The options that `offbeat scale` and `offbeat batch-size` share."""

    what: _Target
    arguments: _Arguments = ()
    steps: Annotated[int | None, Option("Steps per run, instead of --seconds.")] = None
    threads: Annotated[int, Option("Threads per worker.")] = 1
    seed: Annotated[int, Option("Random seed.")] = 0
    out: Annotated[Path | None, Option("Keep run folders in this directory.", "-o")] = None


@dataclass(frozen=True)
class ScaleOptions(_Measuring):
    """The options of `offbeat scale`."""

    strategy: Annotated[str, Option("Strategy; see `offbeat strategies`.", "-s")] = "allreduce"
    workers: Annotated[str, Option("Worker counts to measure; 1 is always included.", "-w")] = "1,2,4"
    weak: Annotated[bool, Option("Weak scaling: the batch grows with the number of workers.")] = False
    repeats: Annotated[int, Option("Interleaved runs per worker count.")] = 3
    seconds: Annotated[float, Option("Approximate duration of a single-worker run.")] = 3.0


@dataclass(frozen=True)
class BatchSizeOptions(_Measuring):
    """The options of `offbeat batch-size`."""

    workers: Annotated[int, Option("Workers to measure with: the noise is how much their gradients differ.", "-w")] = 2
    seconds: Annotated[float, Option("Approximate duration of the run.")] = 20.0
    times: Annotated[
        int, Option("Multiply every batch by this factor; the noise is easier to see in larger batches.")
    ] = 1
    delta: Annotated[
        float,
        Option("Accepted loss of efficiency: an example of the largest batch is worth 1 / (1 + delta) of one alone."),
    ] = 0.25
    check: Annotated[
        bool,
        Option(
            "Also compute per-example gradients (tasks with small models): they test the estimate, and compare ways to "
            "raise gradient diversity.",
            name="per-example",
        ),
    ] = False


@dataclass(frozen=True)
class ExplainTarget(Printed):
    """What `offbeat explain` is about, and how it answers."""

    path: Annotated[
        Path,
        Argument(
            "Folder of a run recorded with [bold]--monitor[/bold], or a log with vector clocks of any program, in the "
            "format of ShiViz and GoVector.",
            "RUN|LOG",
        ),
    ]
    check: Annotated[
        bool,
        Option(
            "Verify a checkpoint (RUN, or the newest of RUN): its files are complete and, if it is a snapshot of an "
            "asynchronous run, it is a consistent cut. Exit code 20 if not.",
            name="verify-checkpoint",
        ),
    ] = False


@dataclass(frozen=True)
class ExplainOptions:
    """What `offbeat explain` is asked for beyond words."""

    draw: Annotated[
        Path | None,
        Option(
            "Draw the space-time diagram to this .svg or .png file (.png needs matplotlib).",
            metavar="FILE",
            name="picture",
        ),
    ] = None
    window: Annotated[
        str | None,
        Option("Restrict drawing and predicates to this time window, e.g. [bold]3s..4s[/bold].", metavar="FROM..TO"),
    ] = None
    cuts: Annotated[
        tuple[str, ...],
        Option(
            "Test a cut for consistency and draw it: [bold]latest[/bold], [bold]3.5s[/bold], [bold]past worker "
            "0:123[/bold] (the causal past of that event), or [bold]worker 0:123, worker 1:120[/bold] (that many "
            "events of each). Repeatable.",
            metavar="CUT",
            name="cut",
        ),
    ] = ()
    export: Annotated[
        Path | None, Option("Export for other tools: .shiviz, .perfetto, .json or .jsonl.", metavar="FILE")
    ] = None
    kind: Annotated[
        str | None,
        Option("Export format, if the file name does not say it.", metavar="shiviz|perfetto|trace|jsonl", name="as"),
    ] = None
    pattern: Annotated[
        str | None,
        Option(
            "Pattern of the log's events, with groups (?<host>), (?<clock>) and (?<event>), as in ShiViz.",
            metavar="REGEX",
        ),
    ] = None
    execution: Annotated[str | None, Option("Which execution to read, if the log has several.", metavar="NAME")] = None
    delimiter: Annotated[
        str | None,
        Option(
            "Separator of executions in a log; its group (?<trace>), if present, names the next one.",
            metavar="REGEX",
        ),
    ] = None
    delivery: Annotated[
        str | None,
        Option(
            "Replay the run to a remote monitor under this delivery rule: how many reports it buffers, for how long, "
            "whether the order is causally possible, and which verdicts are phantoms.",
            metavar="fifo|real-time|lamport|vector|arrival",
        ),
    ] = None
    delay: Annotated[
        str | None, Option("Mean network delay of reports for --delivery. Default: 5ms.", metavar="TIME")
    ] = None
    possibly: Annotated[
        tuple[str, ...],
        Option(
            "Did this hold on some consistent cut? [bold]all-waiting[/bold], [bold]nobody-computing[/bold], "
            "[bold]in-flight>N[/bold] (messages) or [bold]steps-apart>N[/bold]. Repeatable.",
            metavar="PREDICATE",
        ),
    ] = ()
    definitely: Annotated[
        tuple[str, ...], Option("Did this hold in every possible order of events?", metavar="PREDICATE")
    ] = ()


@dataclass(frozen=True)
class CheckOptions(Printed):
    """The options of `offbeat check`; None where nothing was said."""

    subject: Annotated[
        str,
        Argument(
            "A strategy ([bold]mine.py:Push(0.5)[/bold], [bold]allreduce[/bold]), a schedule "
            "([bold]mine.py:my_ring[/bold]: a function of view and layout) or a contract of machines "
            "([bold]mine.py:MyContract[/bold]).",
            "SUBJECT",
        ),
    ]
    workers: Annotated[
        int | None, Option("Workers to check a strategy with. Default: 2, or those of --hosts.", "-w")
    ] = None
    hosts: _Hosts = None
    collective: Annotated[
        str | None, Option("The collective that a schedule implements: all_reduce (the default), all_gather …")
    ] = None
    runs: Annotated[int | None, Option("Fault-injection seeds for machines. Default: 200.")] = None
    seed: Annotated[int | None, Option("Only this seed, to reproduce a failure with its events.")] = None


_SIMULATED = "Simulated (with --simulate)"
_MEASURED = "Measured (without --simulate)"


@dataclass(frozen=True)
class CollectivesOptions(Printed):
    """The options of `offbeat bench collectives`; None where nothing was said."""

    ranks: Annotated[int, Option("Number of ranks.", "-r")] = 2
    size: Annotated[
        str | None,
        Option(
            "Largest buffer size (B, kB, MB, GB, KiB, MiB, GiB); smaller sizes are added. Default: [bold]100MB[/bold] "
            "simulated, [bold]25MiB[/bold] measured."
        ),
    ] = None
    sizes: Annotated[str | None, Option("Exactly these sizes, e.g. [bold]4kB,1MB,25MiB[/bold].")] = None
    simulate: Annotated[bool, Option("Simulate a network instead of measuring.")] = False
    network: Annotated[
        str | None,
        Option(
            "Links between hosts: rate and latency, e.g. [bold]10Gbit,50us[/bold]; optionally the reduction speed: "
            "[bold]10Gbit,50us,8GB/s[/bold].",
            panel=_SIMULATED,
        ),
    ] = None
    inside: Annotated[
        str | None,
        Option("Links inside a host. Default: [bold]100Gbit,1us[/bold].", panel=_SIMULATED),
    ] = None
    host_count: Annotated[int | None, Option("Number of hosts. Default: one per rank.", panel=_SIMULATED)] = None
    per_host: Annotated[int | None, Option("Ranks per host, instead of --host-count.", panel=_SIMULATED)] = None
    ports: Annotated[
        str | None,
        Option(
            "One network card per [bold]rank[/bold] (the default) or per [bold]host[/bold].",
            panel=_SIMULATED,
        ),
    ] = None
    collective: Annotated[
        str | None,
        Option(
            "all_reduce (the default), broadcast, reduce, reduce_scatter, all_gather, gather, scatter, all_to_all or "
            "barrier.",
            panel=_SIMULATED,
        ),
    ] = None
    peers: Annotated[
        str | None,
        Option(
            "Libraries to measure. Default: [bold]offbeat,gloo[/bold], and mpi if installed.",
            panel=_MEASURED,
        ),
    ] = None
    blocks: Annotated[int | None, Option("Interleaved measurement blocks. Default: 15.", panel=_MEASURED)] = None
    report: Annotated[Path | None, Option("Also write JSON to this file.", "-o", metavar="FILE", panel=_MEASURED)] = (
        None
    )
    picture: Annotated[
        Path | None,
        Option("Also plot time against size to this file (needs matplotlib).", metavar="FILE", panel=_MEASURED),
    ] = None

    def __post_init__(self) -> None:
        """Refuse options of the other way of answering."""
        if self.simulate:
            self._refuse("applies to measurements: omit it, or omit --simulate", "peers", "blocks", "report", "picture")
        else:
            names = ("network", "inside", "host_count", "per_host", "ports", "collective")
            self._refuse("applies to simulations: add --simulate, or omit it", *names)

    def _refuse(self, why: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} {why}.")


@dataclass(frozen=True)
class ServerOptions(Printed):
    """The options of `offbeat bench server`."""

    simulate: Annotated[bool, Option("Simulate (required: there is no measured mode yet).")] = False
    workers: Annotated[int, Option("Number of workers.", "-w")] = 100
    steps: Annotated[int, Option("Steps per worker.")] = 1000
    step: Annotated[str, Option("Compute time of a step without stragglers.")] = "40ms"
    stragglers: Annotated[
        str,
        Option(
            "Straggler model: [bold]transient(0.2, 0.15)[/bold] pauses a step for 0.2 s with probability 0.15, "
            "[bold]permanent(4)[/bold] makes one worker 4 times slower ([bold]permanent(4, 3)[/bold]: three of them), "
            "[bold]pareto(0.01, 1.5)[/bold] (scale, shape) and [bold]lognormal(0.01, 1)[/bold] (median, sigma) add a "
            "heavy-tailed pause to every step. Combine with +."
        ),
    ] = "none"
    rules: Annotated[
        tuple[str, ...],
        Option(
            "Consistency rule: [bold]bsp[/bold] (all wait for all), [bold]ssp(3)[/bold] (at most 3 steps ahead of the "
            "slowest), [bold]asp[/bold] (no waiting), [bold]drop_slowest(2)[/bold], [bold]deadline(0.5)[/bold]. "
            "Repeatable. Default: bsp, ssp(3), asp.",
            name="consistency",
        ),
    ] = ()
    strategies: Annotated[
        tuple[str, ...],
        Option(
            "A whole strategy on servers: [bold]server(consistency=ssp(3, eager))[/bold], [bold]downpour(push=4, "
            "fetch=4)[/bold], [bold]elastic(period=10)[/bold], [bold]coded(s=1)[/bold]. Simulated from the protocol "
            "that its workers and servers run. Repeatable.",
            "-s",
            name="strategy",
        ),
    ] = ()
    size: Annotated[
        str | None, Option("Bytes pushed and pulled per step, e.g. [bold]100MB[/bold]; needs --network.")
    ] = None
    servers: Annotated[int | None, Option("Number of servers. Default: 1.")] = None
    network: Annotated[
        str | None,
        Option(
            "Rate and latency, e.g. [bold]10Gbit,50us[/bold]; optionally the servers' update speed: "
            "[bold]10Gbit,50us,8GB/s[/bold]. Without it, communication is free."
        ),
    ] = None
    seed: Annotated[int, Option("Random seed; every rule meets the same stragglers.")] = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be answered."""
        if not self.simulate:
            raise UsageError("bench server only simulates: add --simulate.")


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
    workers: Annotated[int, Option("Number of workers.", "-w")] = 4
    network: Annotated[
        str,
        Option(
            "Links between hosts: rate and latency, e.g. [bold]10Gbit,50us[/bold]; optionally the reduction speed: "
            "[bold]10Gbit,50us,8GB/s[/bold]."
        ),
    ] = "10Gbit,50us"
    inside: Annotated[str | None, Option("Links inside a host. Default: [bold]100Gbit,1us[/bold].")] = None
    size: Annotated[str, Option("Size of the model, or of a collective's buffer.")] = "100MB"
    per_host: Annotated[int, Option("Workers per host.")] = 1
    steps: Annotated[int | None, Option("Steps to draw. Default: one period of the strategy.")] = None
    step: Annotated[str, Option("Compute time of a step without stragglers.")] = "40ms"
    stragglers: Annotated[
        str,
        Option("Straggler model, as in `offbeat bench server`: [bold]permanent(2)[/bold] …"),
    ] = "none"
    collective: Annotated[
        str | None, Option("The collective that a schedule of your own implements. Default: all_reduce.")
    ] = None
    seed: Annotated[int, Option("Random seed.")] = 0
    picture: Annotated[
        Path | None, Option("Draw to this .svg or .png file (.png needs matplotlib).", "-o", metavar="FILE")
    ] = None
    output: Annotated[
        TableFormat, Option("[bold]json[/bold] prints every round, message and interval.", name="format")
    ] = TableFormat.table


_Runs = Annotated[Path, Option("Directory of run folders.", "-o", metavar="FOLDER")]
_Run = Annotated[Path, Argument("Run folder, or its name below --out, e.g. latest.", "RUN")]


@dataclass(frozen=True)
class WatchOptions:
    """The options of `offbeat watch`."""

    path: Annotated[Path, Argument("Run folder, or directory of run folders.", "[RUN|FOLDER]")] = Path("runs")
    port: Annotated[int, Option("Loopback port; 0 picks a free one.")] = 0
    browser: Annotated[bool, Option("Open the page in a browser.", name="open")] = False
    export: Annotated[Path | None, Option("Save the run's page, with its data, as one HTML file.", metavar="FILE")] = (
        None
    )


@dataclass(frozen=True)
class PsOptions(Printed):
    """The options of `offbeat ps`."""

    folder: Annotated[Path, Argument("Directory of run folders.", "[RUNS]")] = Path("runs")
    everything: Annotated[bool, Option("Include finished runs.", "-a", name="all")] = False


@dataclass(frozen=True)
class StopOptions:
    """The options of `offbeat stop`."""

    run: _Run
    kill: Annotated[bool, Option("Stop at once, with SIGKILL: no checkpoint is written, no result is kept.")] = False
    within: Annotated[float, Option("Seconds to wait until it has ended.")] = 30.0
    out: _Runs = Path("runs")


@dataclass(frozen=True)
class LogsOptions:
    """The options of `offbeat logs`."""

    run: _Run
    rank: Annotated[tuple[int, ...], Option("Only this worker. Repeatable.", "-r")] = ()
    server: Annotated[
        tuple[str, ...], Option("Only this server: shard and copy, [bold]0.1[/bold], or the shard alone. Repeatable.")
    ] = ()
    follow: Annotated[bool, Option("Keep printing as long as the run goes on.", "-f")] = False
    out: _Runs = Path("runs")


@dataclass(frozen=True)
class StrategiesOptions(Printed):
    """The options of `offbeat strategies`."""

    name: Annotated[str | None, Argument("The strategy to describe.", "[NAME]")] = None


@dataclass(frozen=True)
class DoctorOptions(Printed):
    """The options of `offbeat doctor`."""


@dataclass(frozen=True)
class ConfigOptions(Printed):
    """The options of `offbeat config`."""

    command: Annotated[tuple[str, ...], Argument("The command to show. Default: all.", "[COMMAND]")] = ()
    config: Annotated[Path | None, CONFIG] = None


@dataclass(frozen=True)
class KeyFile:
    """A file of keys, for `offbeat keys new` and `show`."""

    file: Annotated[Path, Argument("Key file; only its owner can read it.", "FILE")]


@dataclass(frozen=True)
class AllowedKey(KeyFile):
    """A key to add to a file of keys, for `offbeat keys allow`."""

    public: Annotated[str, Argument("Public key of another key file.", "PUBLIC")]
