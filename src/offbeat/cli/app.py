"""The program: its commands as typer knows them, its entry point, and what it prints when something is wrong."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
import typer.core
import typer.main

from offbeat._version import __version__
from offbeat.cli.catalog import COMMANDS, GROUPS
from offbeat.cli.config import layers, resolved, toml
from offbeat.cli.from_settings import Invocation
from offbeat.cli.old_spellings import respelled
from offbeat.cli.output import LONG_COMMANDS, FailedError, print_failure, printable, tolerant_streams, wants_json
from offbeat.errors import OffbeatError, OutputError, TaskError, UsageError, VerdictError, WorkerError

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
INTERRUPTED = 130
"""The exit code after Ctrl-C, which typer makes of KeyboardInterrupt."""


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Print the version, or go on to a command."""
    if version:
        typer.echo(f"offbeat {__version__}")
        raise typer.Exit


def _configured(file: Path | None, command: str) -> dict[str, tuple[Any, str]]:
    """What config files set for a command: each field's value, and in words what it is and where it is from."""
    (options,) = (entry.configurable() for entry in COMMANDS if entry.name == command)
    names = {option.field: name for name, option in options.items()}
    values = resolved(layers(file), COMMANDS)[command]
    return {
        field: (entry.value, f"{names[field]} = {toml(entry.value)} ({entry.layer.place(entry.section)})")
        for field, entry in values.items()
    }


def _add_commands() -> None:
    groups = {
        name: typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=text, epilog=example)
        for name, (text, example) in GROUPS.items()
    }
    for command in COMMANDS:
        *group, name = command.name.split()
        needs_words = any(entry.default is MISSING for entry in command.entries()) or command.more is not None
        (groups[group[0]] if group else app).command(
            name,
            epilog=command.epilog,
            no_args_is_help=needs_words or bool(group),
            rich_help_panel=None if command.first_page or group else MORE,
        )(command.function(_configured))
    for name, group in groups.items():
        group.callback()(lambda: None)
        app.add_typer(group, name=name, rich_help_panel=MORE)


_add_commands()


class PlainArgument(typer.core.TyperArgument):
    """An argument whose Python type is not shown in the help."""

    def display_type_rich(self, ctx: Any) -> str | None:
        """Nothing: its placeholder says enough."""
        del ctx
        return None


def program() -> Any:
    """The program as a click command whose help shows flags as flags and no Python types."""
    command = typer.main.get_command(app)
    _simplify_help(command, None)
    return command


def _simplify_help(command: Any, parent: Any) -> None:
    context = typer.Context(command, parent=parent, **({} if parent else command.context_settings))
    for place, parameter in enumerate([*command.params, command.get_help_option(context)]):
        if isinstance(parameter, typer.core.TyperArgument):
            command.params[place] = PlainArgument.__new__(PlainArgument)
            vars(command.params[place]).update(vars(parameter))
        elif parameter.is_flag:
            parameter.metavar = ""
    for below in getattr(command, "commands", {}).values():
        _simplify_help(below, context)


def main() -> NoReturn:
    """The entry point: run a command; errors of ours are printed without a traceback."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)  # As `python -m` does, so that a task beside the user can be imported.
    words = sys.argv[1:]
    with tolerant_streams(goes_on=words[:1] != [] and words[0] in LONG_COMMANDS):
        code = _run_command(respelled(words), Invocation(wants_json(words)))
    sys.exit(code)


def _run_command(words: list[str], invocation: Invocation) -> int:
    """Run a command and return its exit code. With `--format json`, a failure is printed as JSON, too."""
    try:
        code = program()(words, obj=invocation, standalone_mode=False)
    except FailedError as failed:
        return _report(failed.cause, invocation, failed.known)
    except OffbeatError as error:
        return _report(error, invocation)
    except OSError as error:
        if error.filename is None:  # Not about a file that the user could do something about.
            raise
        return _report(OutputError(f"{error.filename}: {error.strerror}."), invocation)
    except Exception as error:
        if not hasattr(error, "show"):  # Not click's: a mistake of ours, whose traceback is needed.
            if invocation.as_json:
                print_failure(error, 1, str(error), {})
            raise
        _show_usage(error)
        if invocation.as_json:
            print_failure(error, 2, cast("Any", error).format_message(), {})
        return 2
    if code == INTERRUPTED:
        return _report(KeyboardInterrupt(), invocation)
    return code if isinstance(code, int) else 0


def _report(error: BaseException, invocation: Invocation, known: Mapping[str, Any] | None = None) -> int:
    """Print what was wrong, with the settings of config files if it is about usage; returns the exit code."""
    if isinstance(error, WorkerError) and error.remote_traceback:
        typer.echo(f"In {error.name}:\n{error.remote_traceback.rstrip()}", err=True)
    interrupted = isinstance(error, KeyboardInterrupt)
    message = "interrupted; all processes were ended." if interrupted else str(error)
    if isinstance(error, UsageError) and not isinstance(error, TaskError) and invocation.configured:
        message += f" From config files: {', '.join(invocation.configured)}."
    typer.echo(typer.style("error: ", fg="red", bold=True) + printable(message), err=True)
    code = _exit_code(error) if isinstance(error, OffbeatError) else INTERRUPTED if interrupted else 1
    if invocation.as_json:
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
    """Print click's words on wrong options, with a hint where an option of the script was probably meant."""
    cast("Any", error).show()
    # Click's error for an unknown option; typer may bring its own copy of click.
    if hasattr(error, "possibilities") and any(word.partition(":")[0].endswith(".py") for word in sys.argv):
        typer.echo(
            "A script's own arguments go after `--`: offbeat run train.py --workers 2 -- --its-option 1", err=True
        )
