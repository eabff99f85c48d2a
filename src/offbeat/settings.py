"""How fields of settings types are given on a command line.

A settings type is a frozen dataclass. A field annotated with an `Option` is an option of every command that is made
from the type (`cli.from_settings`): its name, type, default and help are written once, where the field is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """A field that is an option: `--` and its name, with `-` for `_`."""

    help: str
    """What it does, in a sentence or two; `[bold]` marks examples."""
    short: str | None = None
    """A second name of one letter, such as `-w`."""
    metavar: str | None = None
    """What its value is called in the help."""
    name: str | None = None
    """Its name on the command line, where it differs from the field's."""
    panel: str | None = None
    """The group of options that it stands among in the help."""


@dataclass(frozen=True)
class Argument:
    """A field that is given by its place, without a name."""

    help: str
    """What it is."""
    metavar: str
    """What it is called in the help."""
