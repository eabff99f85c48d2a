"""Config files: `offbeat.toml`, `[tool.offbeat]` in pyproject.toml, or a file named with `--config`.

They set options, never what is run: targets, their arguments and `--resume` are given on the command line only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, cast

import msgspec

from offbeat.cli.from_settings import Command, CommandOption
from offbeat.errors import UsageError

LARGEST: Final = 2**20
"""Bytes of a config file."""
_TYPES: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    Path: "a path in quotes",
}


class Layer(NamedTuple):
    """One config file."""

    source: str
    """`offbeat.toml`, `pyproject.toml` or `--config`."""
    file: Path
    table: dict[str, Any]

    def place(self, section: str) -> str:
        """The file and a section of it, as messages name them."""
        names = [*(["tool", "offbeat"] if self.source == "pyproject.toml" else []), *section.split()]
        return f"{self.file} [{'.'.join(names)}]" if names else str(self.file)


class Configured(NamedTuple):
    """A value from a config file."""

    value: Any
    layer: Layer
    section: str
    """The command or group that it is set for; empty at the top level."""


def layers(explicit: Path | None) -> list[Layer]:
    """The config files that apply in the current folder; later ones win."""
    files: list[Layer] = []
    pyproject = Path("pyproject.toml")
    if pyproject.is_file():
        tool = _read(pyproject).get("tool", {})
        table = cast("Any", tool.get("offbeat", {}) if isinstance(tool, dict) else {})
        if not isinstance(table, dict):
            raise UsageError(f"{pyproject}: tool.offbeat is {table!r}. Make it a table: [tool.offbeat].")
        files.append(Layer(pyproject.name, pyproject, cast("dict[str, Any]", table)))
    if explicit is not None:
        if not explicit.is_file():
            raise UsageError(f"--config {explicit}: there is no such file. Check the path.")
        files.append(Layer("--config", explicit, _read(explicit)))
    elif (usual := Path("offbeat.toml")).is_file():
        files.append(Layer(usual.name, usual, _read(usual)))
    return files


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            raw = stream.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise UsageError(f"{file} has more than {LARGEST:,} bytes, which is not a config file.")
        return tomllib.loads(raw.decode())
    except (OSError, ValueError, RecursionError) as error:  # Wrong TOML and wrong UTF-8 are ValueErrors.
        raise UsageError(f"{file} cannot be read as TOML: {error}. Correct it, or move it away.") from error


def resolved(files: Sequence[Layer], commands: Sequence[Command]) -> dict[str, dict[str, Configured]]:
    """What config files set, by command and field; anything in them that is not an option is refused."""
    values: dict[str, dict[str, Configured]] = {command.name: {} for command in commands}
    for layer in files:
        for command, field, value in _entries(layer, layer.table, "", commands):
            values[command][field] = value
    return values


def _entries(
    layer: Layer, table: dict[str, Any], section: str, commands: Sequence[Command]
) -> Iterator[tuple[str, str, Configured]]:
    """The options that a table sets in the commands below it; those of its inner tables come later, and so win."""
    known = [(command, command.configurable()) for command in commands]
    where = f"{layer.place(section)}:"
    for key, value in table.items():
        if not isinstance(value, dict):
            name = key.replace("_", "-")
            reached = [(command, options) for command, options in known if section or not command.own_section]
            takers = [(command, options[name]) for command, options in reached if name in options]
            if not takers:
                _refuse_key(where, name, section, commands)
            numbers = any(option.kind is int for _, option in takers)
            for command, option in takers:
                # `scale --workers` takes text, 1,2,4; a number is meant for it, too.
                meant = str(value) if numbers and option.kind is str and type(value) is int else value
                try:
                    yield command.name, option.field, Configured(_converted(option, meant), layer, section)
                except msgspec.ValidationError:
                    raise UsageError(f"{where} {key} = {toml(value)}, but {_expected(command, option)}") from None
    depth = len(section.split())
    names = [command.name.split() for command, options in known if options]
    inner = {words[depth] for words in names if len(words) > depth}
    for key, value in table.items():
        if isinstance(value, dict):
            path = f"{section} {key}".strip()
            below = [command for command in commands if f"{command.name} ".startswith(f"{path} ")]
            if key not in inner:
                raise UsageError(f"{where} {key!r} is not a command that has options.{_nearest(key, inner, section)}")
            yield from _entries(layer, cast("dict[str, Any]", value), path, below)


def _refuse_key(where: str, name: str, section: str, commands: Sequence[Command]) -> NoReturn:
    entries = [entry for command in commands for entry in command.entries()]
    if any(name == entry.name for entry in entries):
        raise UsageError(f"{where} {name} cannot be set in a config file, only on the command line.")
    valid = {option for command in commands for option in command.configurable()}
    raise UsageError(f"{where} {name!r} is not an option.{_nearest(name, valid, section)}")


def _nearest(name: str, valid: Collection[str], section: str) -> str:
    near = get_close_matches(name, valid, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"{hint} `offbeat {section or 'COMMAND'} --help` lists what can be set."


def _converted(option: CommandOption, value: Any) -> Any:
    """A value of TOML as the command line would give it."""
    values = cast("list[Any]", value) if option.repeated and isinstance(value, list) else [value]
    plain: Any = str if option.kind is Path else option.kind
    converted = tuple(option.kind(each) for each in msgspec.convert(values, list[plain]))
    return converted if option.repeated else converted[0]


def _expected(command: Command, option: CommandOption) -> str:
    kind = f"one of {', '.join(option.choices)}" if option.choices else _TYPES[option.kind]
    return f"--{option.name} of `offbeat {command.name}` takes {kind}{', or a list of such' * option.repeated}."


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, cast('Sequence[Any]', value)))}]"
    if isinstance(value, str | Path):
        text = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
