"""Fields of settings types that are options on a command line and in a config file.

A settings type is a frozen dataclass. A field made by `option` or `argument` is one of every command that is made from
the type (`cli.from_settings`): its name, type, default and help are written once, where the field is.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Option:
    """How a field appears on the command line: as `--` and its name, with `-` for `_`, or by position."""

    help: str
    """What it does, in a sentence or two; examples in backticks are shown in bold."""
    short: str | None = None
    """Single-character name, such as `-w`."""
    metavar: str | None = None
    """Placeholder for its value in the help; None: by its type."""
    name: str | None = None
    """Name on the command line, where it differs from the field's."""
    panel: str | None = None
    """Group of options that it belongs to in the help."""
    command_line_only: bool = False
    """Whether a config file may not set it."""
    positional: bool = False
    """Whether it is given by position, without a name."""


def option(default: Any, help: str, short: str | None = None, **more: Any) -> Any:  # noqa: A002 (as in `Option`)
    """A field that is an option; `more` are fields of `Option`."""
    return field(default=default, metadata={"option": Option(help, short, **more)})


def argument(help: str, metavar: str, default: Any = MISSING) -> Any:  # noqa: A002
    """A field that is given by position; required unless it has a default."""
    return field(default=default, metadata={"option": Option(help, metavar=metavar, positional=True)})
