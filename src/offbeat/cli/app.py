"""The commands, their options, and what they do when something is wrong.

Nothing heavy is imported here: `offbeat --help` answers at once, and each command imports what it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer

from offbeat._version import __version__
from offbeat.cli import alive
from offbeat.cli.bench_server import EPILOG as SERVER_EXAMPLES
from offbeat.cli.bench_server import server
from offbeat.cli.draw import EPILOG as DRAW_EXAMPLES
from offbeat.cli.draw import draw
from offbeat.cli.from_settings import command_from
from offbeat.cli.options import BatchSizeOptions, CompareOptions, Format, HostFile, RunOptions, ScaleOptions
from offbeat.cli.output import LONG_COMMANDS, FailedError, print_failure, printable, tolerant_streams, wants_json
from offbeat.cli.watch import watch
from offbeat.errors import OffbeatError, OutputError, UsageError, VerdictError, WorkerError
from offbeat.runtime.goal import Goal

app = typer.Typer(
    name="offbeat",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one PyTorch script or task on any number of workers, under any strategy, and see what it cost.\n\n"
    "Start with: [bold]offbeat run offbeat.tasks.digits --workers 2[/bold]",
    epilog="Your own script: offbeat run train.py --workers 4 -- --its own --arguments",
)
MORE = "More commands"
INTERRUPTED = 130
"""The exit code after Ctrl-C, which typer makes of KeyboardInterrupt."""


FormatOption = Annotated[
    Format, typer.Option("--format", help="[bold]json[/bold] prints the result object on stdout and nothing else.")
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Say the version, or go on to a command."""
    if version:
        typer.echo(f"offbeat {__version__}")
        raise typer.Exit


DrawOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the space-time diagram: .svg, or .png (which needs matplotlib)."),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        metavar="FROM..TO", help="Draw, or look for predicates in, this part of it only, e.g. [bold]3s..4s[/bold]."
    ),
]
CutOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CUT",
        help="Say whether a cut is consistent, and draw it: [bold]latest[/bold], [bold]3.5s[/bold], [bold]past worker "
        "0:123[/bold] (all that can have caused this event), or [bold]worker 0:123, worker 1:120[/bold] (so many "
        "events of each); may be given several times.",
    ),
]
DeliveryOption = Annotated[
    str | None,
    typer.Option(
        metavar="fifo|real-time|lamport|vector|arrival",
        help="Replay the run to a monitor that puts late reports in order by this rule: how many it holds back and for "
        "how long, whether the order is one that the run can have had, and verdicts that are phantoms.",
    ),
]
DelayOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="How long such a report takes on average; 5ms unless given.")
]
PossiblyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PREDICATE",
        help="Say whether this held on some consistent cut: [bold]all-waiting[/bold], [bold]nobody-computing[/bold], "
        "[bold]in-flight>N[/bold] (messages) or [bold]steps-apart>N[/bold]; may be given several times.",
    ),
]
DefinitelyOption = Annotated[
    list[str] | None,
    typer.Option(metavar="PREDICATE", help="The same, for every order that the run can have had."),
]
ExportOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write it for other tools: .shiviz, .perfetto, .json or .jsonl.")
]
KindOption = Annotated[
    str | None,
    typer.Option("--as", metavar="shiviz|perfetto|trace|jsonl", help="Export as this, whatever the name says."),
]
PatternOption = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="How the events of a log are written, with groups (?<host>), (?<clock>) and (?<event>), as in ShiViz.",
    ),
]
ExecutionOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which execution, of a log that tells of several.")
]
DelimiterOption = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="What stands between the executions in a log; its group (?<trace>), if there is one, names the next.",
    ),
]
CheckOption = Annotated[
    bool,
    typer.Option(
        "--check",
        help="RUN is a checkpoint, or a run whose newest is meant: say whether its files are whole, and, if it was "
        "taken while the run went on, whether it is a consistent cut that balances. Exit code 20 if not.",
    ),
]
LargestSize = Annotated[
    str | None,
    typer.Option(
        help="The largest size: B, kB, MB, GB, KiB, MiB, GiB, of a rank's whole buffer. Default: "
        "[bold]100MB[/bold] simulated, [bold]25MiB[/bold] measured. A ladder of smaller ones is added."
    ),
]


@app.command(
    no_args_is_help=True,
    epilog="Examples: offbeat run train.py --workers 2 -- --lr 0.1 [dim]|[/dim] "
    "offbeat run offbeat.tasks.digits --workers 2 --strategy 'allreduce + accumulate(2)' --target 0.97 [dim]|[/dim] "
    "offbeat run --resume runs/latest --epochs 40",
)
@command_from(RunOptions, Goal, leading=("strategy", "workers", "target", "epochs", "steps", "seed"))
def run(given: dict[str, Any]) -> None:
    """Train a script or a task on some workers, and report the result."""
    from offbeat.cli.run import run_job

    run_job(RunOptions(**{field.name: given.pop(field.name) for field in fields(RunOptions)}), given)


@app.command(
    no_args_is_help=True,
    epilog="Examples: offbeat compare offbeat.tasks.digits --workers 2 [dim]|[/dim] "
    "offbeat compare train.py --target accuracy=0.97 --workers 2 --strategy allreduce --strategy 'local({4,16})' "
    "--budget 10m -- --its own --arguments [dim]|[/dim] offbeat compare --resume runs/latest-league",
)
@command_from(CompareOptions)
def compare(given: dict[str, Any]) -> None:
    """Find out which strategy is the first to reach a target, here, on your script or task."""
    from offbeat.cli.leagues import compare_strategies

    compare_strategies(CompareOptions(**given))


@app.command(
    no_args_is_help=True,
    epilog="Examples: offbeat run train.py --workers 2 --watch, then offbeat explain runs/latest [dim]|[/dim] "
    "offbeat explain runs/latest --draw run.svg --window 3s..4s --cut latest [dim]|[/dim] "
    "offbeat explain runs/latest --export run.perfetto [dim]|[/dim] offbeat explain other.log --cut 'a:3, b:4' "
    "[dim]|[/dim] offbeat explain runs/latest --delivery vector --possibly 'steps-apart>3' "
    "[dim]|[/dim] offbeat explain --check runs/latest",
)
def explain(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|LOG",
            help="The folder of a run that was made with [bold]--watch[/bold], or a log with vector clocks of any "
            "program, as ShiViz and GoVector have them.",
        ),
    ],
    draw: DrawOption = None,
    window: WindowOption = None,
    cut: CutOption = None,
    export: ExportOption = None,
    kind: KindOption = None,
    pattern: PatternOption = None,
    execution: ExecutionOption = None,
    delimiter: DelimiterOption = None,
    delivery: DeliveryOption = None,
    delay: DelayOption = None,
    possibly: PossiblyOption = None,
    definitely: DefinitelyOption = None,
    check: CheckOption = False,
    output: FormatOption = Format.text,
) -> None:
    """Say who waited for whom in a run, and who held the others up; draw it.

    Exit codes: 0 nobody waited in vain, 10 a deadlock, 11 different calls, 12 somebody waited for a worker that had
    ended, 13 a worker had been missing for long, 14 somebody has died, 15 numbers were not finite.

    With --cut: 20 if it is not consistent, and nothing else was wrong. With --check: 20 if the checkpoint is refused.
    """
    if check:
        from offbeat.cli.explain import check_checkpoint

        check_checkpoint(path, as_json=output is Format.json)
    from offbeat.cli.pictured import explain
    from offbeat.cli.wanted import Wanted

    asked = (delivery, delay, tuple(possibly or ()), tuple(definitely or ()))
    wanted = Wanted(draw, window, tuple(cut or ()), export, kind, pattern, execution, delimiter, *asked)
    explain(path, wanted, as_json=output is Format.json)


@app.command(epilog="Example: offbeat doctor --format json > report.json")
def doctor(output: FormatOption = Format.text) -> None:
    """Say what a bug report needs, and test whether two processes can meet."""
    from offbeat.cli.doctor import examine

    examine(as_json=output is Format.json)


app.command(
    rich_help_panel=MORE,
    epilog="Examples: offbeat watch [dim]|[/dim] offbeat watch runs/latest --open [dim]|[/dim] "
    "offbeat watch runs/latest --export page.html",
)(watch)


@app.command(rich_help_panel=MORE, epilog="Examples: offbeat strategies [dim]|[/dim] offbeat strategies accumulate")
def strategies(
    name: Annotated[str | None, typer.Argument(help="One strategy, with its arguments.")] = None,
    output: FormatOption = Format.text,
) -> None:
    """List the ways to distribute a run, or explain one."""
    from offbeat.cli.strategies import show

    show(name, as_json=output is Format.json)


app.command(rich_help_panel=MORE, no_args_is_help=True, epilog=DRAW_EXAMPLES)(draw)


@app.command(
    rich_help_panel=MORE,
    no_args_is_help=True,
    epilog="Examples: offbeat check allreduce --workers 3 [dim]|[/dim] offbeat check 'mine.py:Push(0.5)' [dim]|[/dim] "
    "offbeat check mine.py:my_ring [dim]|[/dim] offbeat check mine.py:my_gather --collective all_gather [dim]|[/dim] "
    "offbeat check mine.py:MyContract --runs 2000 [dim]|[/dim] offbeat check mine.py:MyContract --seed 17",
)
def check(
    strategy: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT",
            help="A strategy ([bold]mine.py:Push(0.5)[/bold], [bold]allreduce[/bold]), a schedule "
            "([bold]mine.py:my_ring[/bold]: a function of view and layout) or a contract of machines "
            "([bold]mine.py:MyContract[/bold]).",
        ),
    ],
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", help="Workers to check a strategy with. Default: 2, or the hosts'."),
    ] = None,
    hosts: HostFile = None,
    collective: Annotated[
        str | None, typer.Option(help="What a schedule is to achieve: all_reduce (the default), all_gather …")
    ] = None,
    runs: Annotated[int | None, typer.Option(help="Seeds that machines are put through. Default: 200.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Only this seed, to see again what broke machines, and after which events.")
    ] = None,
    output: FormatOption = Format.text,
) -> None:
    """See whether a strategy keeps what its traits promise, a schedule its collective's promise, machines theirs.

    Schedules are proved for 1 to 33 ranks, played with numbers in virtual time, and run on real processes. Machines
    meet delays, reorderings, losses, doubles, stops, partitions and kills. Exit code 1: it does not hold.
    """
    from offbeat.cli.check import Wish, check_any

    check_any(strategy, Wish(workers, hosts, collective, runs, seed, output is Format.json))


bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure what there is, or foretell what there is not.",
    epilog="Example: offbeat bench collectives --simulate --ranks 64 --network 10Gbit,50us",
)
app.add_typer(bench, name="bench", rich_help_panel=MORE)
SIMULATED = "Simulated (with --simulate)"
MEASURED = "Measured (without --simulate)"


@bench.callback()
def bench_root() -> None:
    """Measure what there is, or foretell what there is not."""


@bench.command(
    no_args_is_help=True,
    epilog="Examples: offbeat bench collectives --ranks 2 [dim]|[/dim] "
    "offbeat bench collectives --simulate --ranks 4096 --size 100MB --network 10Gbit,50us [dim]|[/dim] "
    "offbeat bench collectives --simulate --ranks 64 --per-host 8 --network 25Gbit,20us --inside 200Gbit,1us",
)
def collectives(
    ranks: Annotated[int, typer.Option("--ranks", "-r", help="How many ranks take part.")] = 2,
    size: LargestSize = None,
    sizes: Annotated[
        str | None, typer.Option(help="Exactly these sizes instead, e.g. [bold]4kB,1MB,25MiB[/bold].")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="In virtual time, on a network that need not exist.")
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(
            help="Between hosts: rate (kbit, Mbit, Gbit per second) and latency (us, ms, s), "
            "e.g. [bold]10Gbit,50us[/bold]; a third part such as [bold]8GB/s[/bold] says how fast data is reduced.",
            rich_help_panel=SIMULATED,
        ),
    ] = None,
    inside: Annotated[
        str | None,
        typer.Option(
            help="Inside a host, written the same. Default: [bold]100Gbit,1us[/bold].", rich_help_panel=SIMULATED
        ),
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(help="Spread the ranks over this many hosts. Default: one each.", rich_help_panel=SIMULATED),
    ] = None,
    per_host: Annotated[
        int | None, typer.Option(help="Or put this many ranks on each host.", rich_help_panel=SIMULATED)
    ] = None,
    ports: Annotated[
        str | None,
        typer.Option(
            help="Whether each [bold]rank[/bold] has a network card (the default) or each [bold]host[/bold] has one.",
            rich_help_panel=SIMULATED,
        ),
    ] = None,
    collective: Annotated[
        str | None,
        typer.Option(
            help="all_reduce (the default), broadcast, reduce, reduce_scatter, all_gather, gather, scatter, "
            "all_to_all or barrier.",
            rich_help_panel=SIMULATED,
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Whom to measure all-reduce with. Default: [bold]offbeat,gloo[/bold], and mpi where it is found.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(help="Interleaved measurements of each. Default: 15.", rich_help_panel=MEASURED)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the JSON here.", rich_help_panel=MEASURED)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw time against size here (needs matplotlib).", rich_help_panel=MEASURED)
    ] = None,
    output: FormatOption = Format.text,
) -> None:
    """All-reduce and its kin: how long every algorithm takes at every size, and which is the best where."""
    from offbeat.cli.bench import Measured, Simulated, measured, simulated

    foretold, real = (
        Simulated(network, inside, hosts, per_host, ports, collective),
        Measured(peers, blocks, out, picture),
    )
    if simulate:
        real.refuse("is for measuring: leave it or --simulate away")
        simulated(ranks, size, sizes, foretold, output is Format.json)
    else:
        foretold.refuse("is for simulating: add --simulate, or leave it away")
        measured(ranks, size, sizes, real, output is Format.json)


bench.command(no_args_is_help=True, epilog=SERVER_EXAMPLES)(server)


keys = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make and show the keys without which nothing listens to other machines.",
    epilog="Example: offbeat keys new run.keys, then copy run.keys to all machines of the run",
)
app.add_typer(keys, name="keys", rich_help_panel=MORE)
KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="A file of keys; only its owner can read it.")]


@keys.callback()
def keys_root() -> None:
    """Make and show the keys without which nothing listens to other machines."""


@keys.command("new", no_args_is_help=True, epilog="Example: offbeat keys new run.keys")
def keys_new(file: KeyFile) -> None:
    """Write a new pair of keys. Whoever has the same file may connect."""
    from offbeat.cli.keys import new_keys

    new_keys(file)


@keys.command("show", no_args_is_help=True, epilog="Example: offbeat keys show run.keys")
def keys_show(file: KeyFile) -> None:
    """Print the public key, and those that are let in. The secret key is not printed."""
    from offbeat.cli.keys import show_keys

    show_keys(file)


@keys.command("allow", no_args_is_help=True, epilog="Example: offbeat keys allow server.keys PUBLIC")
def keys_allow(
    file: KeyFile, public: Annotated[str, typer.Argument(help="The public key of somebody who has another file.")]
) -> None:
    """Let somebody in who has another file, by its public key."""
    from offbeat.cli.keys import allow_key

    allow_key(file, public)


app.command(rich_help_panel=MORE, epilog="Examples: offbeat ps [dim]|[/dim] offbeat ps --all --format json")(alive.ps)
app.command(
    rich_help_panel=MORE,
    no_args_is_help=True,
    epilog="Examples: offbeat stop runs/latest [dim]|[/dim] offbeat stop runs/latest --kill",
)(alive.stop)
app.command(
    rich_help_panel=MORE,
    no_args_is_help=True,
    epilog="Examples: offbeat logs runs/latest --rank 3 [dim]|[/dim] offbeat logs runs/latest --server 0.1 --follow",
)(alive.logs)


@app.command(
    rich_help_panel=MORE,
    no_args_is_help=True,
    epilog="Examples: offbeat scale offbeat.tasks.digits --workers 1,2 [dim]|[/dim] "
    "offbeat scale train.py --strategy 'local(8)' --workers 1,2,4 --weak -- --lr 0.1",
)
@command_from(ScaleOptions, leading=("strategy", "workers", "weak", "repeats"))
def scale(given: dict[str, Any]) -> None:
    """Measure the speed-up on several numbers of workers, and fit Amdahl's and Gunther's laws to it."""
    from offbeat.cli.scale import scale_target

    scale_target(ScaleOptions(**given))


@app.command(
    "batch-size",
    rich_help_panel=MORE,
    no_args_is_help=True,
    epilog="Examples: offbeat batch-size offbeat.tasks.digits --check [dim]|[/dim] "
    "offbeat batch-size train.py --seconds 30 -- --lr 0.1",
)
@command_from(BatchSizeOptions, leading=("workers",))
def batch_size(given: dict[str, Any]) -> None:
    """Measure the noise in gradients in a short run, and say how large a batch may be, and for how many workers."""
    from offbeat.cli.batch_size import measure_batch_size

    measure_batch_size(BatchSizeOptions(**given))


def main() -> NoReturn:
    """The entry point: run a command; errors of ours are printed, not dumped."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)  # As `python -m` does, so that a task beside the user can be imported.
    words = sys.argv[1:]
    with tolerant_streams(goes_on=words[:1] != [] and words[0] in LONG_COMMANDS):
        code = _code_of_command(wants_json(words))
    sys.exit(code)


def _code_of_command(as_json: bool) -> int:
    """Run the command that was asked for; answers its exit code. A failure is told in JSON, too, where that is read."""
    try:
        code = app(standalone_mode=False)
    except FailedError as failed:
        return _report(failed.cause, as_json, failed.known)
    except OffbeatError as error:
        return _report(error, as_json)
    except OSError as error:
        if error.filename is None:  # Not about a file that the user could do something about.
            raise
        return _report(OutputError(f"{error.filename}: {error.strerror}."), as_json)
    except Exception as error:
        if not hasattr(error, "show"):  # Not click's: a mistake of ours, whose traceback is needed.
            if as_json:
                print_failure(error, 1, str(error), {})
            raise
        _show_usage(error)
        if as_json:
            print_failure(error, 2, cast("Any", error).format_message(), {})
        return 2
    if code == INTERRUPTED:
        return _report(KeyboardInterrupt(), as_json)
    return code if isinstance(code, int) else 0


def _report(error: BaseException, as_json: bool, known: Mapping[str, Any] | None = None) -> int:
    """Say what was wrong; answers the exit code."""
    if isinstance(error, WorkerError) and error.remote_traceback:
        typer.echo(f"In {error.name}:\n{error.remote_traceback.rstrip()}", err=True)
    interrupted = isinstance(error, KeyboardInterrupt)
    message = "interrupted; all processes were ended." if interrupted else str(error)
    _complain(message)
    code = _exit_code(error) if isinstance(error, OffbeatError) else INTERRUPTED if interrupted else 1
    if as_json:
        print_failure(error, code, message, known or {})
    return code


def _exit_code(error: OffbeatError) -> int:
    if isinstance(error, VerdictError):
        from offbeat.monitor import EXIT_CODES

        return EXIT_CODES[error.kind]
    if isinstance(error, WorkerError):
        return error.exit_code
    return 2 if isinstance(error, UsageError) else 1


def _show_usage(error: Exception) -> None:
    """What click says of wrong options, with a hint where a script's own option was probably meant."""
    cast("Any", error).show()
    # Click's error for an option that the command does not have; typer brings a copy of click of its own.
    if hasattr(error, "possibilities") and any(word.partition(":")[0].endswith(".py") for word in sys.argv):
        typer.echo(
            "A script's own arguments stand after `--`: offbeat run train.py --workers 2 -- --its-option 1", err=True
        )


def _complain(text: str) -> None:
    typer.echo(typer.style("error: ", fg="red", bold=True) + printable(text), err=True)
