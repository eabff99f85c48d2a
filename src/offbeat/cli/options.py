"""What commands are asked for: settings types whose fields are their options (see `from_settings`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from offbeat.errors import UsageError
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
    """The options of `offbeat compare` beside those of its runs' `Goal`, and how the league is printed."""

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
    threads: _Threads = None
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
class ExplainTarget:
    """What `offbeat explain` is about, and how it answers."""

    path: Annotated[
        Path,
        Argument(
            "The folder of a run that was made with [bold]--watch[/bold], or a log with vector clocks of any program, "
            "as ShiViz and GoVector have them.",
            "RUN|LOG",
        ),
    ]
    check: Annotated[
        bool,
        Option(
            "RUN is a checkpoint, or a run whose newest is meant: say whether its files are whole, and, if it was "
            "taken while the run went on, whether it is a consistent cut that balances. Exit code 20 if not."
        ),
    ] = False
    output: _Format = Format.text


@dataclass(frozen=True)
class ExplainOptions:
    """What `offbeat explain` is asked for beyond words."""

    draw: Annotated[
        Path | None,
        Option("Draw the space-time diagram: .svg, or .png (which needs matplotlib).", metavar="FILE"),
    ] = None
    window: Annotated[
        str | None,
        Option("Draw, or look for predicates in, this part of it only, e.g. [bold]3s..4s[/bold].", metavar="FROM..TO"),
    ] = None
    cuts: Annotated[
        tuple[str, ...],
        Option(
            "Say whether a cut is consistent, and draw it: [bold]latest[/bold], [bold]3.5s[/bold], [bold]past worker "
            "0:123[/bold] (all that can have caused this event), or [bold]worker 0:123, worker 1:120[/bold] (so many "
            "events of each); may be given several times.",
            metavar="CUT",
            name="cut",
        ),
    ] = ()
    export: Annotated[
        Path | None, Option("Write it for other tools: .shiviz, .perfetto, .json or .jsonl.", metavar="FILE")
    ] = None
    kind: Annotated[
        str | None,
        Option("Export as this, whatever the name says.", metavar="shiviz|perfetto|trace|jsonl", name="as"),
    ] = None
    pattern: Annotated[
        str | None,
        Option(
            "How the events of a log are written, with groups (?<host>), (?<clock>) and (?<event>), as in ShiViz.",
            metavar="REGEX",
        ),
    ] = None
    execution: Annotated[str | None, Option("Which execution, of a log that tells of several.", metavar="NAME")] = None
    delimiter: Annotated[
        str | None,
        Option(
            "What stands between the executions in a log; its group (?<trace>), if there is one, names the next.",
            metavar="REGEX",
        ),
    ] = None
    delivery: Annotated[
        str | None,
        Option(
            "Replay the run to a monitor that puts late reports in order by this rule: how many it holds back and for "
            "how long, whether the order is one that the run can have had, and verdicts that are phantoms.",
            metavar="fifo|real-time|lamport|vector|arrival",
        ),
    ] = None
    delay: Annotated[
        str | None, Option("How long such a report takes on average; 5ms unless given.", metavar="TIME")
    ] = None
    possibly: Annotated[
        tuple[str, ...],
        Option(
            "Say whether this held on some consistent cut: [bold]all-waiting[/bold], [bold]nobody-computing[/bold], "
            "[bold]in-flight>N[/bold] (messages) or [bold]steps-apart>N[/bold]; may be given several times.",
            metavar="PREDICATE",
        ),
    ] = ()
    definitely: Annotated[
        tuple[str, ...], Option("The same, for every order that the run can have had.", metavar="PREDICATE")
    ] = ()


@dataclass(frozen=True)
class CheckOptions:
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
    workers: Annotated[int | None, Option("Workers to check a strategy with. Default: 2, or the hosts'.", "-w")] = None
    hosts: _Hosts = None
    collective: Annotated[
        str | None, Option("What a schedule is to achieve: all_reduce (the default), all_gather …")
    ] = None
    runs: Annotated[int | None, Option("Seeds that machines are put through. Default: 200.")] = None
    seed: Annotated[int | None, Option("Only this seed, to see again what broke machines, and after which events.")] = (
        None
    )
    output: _Format = Format.text

    @property
    def as_json(self) -> bool:
        """Whether the outcome is printed as JSON, and nothing else."""
        return self.output is Format.json


_SIMULATED = "Simulated (with --simulate)"
_MEASURED = "Measured (without --simulate)"


@dataclass(frozen=True)
class CollectivesOptions:
    """The options of `offbeat bench collectives`; None where nothing was said."""

    ranks: Annotated[int, Option("How many ranks take part.", "-r")] = 2
    size: Annotated[
        str | None,
        Option(
            "The largest size: B, kB, MB, GB, KiB, MiB, GiB, of a rank's whole buffer. Default: [bold]100MB[/bold] "
            "simulated, [bold]25MiB[/bold] measured. A ladder of smaller ones is added."
        ),
    ] = None
    sizes: Annotated[str | None, Option("Exactly these sizes instead, e.g. [bold]4kB,1MB,25MiB[/bold].")] = None
    simulate: Annotated[bool, Option("In virtual time, on a network that need not exist.")] = False
    network: Annotated[
        str | None,
        Option(
            "Between hosts: rate (kbit, Mbit, Gbit per second) and latency (us, ms, s), e.g. [bold]10Gbit,50us[/bold]; "
            "a third part such as [bold]8GB/s[/bold] says how fast data is reduced.",
            panel=_SIMULATED,
        ),
    ] = None
    inside: Annotated[
        str | None,
        Option("Inside a host, written the same. Default: [bold]100Gbit,1us[/bold].", panel=_SIMULATED),
    ] = None
    hosts: Annotated[
        int | None, Option("Spread the ranks over this many hosts. Default: one each.", panel=_SIMULATED)
    ] = None
    per_host: Annotated[int | None, Option("Or put this many ranks on each host.", panel=_SIMULATED)] = None
    ports: Annotated[
        str | None,
        Option(
            "Whether each [bold]rank[/bold] has a network card (the default) or each [bold]host[/bold] has one.",
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
            "Whom to measure all-reduce with. Default: [bold]offbeat,gloo[/bold], and mpi where it is found.",
            panel=_MEASURED,
        ),
    ] = None
    blocks: Annotated[int | None, Option("Interleaved measurements of each. Default: 15.", panel=_MEASURED)] = None
    out: Annotated[Path | None, Option("Also write the JSON here.", "-o", panel=_MEASURED)] = None
    picture: Annotated[Path | None, Option("Also draw time against size here (needs matplotlib).", panel=_MEASURED)] = (
        None
    )
    output: _Format = Format.text

    def __post_init__(self) -> None:
        """Refuse options of the other way of answering."""
        if self.simulate:
            self._refuse("is for measuring: leave it or --simulate away", "peers", "blocks", "out", "picture")
        else:
            names = ("network", "inside", "hosts", "per_host", "ports", "collective")
            self._refuse("is for simulating: add --simulate, or leave it away", *names)

    def _refuse(self, why: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} {why}.")


@dataclass(frozen=True)
class ServerOptions:
    """The options of `offbeat bench server`."""

    simulate: Annotated[bool, Option("In virtual time, on machines that need not exist.")] = False
    workers: Annotated[int, Option("How many workers train.", "-w")] = 100
    steps: Annotated[int, Option("Steps that each of them makes.")] = 1000
    step: Annotated[str, Option("What an undisturbed step takes to compute.")] = "40ms"
    stragglers: Annotated[
        str,
        Option(
            "What makes steps longer: [bold]transient(0.2, 0.15)[/bold] pauses a step 0.2 s with probability 0.15, "
            "[bold]permanent(4)[/bold] makes one worker 4 times slower ([bold]permanent(4, 3)[/bold] makes three), "
            "[bold]pareto(0.01, 1.5)[/bold] (scale, shape) and [bold]lognormal(0.01, 1)[/bold] (median, sigma) pause "
            "every step, with a heavy tail. Joined by +."
        ),
    ] = "none"
    rules: Annotated[
        tuple[str, ...],
        Option(
            "Who waits for whom: [bold]bsp[/bold] everybody for everybody, [bold]ssp(3)[/bold] who is more than 3 "
            "steps ahead of the slowest, [bold]asp[/bold] nobody; [bold]drop_slowest(2)[/bold] and "
            "[bold]deadline(0.5)[/bold] go on without the last 2, or after 0.5 s. Repeat it to compare. Default: bsp, "
            "ssp(3), asp.",
            name="rule",
        ),
    ] = ()
    strategies: Annotated[
        tuple[str, ...],
        Option(
            "A whole strategy on servers: [bold]server(consistency=ssp(3, eager))[/bold], [bold]downpour(push=4, "
            "fetch=4)[/bold], [bold]elastic(period=10)[/bold], [bold]coded(s=1)[/bold]. Played from the same text "
            "that its workers and servers run. Repeat it to compare.",
            "-s",
            name="strategy",
        ),
    ] = ()
    size: Annotated[
        str | None, Option("Bytes pushed and pulled in each step, e.g. [bold]100MB[/bold]; needs --network.")
    ] = None
    servers: Annotated[int | None, Option("Servers that they are spread over. Default: 1.")] = None
    network: Annotated[
        str | None,
        Option(
            "Rate and latency, e.g. [bold]10Gbit,50us[/bold]; a third part such as [bold]8GB/s[/bold] says how fast a "
            "server applies what was pushed. Left out, exchanges take no time."
        ),
    ] = None
    seed: Annotated[int, Option("Of the stragglers; every rule meets the same ones.")] = 0
    output: _Format = Format.text

    def __post_init__(self) -> None:
        """Refuse what cannot be answered."""
        if not self.simulate:
            raise UsageError("bench server works in virtual time only: add --simulate.")


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
