"""Config files: `offbeat.toml`, `[tool.offbeat]` in pyproject.toml, or a file named with `--config`.

They set options, never what is run: targets, their arguments and `--resume` are given on the command line only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from offbeat.cli.from_settings import Command, CommandOption
from offbeat.errors import UsageError, did_you_mean

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


class Configured(NamedTuple):
    """A value from a config file."""

    value: Any
    layer: Layer
    section: str
    """Its table in the file; empty at the top."""


def layers(explicit: Path | None) -> list[Layer]:
    """The config files that apply in the current folder; later ones win."""
    found: list[Layer] = []
    pyproject = Path("pyproject.toml")
    if pyproject.is_file():
        tool = _read(pyproject).get("tool", {})
        table = cast("Any", tool.get("offbeat", {}) if isinstance(tool, dict) else {})
        if not isinstance(table, dict):
            raise UsageError(f"{pyproject}: tool.offbeat is {table!r}. Make it a table: [tool.offbeat].")
        found.append(Layer(pyproject.name, pyproject, cast("dict[str, Any]", table)))
    if explicit is not None:
        if not explicit.is_file():
            raise UsageError(f"--config {explicit}: there is no such file. Check the path.")
        found.append(Layer("--config", explicit, _read(explicit)))
    elif (usual := Path("offbeat.toml")).is_file():
        found.append(Layer(usual.name, usual, _read(usual)))
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            raw = stream.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise UsageError(f"{file} has more than {LARGEST:,} bytes, which is not a config file.")
        return tomllib.loads(raw.decode())
    except (OSError, ValueError) as error:  # Wrong TOML and wrong UTF-8 are ValueErrors.
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
    """The options that a table sets in the commands it is about; what its own tables set comes later, and so wins."""
    options = [(command.name, command.configurable()) for command in commands]
    where = f"{layer.file}: [{section.replace(' ', '.')}]" if section else f"{layer.file}:"
    tables = {name.removeprefix(section).split()[0] for name, known in options if known and name != section}
    for key, value in table.items():
        if isinstance(value, dict):
            continue
        name = key.replace("_", "-")
        candidates = [(command, known[name]) for command, known in options if name in known]
        if not candidates:
            _refuse_key(where, key, tables, commands)
        accepted = [(command, option) for command, option in candidates if _fits(option, value)]
        if not accepted:
            raise UsageError(f"{where} {key} = {toml(value)} is not {_expected(candidates[0][1], value)}")
        for command, option in accepted:
            yield command, option.field, Configured(_convert(option, value), layer, section)
    for key, value in table.items():
        if isinstance(value, dict):
            if key not in tables:
                _refuse_key(where, key, tables, commands)
            inner = f"{section} {key}".strip()
            below = [one for one in commands if one.name == inner or one.name.startswith(f"{inner} ")]
            yield from _entries(layer, cast("dict[str, Any]", value), inner, below)


def _refuse_key(where: str, key: str, tables: set[str], commands: Sequence[Command]) -> None:
    entries = [entry for command in commands for entry in command.entries()]
    known = {name for command in commands for name in command.configurable()}
    name = key.replace("_", "-")
    if any(entry.name == name for entry in entries) and name not in known | tables:
        raise UsageError(f"{where} {key} cannot be set in a config file: what is run is said on the command line.")
    raise UsageError(
        f"{where} {key!r} is not an option{' or command' * bool(tables)}.{did_you_mean(name, known | tables)}"
    )


def _fits(option: CommandOption, value: Any) -> bool:
    if option.repeated and isinstance(value, list):
        return all(_fits_once(option, each) for each in cast("list[Any]", value))
    return _fits_once(option, value)


def _fits_once(option: CommandOption, value: Any) -> bool:
    if option.choices:
        return value in option.choices
    if option.kind is float:
        return type(value) in (int, float)
    return type(value) is (str if option.kind is Path else option.kind)


def _expected(option: CommandOption, value: Any) -> str:
    if option.choices:
        return f"one of its values.{did_you_mean(str(value), option.choices)}"
    return f"{_TYPES[option.kind]}{', or a list of such' * option.repeated}, which --{option.name} takes."


def _convert(option: CommandOption, value: Any) -> Any:
    """A value of TOML as the command line would give it."""
    values: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    kind = option.kind if issubclass(option.kind, StrEnum | Path | float) else None
    converted = [each if kind is None else kind(each) for each in values]
    return tuple(converted) if option.repeated else converted[0]


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, cast('Sequence[Any]', value)))}]"
    if isinstance(value, str | Path):
        text = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
    return str(value)
