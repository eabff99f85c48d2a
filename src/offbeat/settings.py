"""How fields of settings types appear on a command line and in a config file.

A settings type is a frozen dataclass. A field annotated with an `Option` is an option of every command that is made
from the type (`cli.from_settings`): its name, type, default and help are written once, where the field is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """A field that is an option: `--` and its name, with `-` for `_`."""

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


@dataclass(frozen=True)
class Argument:
    """A field that is given by position, without a name."""

    help: str
    """What it is."""
    metavar: str
    """Its placeholder in the help."""
