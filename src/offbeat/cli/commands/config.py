"""`offbeat config`: the resolved settings of commands, and where each comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offbeat.cli.catalog import COMMANDS
from offbeat.cli.config import layers, resolved, toml
from offbeat.cli.options import ConfigOptions
from offbeat.cli.output import print_json, print_plain
from offbeat.errors import UsageError, did_you_mean


def show(options: ConfigOptions) -> None:
    """Print the settings of one command, or of all, as TOML or JSON."""
    names = [command.name for command in COMMANDS if command.configurable()]
    requested = " ".join(options.command).replace(".", " ")
    chosen = [name for name in names if not requested or name == requested or name.startswith(f"{requested} ")]
    if not chosen:
        raise UsageError(f"{requested!r} is not a command with options.{did_you_mean(requested, names)}")
    files = layers(options.config)
    values = resolved(files, COMMANDS)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for command in COMMANDS:
        for name, option in command.configurable().items() if command.name in chosen else ():
            entry = values[command.name].get(option.field)
            value = option.default if entry is None else entry.value
            rows.setdefault(command.name, {})[name] = {
                "value": str(value) if isinstance(value, Path) else value,
                "source": "default" if entry is None else entry.layer.source,
                "place": None if entry is None else entry.layer.place(entry.section),
            }
    if options.as_json:
        read = [{"source": layer.source, "file": str(layer.file)} for layer in files]
        print_json({"files": read, "settings": rows})
        return
    for command, settings in rows.items():
        print(f"[{command.replace(' ', '.')}]")
        for name, row in settings.items():
            unset = row["value"] is None or row["value"] == ()
            line = f"# {name} =" if unset else f"{name} = {toml(row['value'])}"
            print_plain(f"{line:<44}  # {'not set' if unset else row['place'] or 'default'}")
        print()
