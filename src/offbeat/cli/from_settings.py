"""Commands whose options are the fields of settings types, so that no option is written twice."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from offbeat.settings import Option, option

PLACEHOLDERS: Mapping[type, str] = {bool: "", int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class ConfigFile:
    """The option of every command whose other options config files can set."""

    config: Path | None = option(
        None,
        "Config file to read instead of offbeat.toml; see docs/cli.md. `--no-FLAG` switches off a flag set there.",
        metavar="FILE",
        panel="Config file",
        command_line_only=True,
    )


@dataclass(frozen=True)
class CommandOption:
    """An option or argument of a command: one field of its settings type."""

    field: str
    kind: type
    """Type of its value, or of each value if it is repeated."""
    default: Any
    """`MISSING` if it is required."""
    declared: Option
    repeated: bool

    @property
    def name(self) -> str:
        """Name on the command line and in config files, without dashes in front."""
        return (self.declared.name or self.field).replace("_", "-")

    @property
    def choices(self) -> list[str]:
        """Values of an option that takes one of several names."""
        return [member.value for member in self.kind] if issubclass(self.kind, StrEnum) else []

    def parameters(self) -> list[inspect.Parameter]:
        """Its parameter, and for a flag the hidden one that switches it off."""
        default = inspect.Parameter.empty if self.default is dataclasses.MISSING else self.default
        kind: Any = self.kind
        if self.repeated:
            default, kind = None, list[kind] | None
        elif default is None:
            kind = kind | None
        # What is quoted by backticks is bold.
        words = re.sub(r"`([^`]+)`", r"[bold]\1[/bold]", self.declared.help)
        if self.declared.positional:
            return [_parameter(self.field, kind, default, typer.Argument(help=words, metavar=self.declared.metavar))]
        metavar = self.declared.metavar or PLACEHOLDERS.get(self.kind, "|".join(self.choices))
        names = [f"--{self.name}", *([self.declared.short] if self.declared.short else [])]
        if self.default is True:  # The name that switches it off is the useful one.
            names[0] += f"/--no-{self.name}"
        shown = typer.Option(*names, help=words, metavar=metavar, rich_help_panel=self.declared.panel)
        off = typer.Option(f"--no-{self.name}", hidden=True)
        negation = [_parameter(f"no_{self.field}", bool, False, off)] if self.default is False else []
        return [_parameter(self.field, kind, default, shown), *negation]


def _parameter(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def options_of(settings: type) -> list[CommandOption]:
    """The fields of a settings type that are options or arguments."""
    hints = get_type_hints(settings)
    options: list[CommandOption] = []
    for entry in dataclasses.fields(settings):
        if "option" in entry.metadata:
            hint = hints[entry.name]
            kind = next(kind for kind in (*get_args(hint), hint) if kind is not NoneType)
            repeated = get_origin(hint) is tuple
            options.append(CommandOption(entry.name, kind, entry.default, entry.metadata["option"], repeated))
    return options


@dataclass
class Invocation:
    """What is known of a command under way, for reporting its failure."""

    as_json: bool
    """Whether a failure is printed as JSON."""
    configured: list[str] = field(default_factory=list[str])
    """The settings from config files, for an error to name."""


Configuration = Callable[[Path | None, str], Mapping[str, tuple[Any, str]]]
"""From the file of `--config` and a command's name to the fields set by config files: each value, and its origin."""


@dataclass(frozen=True)
class Command:
    """A command: its settings types, and the function that gets them, imported when it is called."""

    name: str
    """With its group, if it has one: `bench server`."""
    call: str
    """`module:function` below `cli.commands`."""
    examples: tuple[str, ...]
    settings: type
    """Type that the function gets an instance of; its docstring is the help."""
    more: type | None = None
    """Type whose fields are options, too; the function gets their values as a dictionary."""
    only: tuple[str, ...] | None = None
    """The fields of `more` that the command has; None: all."""
    leading: tuple[str, ...] = ()
    """The options that come first in the help."""
    first_page: bool = False
    """Whether it is listed among the main commands."""
    own_section: bool = False
    """Whether top-level keys of config files leave it alone: it refuses options that do not apply to its subject."""

    @property
    def epilog(self) -> str:
        """The examples, as the last lines of the help."""
        title = "Example" if len(self.examples) == 1 else "Examples"
        return f"{title}: " + " [dim]|[/dim] ".join(f"offbeat {example}" for example in self.examples)

    def entries(self) -> list[CommandOption]:
        """Options and arguments in the order of the help."""
        more = [] if self.more is None else options_of(self.more)
        entries = options_of(self.settings) + [entry for entry in more if self.only is None or entry.field in self.only]
        order = (*self.leading, None, "output")
        return sorted(entries, key=lambda entry: order.index(entry.field if entry.field in order else None))

    def configurable(self) -> dict[str, CommandOption]:
        """The options that config files may set, by name."""
        entries = [entry for entry in self.entries() if not entry.declared.positional]
        return {entry.name: entry for entry in entries if not entry.declared.command_line_only}

    def function(self, configuration: Configuration) -> Callable[..., None]:
        """The function that typer makes a command of."""
        entries = self.entries()

        def command(context: typer.Context, **values: Any) -> None:
            for entry in entries:
                if entry.repeated:
                    values[entry.field] = tuple(values[entry.field] or ())
                if values.pop(f"no_{entry.field}", False):
                    values[entry.field] = False
            if self.configurable():
                _configure(context, values, configuration(values["config"], self.name))
            own = {entry.name: values.pop(entry.name) for entry in dataclasses.fields(self.settings)}
            values.pop("config", None)
            module, _, name = self.call.partition(":")
            call = getattr(importlib.import_module(f"offbeat.cli.commands.{module}"), name)
            call(self.settings(**own), *([values] if self.more is not None else []))

        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        parameters += [parameter for entry in entries for parameter in entry.parameters()]
        if self.configurable() and not any(entry.field == "config" for entry in entries):
            parameters += options_of(ConfigFile)[0].parameters()
        # Each paragraph on one line: typer wraps it to the terminal.
        help_text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(self.settings.__doc__ or ""))
        command.__name__, command.__doc__ = self.name.split()[-1], help_text
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        vars(command)["__signature__"] = inspect.Signature(parameters)
        return command


def _configure(context: typer.Context, values: dict[str, Any], configured: Mapping[str, tuple[Any, str]]) -> None:
    """Put the values of config files where the command line gave none."""
    invocation = context.ensure_object(Invocation) if context.obj else Invocation(False)
    for name, (value, origin) in configured.items():
        sources = [context.get_parameter_source(f"{prefix}{name}") for prefix in ("", "no_")]
        given = any(source is not None and source.name == "COMMANDLINE" for source in sources)
        # A resumed run keeps the settings that it was started with.
        if not given and (values.get("resume") is None or name == "output"):
            values[name] = value
            invocation.configured.append(origin)
            if name in ("output", "form"):
                invocation.as_json = value == "json"
