"""The options of every command: settings types whose fields they are, and whose docstrings are the help."""

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

    output: Annotated[OutputFormat, Option("`json` prints the result on stdout and nothing else.", name="format")] = (
        OutputFormat.text
    )

    @property
    def as_json(self) -> bool:
        """Whether JSON is printed on stdout, and nothing else."""
        return self.output is OutputFormat.json


_TARGET = (
    "A script (`train.py`, its arguments after `--`) or a task (`file.py:Class`, or a "
    "module such as `offbeat.tasks.digits`)."
)
_HOSTS = (
    "TOML file of the hosts to run on: a `\\[\\[host]]` table each, with name, number of workers and link "
    "rate (`100Mbit`). Hosts are network namespaces of this machine, which needs root; see docs/hosts.md."
)
_Target = Annotated[str, Argument(_TARGET, "TARGET")]
_TargetOrResume = Annotated[str | None, Argument(f"{_TARGET} Omit it with --resume.", "TARGET")]
_Arguments = Annotated[
    tuple[str, ...], Argument("Arguments of the script, or `--name value` pairs of the task.", "[-- ARGS]")
]
_Hosts = Annotated[Path | None, Option(_HOSTS, metavar="FILE")]
_Threads = Annotated[int | None, Option("Threads per worker. Default: cores divided by workers.")]


@dataclass(frozen=True)
class RunOptions(Printed):
    """Train a script or a task, and report the result."""

    what: _TargetOrResume = None
    arguments: _Arguments = ()
    workers: Annotated[int | None, Option("Number of workers. Default: 1; one per core if distributed.", "-w")] = None
    hosts: _Hosts = None
    threads: _Threads = None
    out: Annotated[Path, Option("Directory for run folders.", "-o", metavar="FOLDER")] = Path("runs")
    resume: Annotated[Path | None, Option("Resume the run in this folder.", command_line_only=True)] = None
    port: Annotated[int, Option("Rendezvous port; 0 picks a free one.")] = 0


@dataclass(frozen=True)
class CompareOptions:
    """Compare strategies: which one reaches the target first, on this machine and your script or task."""

    what: _TargetOrResume = None
    arguments: _Arguments = ()
    strategies: Annotated[
        tuple[str, ...],
        Option(
            "A strategy to compare. Repeat it for several; a set is a sweep: `local({4,16})`. Default: "
            "allreduce, local({4,16}), gossip, hogwild, server(consistency=ssp(3)). The baseline `ddp` is "
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
        str, Option("Learning-rate factors to try first for each strategy, on a separate seed.", metavar="none|0.5,1,2")
    ] = "0.5,1,2"
    single: Annotated[bool, Option("Include a single worker, to report the speed-up.")] = True
    budget: Annotated[
        str | None,
        Option(
            "Time limit of the comparison, e.g. `10m`. If it is short, every strategy gets fewer seeds.", metavar="TIME"
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
    """Measure the speed-up at several worker counts, and fit Amdahl's and Gunther's laws."""

    strategy: Annotated[str, Option("Strategy; see `offbeat strategies`.", "-s")] = "allreduce"
    workers: Annotated[str, Option("Worker counts to measure; 1 is always included.", "-w")] = "1,2,4"
    weak: Annotated[bool, Option("Weak scaling: the batch grows with the number of workers.")] = False
    repeats: Annotated[int, Option("Interleaved runs per worker count.")] = 3
    seconds: Annotated[float, Option("Approximate duration of a single-worker run.")] = 3.0


@dataclass(frozen=True)
class BatchSizeOptions(_Measuring):
    """Measure the gradient noise scale in a short run, and suggest a batch size and a number of workers."""

    workers: Annotated[int, Option("Workers to measure with: the noise is how much their gradients differ.", "-w")] = 2
    seconds: Annotated[float, Option("Approximate duration of the run.")] = 20.0
    times: Annotated[int, Option("Multiply every batch by this factor, to see the noise more easily.")] = 1
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
    """Show who waited for whom in a recorded run, find stragglers and deadlocks, and draw a space-time diagram.

    Exit codes: 0 healthy, 10 deadlock, 11 mismatched calls, 12 a wait for a worker that had ended, 13 a worker missing
    for a long time, 14 a dead process, 15 NaN or infinite numbers.

    With --cut: 20 if the cut is inconsistent and nothing else is wrong. With --verify-checkpoint: 20 if the checkpoint
    is refused.
    """

    path: Annotated[
        Path,
        Argument(
            "Folder of a run recorded with `--monitor`, or a log with vector clocks of any program, in the "
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
    """The options of `offbeat explain` that do more than print a verdict."""

    draw: Annotated[
        Path | None,
        Option(
            "Draw the space-time diagram to this .svg or .png file (.png needs matplotlib).",
            metavar="FILE",
            name="picture",
        ),
    ] = None
    window: Annotated[
        str | None, Option("Restrict drawing and predicates to this time window, e.g. `3s..4s`.", metavar="FROM..TO")
    ] = None
    cuts: Annotated[
        tuple[str, ...],
        Option(
            "Test a cut for consistency and draw it: `latest`, `3.5s`, `past worker 0:123` (the causal past of that "
            "event), or `worker 0:123, worker 1:120` (that many events of each). Repeatable.",
            metavar="CUT",
            name="cut",
        ),
    ] = ()
    export: Annotated[Path | None, Option("Export as .shiviz, .perfetto, .json or .jsonl.", metavar="FILE")] = None
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
            "Separator of executions in a log; its group (?<trace>), if present, names the next one.", metavar="REGEX"
        ),
    ] = None
    delivery: Annotated[
        str | None,
        Option(
            "Replay the run to a remote monitor under this delivery rule (fifo, real-time, lamport, vector, arrival): "
            "how many reports it buffers, for how long, and which verdicts are phantoms.",
            metavar="RULE",
        ),
    ] = None
    delay: Annotated[str | None, Option("Mean delay of reports for --delivery. Default: 5ms.", metavar="TIME")] = None
    possibly: Annotated[
        tuple[str, ...],
        Option(
            "Did this hold on some consistent cut? `all-waiting`, `nobody-computing`, "
            "`in-flight>N` (messages) or `steps-apart>N`. Repeatable.",
            metavar="PREDICATE",
        ),
    ] = ()
    definitely: Annotated[tuple[str, ...], Option("Did this hold in every order of events?", metavar="PREDICATE")] = ()


@dataclass(frozen=True)
class CheckOptions(Printed):
    """Run the contract suite on a strategy, a schedule or a set of machines, built in or your own.

    Schedules are proved for 1 to 33 ranks, simulated with numbers in virtual time, and run on real processes. Machines
    meet delays, reordering, losses, duplicates, stops, partitions and kills. Exit code 1: a promise does not hold.
    """

    subject: Annotated[
        str,
        Argument(
            "A strategy (`mine.py:Push(0.5)`, `allreduce`), a schedule "
            "(`mine.py:my_ring`: a function of view and layout) or a contract of machines "
            "(`mine.py:MyContract`).",
            "SUBJECT",
        ),
    ]
    workers: Annotated[int | None, Option("Workers of a strategy. Default: 2, or those of --hosts.", "-w")] = None
    hosts: _Hosts = None
    collective: Annotated[str | None, Option("Collective of a schedule. Default: all_reduce.")] = None
    runs: Annotated[int | None, Option("Fault-injection seeds for machines. Default: 200.")] = None
    seed: Annotated[int | None, Option("Only this seed, to reproduce a failure with its events.")] = None


_SIMULATED = "Simulated (with --simulate)"
_MEASURED = "Measured (without --simulate)"


@dataclass(frozen=True)
class CollectivesOptions(Printed):
    """Time all-reduce and other collectives: every algorithm at every size, measured or simulated."""

    ranks: Annotated[int, Option("Number of ranks.", "-r")] = 2
    size: Annotated[
        str | None,
        Option(
            "Largest buffer size (B, kB, MB, GB, KiB, MiB, GiB); smaller sizes are added. Default: `100MB` "
            "simulated, `25MiB` measured."
        ),
    ] = None
    sizes: Annotated[str | None, Option("Exactly these sizes, e.g. `4kB,1MB,25MiB`.")] = None
    simulate: Annotated[bool, Option("Simulate a network instead of measuring.")] = False
    network: Annotated[
        str | None,
        Option(
            "Links between hosts: rate and latency, e.g. `10Gbit,50us`; optionally the reduction speed: "
            "`10Gbit,50us,8GB/s`.",
            panel=_SIMULATED,
        ),
    ] = None
    inside: Annotated[str | None, Option("Links inside a host. Default: `100Gbit,1us`.", panel=_SIMULATED)] = None
    host_count: Annotated[int | None, Option("Number of hosts. Default: one per rank.", panel=_SIMULATED)] = None
    per_host: Annotated[int | None, Option("Ranks per host, instead of --host-count.", panel=_SIMULATED)] = None
    ports: Annotated[
        str | None, Option("One network card per `rank` (the default) or per `host`.", panel=_SIMULATED)
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
        str | None, Option("Libraries to measure. Default: `offbeat,gloo`, and mpi if installed.", panel=_MEASURED)
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
    """Simulate parameter servers: step time, waiting and staleness under stragglers."""

    simulate: Annotated[bool, Option("Simulate (required: there is no measured mode yet).")] = False
    workers: Annotated[int, Option("Number of workers.", "-w")] = 100
    steps: Annotated[int, Option("Steps per worker.")] = 1000
    step: Annotated[str, Option("Compute time of a step without stragglers.")] = "40ms"
    stragglers: Annotated[
        str,
        Option(
            "Straggler model: `transient(0.2, 0.15)` pauses a step for 0.2 s with probability 0.15, "
            "`permanent(4)` makes one worker 4 times slower (`permanent(4, 3)`: three of them), "
            "`pareto(0.01, 1.5)` (scale, shape) and `lognormal(0.01, 1)` (median, sigma) add a "
            "heavy-tailed pause to every step. Combine with +."
        ),
    ] = "none"
    rules: Annotated[
        tuple[str, ...],
        Option(
            "Consistency rule: `bsp` (all wait for all), `ssp(3)` (at most 3 steps ahead of the "
            "slowest), `asp` (no waiting), `drop_slowest(2)`, `deadline(0.5)`. "
            "Repeatable. Default: bsp, ssp(3), asp.",
            name="consistency",
        ),
    ] = ()
    strategies: Annotated[
        tuple[str, ...],
        Option(
            "A whole strategy on servers: `server(consistency=ssp(3, eager))`, `downpour(push=4, fetch=4)`, "
            "`elastic(period=10)`, `coded(s=1)`. Simulated from the protocol that its processes run. Repeatable.",
            "-s",
            name="strategy",
        ),
    ] = ()
    size: Annotated[str | None, Option("Bytes pushed and pulled per step, e.g. `100MB`; needs --network.")] = None
    servers: Annotated[int | None, Option("Number of servers. Default: 1.")] = None
    network: Annotated[
        str | None,
        Option(
            "Rate and latency, e.g. `10Gbit,50us`; optionally the servers' update speed: "
            "`10Gbit,50us,8GB/s`. Without it, communication is free."
        ),
    ] = None
    seed: Annotated[int, Option("Random seed; every rule meets the same stragglers.")] = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be answered."""
        if not self.simulate:
            raise UsageError("bench server only simulates: add --simulate.")


@dataclass(frozen=True)
class DrawOptions:
    """Draw who sends what to whom and when: any strategy or schedule, or a simulated run of servers or machines.

    Drawn from the schedules and machines that processes execute, in virtual time.
    """

    strategy: Annotated[
        str,
        Argument(
            "What to draw: a strategy such as `gossip(exponential)`, `server(consistency=asp)` or `local(4) + "
            "topk(0.01)`; an algorithm of a collective, `all_gather(ring)`; or your own `mine.py:my_ring`.",
            "STRATEGY",
        ),
    ]
    workers: Annotated[int, Option("Number of workers.", "-w")] = 4
    network: Annotated[
        str,
        Option(
            "Links between hosts: rate and latency, e.g. `10Gbit,50us`; optionally the reduction speed: "
            "`10Gbit,50us,8GB/s`."
        ),
    ] = "10Gbit,50us"
    inside: Annotated[str | None, Option("Links inside a host. Default: `100Gbit,1us`.")] = None
    size: Annotated[str, Option("Size of the model, or of a collective's buffer.")] = "100MB"
    per_host: Annotated[int, Option("Workers per host.")] = 1
    steps: Annotated[int | None, Option("Steps to draw. Default: one period of the strategy.")] = None
    step: Annotated[str, Option("Compute time of a step without stragglers.")] = "40ms"
    stragglers: Annotated[str, Option("Straggler model, as in `offbeat bench server`: `permanent(2)` …")] = "none"
    collective: Annotated[str | None, Option("Collective of your own schedule. Default: all_reduce.")] = None
    seed: Annotated[int, Option("Random seed.")] = 0
    picture: Annotated[
        Path | None, Option("Draw to this .svg or .png file (.png needs matplotlib).", "-o", metavar="FILE")
    ] = None
    output: Annotated[TableFormat, Option("`json` prints every round, message and interval.", name="format")] = (
        TableFormat.table
    )


_Runs = Annotated[Path, Option("Directory of run folders.", "-o", metavar="FOLDER")]
_Run = Annotated[Path, Argument("Run folder, or its name below --out, e.g. latest.", "RUN")]


@dataclass(frozen=True)
class WatchOptions:
    """Serve a local web page of runs, live and finished; only this machine can reach it, with the printed address."""

    path: Annotated[Path, Argument("Run folder, or directory of run folders.", "[RUN|FOLDER]")] = Path("runs")
    port: Annotated[int, Option("Loopback port; 0 picks a free one.")] = 0
    browser: Annotated[bool, Option("Open the page in a browser.", name="open")] = False
    export: Annotated[Path | None, Option("Save the run's page as one HTML file.", metavar="FILE")] = None


@dataclass(frozen=True)
class PsOptions(Printed):
    """List running runs, with their processes and progress."""

    folder: Annotated[Path, Argument("Directory of run folders.", "[RUNS]")] = Path("runs")
    everything: Annotated[bool, Option("Include finished runs.", "-a", name="all")] = False


@dataclass(frozen=True)
class StopOptions:
    """Stop a run as Ctrl-C in its terminal would, and wait until all of its processes have ended."""

    run: _Run
    kill: Annotated[bool, Option("Stop at once, with SIGKILL: no checkpoint is written, no result is kept.")] = False
    within: Annotated[float, Option("Seconds to wait until it has ended.")] = 30.0
    out: _Runs = Path("runs")


@dataclass(frozen=True)
class LogsOptions:
    """Print the output of a run's workers and servers, each line with its process."""

    run: _Run
    rank: Annotated[tuple[int, ...], Option("Only this worker. Repeatable.", "-r")] = ()
    server: Annotated[
        tuple[str, ...], Option("Only this server: shard and copy, `0.1`, or the shard alone. Repeatable.")
    ] = ()
    follow: Annotated[bool, Option("Keep printing as long as the run goes on.", "-f")] = False
    out: _Runs = Path("runs")


@dataclass(frozen=True)
class StrategiesOptions(Printed):
    """List the strategies, or describe one."""

    name: Annotated[str | None, Argument("The strategy to describe.", "[NAME]")] = None


@dataclass(frozen=True)
class DoctorOptions(Printed):
    """Print what a bug report needs, and test that two processes can communicate."""


@dataclass(frozen=True)
class ConfigOptions(Printed):
    """Print the settings of commands, and where each comes from: a default or a config file."""

    command: Annotated[tuple[str, ...], Argument("The command to show. Default: all.", "[COMMAND]")] = ()
    config: Annotated[Path | None, CONFIG] = None


@dataclass(frozen=True)
class NewKeys:
    """Create a key pair. Every process that has this file may connect."""

    file: Annotated[Path, Argument("Key file; only its owner can read it.", "FILE")]


@dataclass(frozen=True)
class ShownKeys(NewKeys):
    """Print the public key and the allowed keys; never the secret key."""


@dataclass(frozen=True)
class AllowedKey(NewKeys):
    """Allow the holder of another key file to connect, by its public key."""

    public: Annotated[str, Argument("Public key of another key file.", "PUBLIC")]
