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
from offbeat.cli.commands import runs as alive
from offbeat.cli.commands.draw import EPILOG as DRAW_EXAMPLES
from offbeat.cli.commands.draw import draw
from offbeat.cli.commands.keys import keys
from offbeat.cli.commands.watch import watch
from offbeat.cli.from_settings import command_from
from offbeat.cli.options import (
    BatchSizeOptions,
    CheckOptions,
    CollectivesOptions,
    CompareOptions,
    ExplainOptions,
    ExplainTarget,
    OutputFormat,
    RunOptions,
    ScaleOptions,
    ServerOptions,
)
from offbeat.cli.output import LONG_COMMANDS, FailedError, print_failure, printable, tolerant_streams, wants_json
from offbeat.errors import OffbeatError, OutputError, UsageError, VerdictError, WorkerError
from offbeat.runtime.run.settings import Goal

app = typer.Typer(
    name="offbeat",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a PyTorch script or task on any number of workers, under any distribution strategy.\n\n"
    "Start with: [bold]offbeat run offbeat.tasks.digits --workers 2[/bold]",
    epilog="Your own script: offbeat run train.py --workers 4 -- --its own --arguments",
)
MORE = "More commands"
LEADING = ("strategy", "workers", "target", "epochs", "steps", "seed")
GOAL_OF_LEAGUES = ("target", "epochs", "steps", "disturb", "parts", "device", "timeout")
"""What all runs of a league have in common."""
INTERRUPTED = 130
"""The exit code after Ctrl-C, which typer makes of KeyboardInterrupt."""


FormatOption = Annotated[
    OutputFormat,
    typer.Option("--format", help="[bold]json[/bold] prints the result object on stdout and nothing else."),
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Say the version, or go on to a command."""
    if version:
        typer.echo(f"offbeat {__version__}")
        raise typer.Exit


@app.command(
    no_args_is_help=True,
    epilog="Examples: offbeat run train.py --workers 2 -- --lr 0.1 [dim]|[/dim] "
    "offbeat run offbeat.tasks.digits --workers 2 --strategy 'allreduce + accumulate(2)' --target 0.97 [dim]|[/dim] "
    "offbeat run --resume runs/latest --epochs 40",
)
@command_from(RunOptions, Goal, leading=(*LEADING, "watch", "tensorboard", "disturb"))
def run(given: dict[str, Any]) -> None:
    """Train a script or a task, and report the result."""
    from offbeat.cli.commands.run import run_job

    run_job(RunOptions(**{field.name: given.pop(field.name) for field in fields(RunOptions)}), given)


@app.command(
    no_args_is_help=True,
    epilog="Examples: offbeat compare offbeat.tasks.digits --workers 2 [dim]|[/dim] "
    "offbeat compare train.py --target accuracy=0.97 --workers 2 --strategy allreduce --strategy 'local({4,16})' "
    "--budget 10m -- --its own --arguments [dim]|[/dim] offbeat compare --resume runs/latest-league",
)
@command_from(
    CompareOptions, Goal, only=GOAL_OF_LEAGUES, leading=("strategies", "workers", "hosts", "target", "seeds", "seed")
)
def compare(given: dict[str, Any]) -> None:
    """Compare strategies: which one reaches the target first, on this machine and your script or task."""
    from offbeat.cli.commands.compare import compare_strategies

    compare_strategies(CompareOptions(**{field.name: given.pop(field.name) for field in fields(CompareOptions)}), given)


@app.command(
    no_args_is_help=True,
    epilog="Examples: offbeat run train.py --workers 2 --watch, then offbeat explain runs/latest [dim]|[/dim] "
    "offbeat explain runs/latest --draw run.svg --window 3s..4s --cut latest [dim]|[/dim] "
    "offbeat explain runs/latest --export run.perfetto [dim]|[/dim] offbeat explain other.log --cut 'a:3, b:4' "
    "[dim]|[/dim] offbeat explain runs/latest --delivery vector --possibly 'steps-apart>3' "
    "[dim]|[/dim] offbeat explain --check runs/latest",
)
@command_from(ExplainTarget, ExplainOptions, leading=("path",))
def explain(given: dict[str, Any]) -> None:
    """Show who waited for whom in a recorded run, find stragglers and deadlocks, and draw a space-time diagram.

    Exit codes: 0 healthy, 10 deadlock, 11 mismatched calls, 12 a wait for a worker that had ended, 13 a worker missing
    for a long time, 14 a dead process, 15 NaN or infinite numbers.

    With --cut: 20 if the cut is inconsistent and nothing else is wrong. With --check: 20 if the checkpoint is refused.
    """
    asked = ExplainTarget(**{field.name: given.pop(field.name) for field in fields(ExplainTarget)})
    as_json = asked.output is OutputFormat.json
    if asked.check:
        from offbeat.cli.commands.explain import check_checkpoint

        check_checkpoint(asked.path, as_json)
    from offbeat.cli.commands.explain_diagram import explain
    from offbeat.cli.commands.explain_options import ActionOptions

    explain(asked.path, ActionOptions(**given), as_json)


@app.command(epilog="Example: offbeat doctor --format json > report.json")
def doctor(output: FormatOption = OutputFormat.text) -> None:
    """Print what a bug report needs, and test that two processes can communicate."""
    from offbeat.cli.commands.doctor import examine

    examine(as_json=output is OutputFormat.json)


app.command(
    rich_help_panel=MORE,
    epilog="Examples: offbeat watch [dim]|[/dim] offbeat watch runs/latest --open [dim]|[/dim] "
    "offbeat watch runs/latest --export page.html",
)(watch)


@app.command(rich_help_panel=MORE, epilog="Examples: offbeat strategies [dim]|[/dim] offbeat strategies accumulate")
def strategies(
    name: Annotated[str | None, typer.Argument(help="The strategy to describe.")] = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """List the strategies, or describe one."""
    from offbeat.cli.commands.strategies import show

    show(name, as_json=output is OutputFormat.json)


app.command(rich_help_panel=MORE, no_args_is_help=True, epilog=DRAW_EXAMPLES)(draw)


@app.command(
    rich_help_panel=MORE,
    no_args_is_help=True,
    epilog="Examples: offbeat check allreduce --workers 3 [dim]|[/dim] offbeat check 'mine.py:Push(0.5)' [dim]|[/dim] "
    "offbeat check mine.py:my_ring [dim]|[/dim] offbeat check mine.py:my_gather --collective all_gather [dim]|[/dim] "
    "offbeat check mine.py:MyContract --runs 2000 [dim]|[/dim] offbeat check mine.py:MyContract --seed 17",
)
@command_from(CheckOptions)
def check(given: dict[str, Any]) -> None:
    """Run the contract suite on a strategy, a schedule or a set of machines, built in or your own.

    Schedules are proved for 1 to 33 ranks, played with numbers in virtual time, and run on real processes. Machines
    meet delays, reorderings, losses, doubles, stops, partitions and kills. Exit code 1: it does not hold.
    """
    from offbeat.cli.commands.check import check_any

    check_any(CheckOptions(**given))


bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Benchmark collectives on this machine, or simulate networks and clusters.",
    epilog="Example: offbeat bench collectives --simulate --ranks 64 --network 10Gbit,50us",
)
app.add_typer(bench, name="bench", rich_help_panel=MORE)


@bench.callback()
def bench_root() -> None:
    """Benchmark collectives on this machine, or simulate networks and clusters."""


@bench.command(
    no_args_is_help=True,
    epilog="Examples: offbeat bench collectives --ranks 2 [dim]|[/dim] "
    "offbeat bench collectives --simulate --ranks 4096 --size 100MB --network 10Gbit,50us [dim]|[/dim] "
    "offbeat bench collectives --simulate --ranks 64 --per-host 8 --network 25Gbit,20us --inside 200Gbit,1us",
)
@command_from(CollectivesOptions)
def collectives(given: dict[str, Any]) -> None:
    """Time all-reduce and other collectives: every algorithm at every size, measured or simulated."""
    asked = CollectivesOptions(**given)
    from offbeat.cli.commands.bench import measured, simulated

    (simulated if asked.simulate else measured)(asked)


@bench.command(
    no_args_is_help=True,
    epilog='Examples: offbeat bench server --simulate --workers 100 --stragglers "transient(0.2, 0.15)" [dim]|[/dim] '
    'offbeat bench server --simulate --workers 64 --stragglers "permanent(4)" --rule bsp --rule "drop_slowest(1)" '
    "[dim]|[/dim] offbeat bench server --simulate --workers 64 --size 100MB --servers 8 --network 10Gbit,50us "
    '[dim]|[/dim] offbeat bench server --simulate --workers 8 --strategy "downpour(push=4, fetch=4)" '
    "--strategy elastic",
)
@command_from(ServerOptions)
def server(given: dict[str, Any]) -> None:
    """Simulate parameter servers: step time, waiting and staleness under stragglers."""
    asked = ServerOptions(**given)
    from offbeat.cli.commands.bench import simulated_servers

    simulated_servers(asked)


app.add_typer(keys, name="keys", rich_help_panel=MORE)
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
    """Measure the speed-up at several worker counts, and fit Amdahl's and Gunther's laws."""
    from offbeat.cli.commands.scale import scale_target

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
    """Measure the gradient noise scale in a short run, and suggest a batch size and a number of workers."""
    from offbeat.cli.commands.batch_size import measure_batch_size

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
    typer.echo(typer.style("error: ", fg="red", bold=True) + printable(message), err=True)
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
