"""The options of every command: settings types whose fields they are, and whose docstrings are the help."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from offbeat.cli.from_settings import ConfigFile
from offbeat.errors import UsageError
from offbeat.settings import argument, option

OutputFormat = StrEnum("OutputFormat", ["text", "json"])
"""How results are printed."""
TableFormat = StrEnum("TableFormat", ["table", "json"])
"""How tables are printed."""
LeagueFormat = StrEnum("LeagueFormat", ["table", "json", "markdown", "csv", "html"])
"""How a comparison is printed."""


def refuse(options: object, names: Iterable[str], why: str) -> None:
    """Refuse options that were given and do not apply."""
    for name in names:
        if getattr(options, name) not in (None, ()):
            raise UsageError(f"--{name.replace('_', '-')} {why}.")


@dataclass(frozen=True, kw_only=True)
class Printed:
    """Options of a command whose result is printed as text or JSON."""

    output: OutputFormat = option(
        OutputFormat.text, "`json` prints the result on stdout and nothing else.", name="format"
    )

    @property
    def as_json(self) -> bool:
        """Whether JSON is printed on stdout, and nothing else."""
        return self.output is OutputFormat.json


_TARGET = (
    "A script (`train.py`, its arguments after `--`) or a task (`file.py:Class`, or a "
    "module such as `offbeat.tasks.digits`)."
)
_TARGET_OR_RESUME = f"{_TARGET} Omit it with --resume."
_ARGUMENTS = "Arguments of the script, or `--name value` pairs of the task."
_HOSTS = (
    "TOML file of the hosts to run on: a `\\[\\[host]]` table each, with name, number of workers and link "
    "rate (`100Mbit`). Hosts are machines behind ssh, or network namespaces of this machine, which needs root; see "
    "docs/hosts.md."
)
_ON = (
    "Where to run: `local` (the default), a file as for --hosts, `ray` or `ray://ADDRESS`, or `slurm`; see "
    "docs/engines.md."
)
_SHIP = "Send the code in this folder (what git tracks there) to the machines, which otherwise must have it."
_THREADS = "Threads per worker. Default: cores divided by workers."
_NETWORK = (
    "Links between hosts: rate and latency, e.g. `10Gbit,50us`; optionally the reduction speed: `10Gbit,50us,8GB/s`."
)
_INSIDE = "Links inside a host. Default: `100Gbit,1us`."
_STEP = "Compute time of a step without stragglers."
_RUN = "Run folder, or its name below --out, e.g. latest."
_RUNS = "Directory of run folders."


@dataclass(frozen=True)
class RunOptions(Printed):
    """Train a script or a task, and report the result."""

    what: str | None = argument(_TARGET_OR_RESUME, "TARGET", None)
    arguments: tuple[str, ...] = argument(_ARGUMENTS, "[-- ARGS]", ())
    workers: int | None = option(None, "Number of workers. Default: 1; one per core if distributed.", "-w")
    on: str | None = option(None, _ON, metavar="ENGINE")
    hosts: Path | None = option(None, _HOSTS, metavar="FILE")
    ship: Path | None = option(None, _SHIP, metavar="FOLDER")
    sbatch: str = option(
        "",
        "With --on slurm outside an allocation: options of the job, e.g. `--nodes=2 --time=1:00:00`.",
        metavar="OPTIONS",
    )
    dry_run: bool = option(
        False,
        "Print where each process would be, or the script that Slurm would get, and start nothing.",
        command_line_only=True,
    )
    threads: int | None = option(None, _THREADS)
    out: Path = option(Path("runs"), "Directory for run folders.", "-o", metavar="FOLDER")
    resume: Path | None = option(None, "Resume the run in this folder.", command_line_only=True)
    port: int = option(0, "Rendezvous port; 0 picks a free one.")


@dataclass(frozen=True)
class CompareOptions:
    """Compare strategies: which one reaches the target first, on this machine and your script or task."""

    what: str | None = argument(_TARGET_OR_RESUME, "TARGET", None)
    arguments: tuple[str, ...] = argument(_ARGUMENTS, "[-- ARGS]", ())
    strategies: tuple[str, ...] = option(
        (),
        "A strategy to compare. Repeat it for several; a set is a sweep: `local({4,16})`. Default: allreduce, "
        "local({4,16}), gossip, hogwild, server(consistency=ssp(3)). The baseline `ddp` is always included, twice.",
        "-s",
        name="strategy",
    )
    workers: int | None = option(None, "Number of workers. Default: one per core, at least 2.", "-w")
    on: str | None = option(None, _ON, metavar="ENGINE")
    hosts: Path | None = option(None, _HOSTS, metavar="FILE")
    seeds: int | None = option(None, "Seeds per strategy. Default: 5.")
    seed: int = option(0, "First seed; the others follow it.")
    tune: str = option(
        "0.5,1,2", "Learning-rate factors to try first for each strategy, on a separate seed.", metavar="none|0.5,1,2"
    )
    single: bool = option(True, "Include a single worker, to report the speed-up.")
    budget: str | None = option(
        None,
        "Time limit of the comparison, e.g. `10m`. If it is short, every strategy gets fewer seeds.",
        metavar="TIME",
    )
    threads: int | None = option(None, _THREADS)
    out: Path = option(Path("runs"), "Directory for the comparison's folder.", "-o", metavar="FOLDER")
    resume: Path | None = option(
        None, "Resume the comparison in this folder.", metavar="FOLDER", command_line_only=True
    )
    output: LeagueFormat = option(LeagueFormat.table, "Output format.", name="format")
    report: Path | None = option(None, "Write the report to this file instead of stdout.", metavar="FILE")


@dataclass(frozen=True)
class _Measuring(Printed):
    """The options that `offbeat scale` and `offbeat batch-size` share."""

    what: str = argument(_TARGET, "TARGET")
    arguments: tuple[str, ...] = argument(_ARGUMENTS, "[-- ARGS]", ())
    steps: int | None = option(None, "Steps per run, instead of --seconds.")
    threads: int = option(1, "Threads per worker.")
    seed: int = option(0, "Random seed.")
    out: Path | None = option(None, "Keep run folders in this directory.", "-o")


@dataclass(frozen=True)
class ScaleOptions(_Measuring):
    """Measure the speed-up at several worker counts, and fit Amdahl's and Gunther's laws."""

    strategy: str = option("allreduce", "Strategy; see `offbeat strategies`.", "-s")
    workers: str = option("1,2,4", "Worker counts to measure; 1 is always included.", "-w")
    weak: bool = option(False, "Weak scaling: the batch grows with the number of workers.")
    repeats: int = option(3, "Interleaved runs per worker count.")
    seconds: float = option(3.0, "Approximate duration of a single-worker run.")


@dataclass(frozen=True)
class BatchSizeOptions(_Measuring):
    """Measure the gradient noise scale in a short run, and suggest a batch size and a number of workers."""

    workers: int = option(2, "Workers to measure with: the noise is how much their gradients differ.", "-w")
    seconds: float = option(20.0, "Approximate duration of the run.")
    times: int = option(1, "Multiply every batch by this factor, to see the noise more easily.")
    delta: float = option(
        0.25, "Accepted loss of efficiency: an example of the largest batch is worth 1 / (1 + delta) of one alone."
    )
    check: bool = option(
        False,
        "Also compute per-example gradients (tasks with small models): they test the estimate, and compare ways to "
        "raise gradient diversity.",
        name="per-example",
    )


@dataclass(frozen=True)
class ExplainTarget(Printed):
    """Show who waited for whom in a recorded run, find stragglers and deadlocks, and draw a space-time diagram.

    Exit codes: 0 healthy, 10 deadlock, 11 mismatched calls, 12 a wait for a worker that had ended, 13 a worker missing
    for a long time, 14 a dead process, 15 NaN or infinite numbers.

    With --cut: 20 if the cut is inconsistent and nothing else is wrong. With --verify-checkpoint: 20 if the checkpoint
    is refused.
    """

    path: Path = argument(
        "Folder of a run recorded with `--monitor`, or a log with vector clocks of any program, in the "
        "format of ShiViz and GoVector.",
        "RUN|LOG",
    )
    check: bool = option(
        False,
        "Verify a checkpoint (RUN, or the newest of RUN): its files are complete and, if it is a snapshot of an "
        "asynchronous run, it is a consistent cut. Exit code 20 if not.",
        name="verify-checkpoint",
    )


@dataclass(frozen=True)
class ExplainOptions:
    """The options of `offbeat explain` that do more than print a verdict."""

    draw: Path | None = option(
        None,
        "Draw the space-time diagram to this .svg or .png file (.png needs matplotlib).",
        metavar="FILE",
        name="picture",
    )
    window: str | None = option(
        None, "Restrict drawing and predicates to this time window, e.g. `3s..4s`.", metavar="FROM..TO"
    )
    cuts: tuple[str, ...] = option(
        (),
        "Test a cut for consistency and draw it: `latest`, `3.5s`, `past worker 0:123` (the causal past of that "
        "event), or `worker 0:123, worker 1:120` (that many events of each). Repeatable.",
        metavar="CUT",
        name="cut",
    )
    export: Path | None = option(None, "Export as .shiviz, .perfetto, .json or .jsonl.", metavar="FILE")
    kind: str | None = option(
        None, "Export format, if the file name does not say it.", metavar="shiviz|perfetto|trace|jsonl", name="as"
    )
    pattern: str | None = option(
        None,
        "Pattern of the log's events, with groups (?<host>), (?<clock>) and (?<event>), as in ShiViz.",
        metavar="REGEX",
    )
    execution: str | None = option(None, "Which execution to read, if the log has several.", metavar="NAME")
    delimiter: str | None = option(
        None,
        "Separator of executions in a log; its group (?<trace>), if present, names the next one.",
        metavar="REGEX",
    )
    delivery: str | None = option(
        None,
        "Replay the run to a remote monitor under this delivery rule (fifo, time, lamport, vector, arrival): "
        "how many reports it buffers, for how long, and which verdicts are phantoms.",
        metavar="RULE",
    )
    delay: str | None = option(None, "Mean delay of reports for --delivery. Default: 5ms.", metavar="TIME")
    possibly: tuple[str, ...] = option(
        (),
        "Did this hold on some consistent cut? `all-waiting`, `nobody-computing`, `in-flight>N` (messages) or "
        "`steps-apart>N`. Repeatable.",
        metavar="PREDICATE",
    )
    definitely: tuple[str, ...] = option((), "Did this hold in every order of events?", metavar="PREDICATE")


@dataclass(frozen=True)
class CheckOptions(Printed):
    """Run the contract suite on a strategy, a schedule or a set of machines, built in or your own.

    Schedules are proved for 1 to 33 ranks, simulated with numbers in virtual time, and run on real processes. Machines
    meet delays, reordering, losses, duplicates, stops, partitions and kills. Exit code 1: a promise does not hold.
    """

    subject: str = argument(
        "A strategy (`mine.py:Push(0.5)`, `allreduce`), a schedule (`mine.py:my_ring`: a function of view and layout) "
        "or a contract of machines (`mine.py:MyContract`).",
        "SUBJECT",
    )
    workers: int | None = option(None, "Workers of a strategy. Default: 2, or those of --hosts.", "-w")
    hosts: Path | None = option(None, _HOSTS, metavar="FILE")
    collective: str | None = option(None, "Collective of a schedule. Default: all_reduce.")
    runs: int | None = option(None, "Fault-injection seeds for machines. Default: 200.")
    seed: int | None = option(None, "Only this seed, to reproduce a failure with its events.")


_SIMULATED = "Simulated (with --simulate)"
_MEASURED = "Measured (without --simulate)"


@dataclass(frozen=True)
class CollectivesOptions(Printed):
    """Time all-reduce and other collectives: every algorithm at every size, measured or simulated."""

    ranks: int = option(2, "Number of ranks.", "-r")
    size: str | None = option(
        None,
        "Largest buffer size (B, kB, MB, GB, KiB, MiB, GiB); smaller sizes are added. Default: `100MB` "
        "simulated, `25MiB` measured.",
    )
    sizes: str | None = option(None, "Exactly these sizes, e.g. `4kB,1MB,25MiB`.")
    simulate: bool = option(False, "Simulate a network instead of measuring.")
    network: str | None = option(None, _NETWORK, panel=_SIMULATED)
    inside: str | None = option(None, _INSIDE, panel=_SIMULATED)
    host_count: int | None = option(None, "Number of hosts. Default: one per rank.", panel=_SIMULATED)
    per_host: int | None = option(None, "Ranks per host, instead of --host-count.", panel=_SIMULATED)
    ports: str | None = option(None, "One network card per `rank` (the default) or per `host`.", panel=_SIMULATED)
    collective: str | None = option(
        None,
        "all_reduce (the default), broadcast, reduce, reduce_scatter, all_gather, gather, scatter, all_to_all or "
        "barrier.",
        panel=_SIMULATED,
    )
    call: tuple[str, ...] = option(
        (),
        "What to measure: all_reduce (the default), broadcast, all_gather, reduce_scatter, all_to_all, gather, "
        "scatter, barrier, send (one message) or exchange (a message each way at once). Repeat for several.",
        panel=_MEASURED,
    )
    peers: str | None = option(
        None, "Libraries to measure. Default: `offbeat,gloo`, and mpi if installed.", panel=_MEASURED
    )
    blocks: int | None = option(None, "Interleaved measurement blocks. Default: 15.", panel=_MEASURED)
    report: Path | None = option(None, "Also write JSON to this file.", "-o", metavar="FILE", panel=_MEASURED)
    picture: Path | None = option(
        None, "Also plot time against size to this file (needs matplotlib).", metavar="FILE", panel=_MEASURED
    )

    def __post_init__(self) -> None:
        """Refuse options of the other way of answering."""
        if self.simulate:
            names = ("peers", "blocks", "report", "picture", "call")
            refuse(self, names, "applies to measurements: omit it, or omit --simulate")
        else:
            names = ("network", "inside", "host_count", "per_host", "ports", "collective")
            refuse(self, names, "applies to simulations: add --simulate, or omit it")


@dataclass(frozen=True)
class ServerOptions(Printed):
    """Simulate parameter servers: step time, waiting and staleness under stragglers."""

    simulate: bool = option(False, "Simulate (required: there is no measured mode yet).")
    workers: int = option(100, "Number of workers.", "-w")
    steps: int = option(1000, "Steps per worker.")
    step: str = option("40ms", _STEP)
    stragglers: str = option(
        "none",
        "Straggler model: `transient(0.2, 0.15)` pauses a step for 0.2 s with probability 0.15, `permanent(4)` makes "
        "one worker 4 times slower (`permanent(4, 3)`: three of them), `pareto(0.01, 1.5)` (scale, shape) and "
        "`lognormal(0.01, 1)` (median, sigma) add a heavy-tailed pause to every step. Combine with +.",
    )
    rules: tuple[str, ...] = option(
        (),
        "Consistency rule: `bsp` (all wait for all), `ssp(3)` (at most 3 steps ahead of the slowest), `asp` (no "
        "waiting), `drop_slowest(2)`, `deadline(0.5)`. Repeatable. Default: bsp, ssp(3), asp.",
        name="consistency",
    )
    strategies: tuple[str, ...] = option(
        (),
        "A whole strategy on servers: `server(consistency=ssp(3, eager))`, `downpour(push=4, fetch=4)`, "
        "`elastic(period=10)`, `coded(s=1)`. Simulated from the protocol that its processes run. Repeatable.",
        "-s",
        name="strategy",
    )
    size: str | None = option(None, "Bytes pushed and pulled per step, e.g. `100MB`; needs --network.")
    servers: int | None = option(None, "Number of servers. Default: 1.")
    network: str | None = option(
        None,
        "Rate and latency, e.g. `10Gbit,50us`; optionally the servers' update speed: `10Gbit,50us,8GB/s`. Without it, "
        "communication is free.",
    )
    seed: int = option(0, "Random seed; every rule meets the same stragglers.")

    def __post_init__(self) -> None:
        """Refuse what cannot be answered."""
        if not self.simulate:
            raise UsageError("bench server only simulates: add --simulate.")


@dataclass(frozen=True)
class DrawOptions:
    """Draw who sends what to whom and when: any strategy or schedule, or a simulated run of servers or machines.

    Drawn from the schedules and machines that processes execute, in virtual time.
    """

    strategy: str = argument(
        "What to draw: a strategy such as `gossip(exponential)`, `server(consistency=asp)` or `local(4) + "
        "topk(0.01)`; a pipeline, `pipeline(4, gpipe)`; an algorithm of a collective, `all_gather(ring)`; or your own "
        "`mine.py:my_ring`.",
        "STRATEGY",
    )
    workers: int | None = option(None, "Number of workers. Default: 4, or the stages of a pipeline.", "-w")
    network: str = option("10Gbit,50us", _NETWORK)
    inside: str | None = option(None, _INSIDE)
    size: str | None = option(
        None,
        "Size of the model, or of a collective's buffer. Default: 100MB. For a pipeline: of what a microbatch brings "
        "from one stage to the next. Default: 100KB.",
    )
    per_host: int = option(1, "Workers per host.")
    steps: int | None = option(None, "Steps to draw. Default: one period of the strategy.")
    microbatches: int | None = option(None, "Microbatches of a pipeline. Default: as the strategy has them.")
    step: str = option("40ms", _STEP)
    stragglers: str = option("none", "Straggler model, as in `offbeat bench server`: `permanent(2)` …")
    collective: str | None = option(None, "Collective of your own schedule. Default: all_reduce.")
    seed: int = option(0, "Random seed.")
    picture: Path | None = option(None, "Draw to this .svg or .png file (.png needs matplotlib).", "-o", metavar="FILE")
    output: TableFormat = option(TableFormat.table, "`json` prints every round, message and interval.", name="format")


ReductionStrategy = StrEnum("ReductionStrategy", ["normal", "applicative", "value", "name"])
"""Which redex the next step reduces."""


@dataclass(frozen=True)
class ReduceOptions(Printed):
    """Reduce a term of the language for servers, step by step, with the next redex marked.

    The term may use the library: S, K, I, B, C, true, false, pair, first, second, zero, succ, add, mul, pow, pred,
    iszero, count. A file that ends in .lam holds a term as well.
    """

    term: str = argument(r"The term, such as `S(KS)K` or `(\x y. x + y) 1 2`; or a .lam file.", "TERM")
    strategy: ReductionStrategy = option(
        ReductionStrategy.normal,
        "`normal`: leftmost outermost; `applicative`: leftmost innermost; `value`, `name`: call by value and by name, "
        "which leave functions as they are.",
    )
    equal: str | None = option(None, "Compare with this term, up to names and reduction; exit code 1 if not equal.")
    draw: Path | None = option(
        None, "Draw the term and its result as trees to this .svg or .png file (.png needs matplotlib).", metavar="FILE"
    )
    budget: int = option(10_000, "Most steps.")


@dataclass(frozen=True)
class WatchOptions:
    """Serve a local web page of runs, live and finished; only this machine can reach it, with the printed address."""

    path: Path = argument("Run folder, or directory of run folders.", "[RUN|FOLDER]", Path("runs"))
    port: int = option(0, "Loopback port; 0 picks a free one.")
    browser: bool = option(False, "Open the page in a browser.", name="open")
    export: Path | None = option(None, "Save the run's page as one HTML file.", metavar="FILE")


@dataclass(frozen=True)
class PsOptions(Printed):
    """List running runs, with their processes and progress."""

    folder: Path = argument(_RUNS, "[RUNS]", Path("runs"))
    everything: bool = option(False, "Include finished runs.", "-a", name="all")


@dataclass(frozen=True)
class StopOptions:
    """Stop a run as Ctrl-C in its terminal would, and wait until all of its processes have ended."""

    run: Path = argument(_RUN, "RUN")
    kill: bool = option(False, "Stop at once, with SIGKILL: no checkpoint is written, no result is kept.")
    within: float = option(30.0, "Seconds to wait until it has ended.")
    out: Path = option(Path("runs"), _RUNS, "-o", metavar="FOLDER")


@dataclass(frozen=True)
class LogsOptions:
    """Print the output of a run's workers and servers, each line with its process."""

    run: Path = argument(_RUN, "RUN")
    rank: tuple[int, ...] = option((), "Only this worker. Repeatable.", "-r")
    server: tuple[str, ...] = option((), "Only this server: shard and copy, `0.1`, or the shard alone. Repeatable.")
    follow: bool = option(False, "Keep printing as long as the run goes on.", "-f")
    out: Path = option(Path("runs"), _RUNS, "-o", metavar="FOLDER")


@dataclass(frozen=True)
class StrategiesOptions(Printed):
    """List the strategies, or describe one."""

    name: str | None = argument("The strategy to describe.", "[NAME]", None)


@dataclass(frozen=True)
class DoctorOptions(Printed):
    """Print what a bug report needs, and test that two processes can communicate."""


@dataclass(frozen=True)
class ConfigOptions(ConfigFile, Printed):
    """Print the settings of commands, and where each comes from: a default or a config file."""

    command: tuple[str, ...] = argument("The command to show. Default: all.", "[COMMAND]", ())


@dataclass(frozen=True)
class NewKeys:
    """Create a key pair. Every process that has this file may connect."""

    file: Path = argument("Key file; only its owner can read it.", "FILE")


@dataclass(frozen=True)
class ShownKeys(NewKeys):
    """Print the public key and the allowed keys; never the secret key."""


@dataclass(frozen=True)
class AllowedKey(NewKeys):
    """Allow the holder of another key file to connect, by its public key."""

    public: str = argument("Public key of another key file.", "PUBLIC")


_FEDERATED_TASK = "A task: `file.py:Class`, or a module such as `offbeat.tasks.digits`."


@dataclass(frozen=True)
class FederatedServerOptions(Printed):
    """Run the rounds of a task with real clients. The server has no data: it selects clients and averages updates."""

    what: str | None = argument(f"{_FEDERATED_TASK} Omit it with --resume.", "TASK", None)
    arguments: tuple[str, ...] = argument("`--name value` pairs of the task.", "[-- ARGS]", ())
    strategy: str | None = option(None, "Strategy, e.g. `federated(clients=3, fraction=1, epochs=2)`.", "-s")
    rounds: int | None = option(None, "Number of rounds. Default: as many as pass over the data as the task says.")
    address: str | None = option(
        None, "Where clients connect: `tcp://HOST:PORT`. Default: a free port that only this machine can reach."
    )
    keys: Path | None = option(
        None, "Key file that allows the clients' keys, client 0's first. Required off this machine.", metavar="FILE"
    )
    peers: Path | None = option(
        None, "List of all clients' signing keys, client 0's first: they sign the secure sums.", metavar="FILE"
    )
    first: int | None = option(None, "Clients that must be there before the first round. Default: all.")
    validate: bool = option(
        False, "Score the model here, on the task's own validation data. Default: clients score it, on theirs."
    )
    target: float | None = option(None, "Stop at this score. Default: the task's.", "-t")
    seed: int = option(0, "Random seed: initial model, selection of clients, and their order of examples.")
    silence: float = option(30.0, "Seconds without a sign of life after which a client is no longer waited for.")
    patience: float = option(
        10.0, "Times as long as the slowest so far that a client may take, if the strategy has no deadline."
    )
    timeout: float = option(3600.0, "Longest wait for enough clients, in seconds.")
    out: Path = option(Path("runs"), "Directory for run folders.", "-o", metavar="FOLDER")
    resume: Path | None = option(None, "Go on with the rounds of the server in this folder.", command_line_only=True)


@dataclass(frozen=True)
class FederatedClientOptions(Printed):
    """Take part in a server's rounds with data of your own, which stays here."""

    address: str = argument("Where the server listens: `tcp://HOST:PORT`.", "ADDRESS")
    what: str = argument(_FEDERATED_TASK, "TASK")
    arguments: tuple[str, ...] = argument("`--name value` pairs of the task.", "[-- ARGS]", ())
    data: Path | None = option(
        None, "Folder with this client's data, which the task's client_data(folder) reads.", metavar="FOLDER"
    )
    part: int | None = option(
        None, "To try things out, instead of --data: the part of the task's data that this client has in simulation."
    )
    name: str | None = option(None, "What the server's operator sees. Default: the name of the data's folder.")
    client: int | None = option(None, "This client's number. Default: that of its key, or the first free one.")
    keys: Path | None = option(None, "This client's own key file. Required off this machine.", metavar="FILE")
    server_key: str | None = option(None, "The server's public key. Default: the one in --keys.", metavar="PUBLIC")
    peers: Path | None = option(
        None,
        "List of all clients' signing keys, client 0's first, from elsewhere than the server: nothing is released "
        "unless they sign.",
        metavar="FILE",
    )
    timeout: float = option(600.0, "Longest silence of the server, in seconds.")
    out: Path = option(Path("runs"), "Directory for what this client keeps: its state, and the final model.", "-o")


@dataclass(frozen=True)
class FederatedIdentityOptions:
    """Print a client's public signing key, for the list of peers. The key is made when it is first needed."""

    data: Path | None = option(None, "Folder with this client's data, as in `federated join`.", metavar="FOLDER")
    part: int | None = option(None, "Number of the part of the task's data, as in `federated join`.")
    name: str | None = option(None, "Its name, as in `federated join`.")
    out: Path = option(Path("runs"), "Directory for what this client keeps, as in `federated join`.", "-o")
