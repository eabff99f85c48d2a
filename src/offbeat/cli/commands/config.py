"""`offbeat config`: the resolved settings of commands, and where each comes from."""

from __future__ import annotations

from typing import Any

from offbeat.cli.catalog import COMMANDS
from offbeat.cli.config import layers, resolved, toml
from offbeat.cli.options import ConfigOptions, OutputFormat
from offbeat.cli.output import print_json, printable
from offbeat.errors import UsageError, did_you_mean


def show(options: ConfigOptions) -> None:
    """Print the settings of one command, or of all, as TOML or JSON."""
    names = [command.name for command in COMMANDS if command.configurable()]
    wanted = " ".join(options.command).replace(".", " ")
    chosen = [name for name in names if not wanted or name == wanted or name.startswith(f"{wanted} ")]
    if not chosen:
        raise UsageError(f"{wanted!r} is not a command with options.{did_you_mean(wanted, names)}")
    files = layers(options.config)
    values = resolved(files, COMMANDS)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for command in COMMANDS:
        if command.name in chosen:
            rows[command.name] = {}
            for name, option in command.configurable().items():
                entry = values[command.name].get(option.field)
                rows[command.name][name] = {
                    "value": option.default if entry is None else entry.value,
                    "source": "default" if entry is None else entry.layer.source,
                    "file": None if entry is None else str(entry.layer.file),
                    "section": None if entry is None else entry.section,
                }
    if options.output is OutputFormat.json:
        read = [{"source": layer.source, "file": str(layer.file)} for layer in files]
        print_json({"files": read, "settings": rows})
        return
    for command, settings in rows.items():
        print(f"[{command.replace(' ', '.')}]")
        for name, row in settings.items():
            unset = row["value"] is None or row["value"] == ()
            line = f"# {name} =" if unset else f"{name} = {toml(row['value'])}"
            section = f" [{row['section'].replace(' ', '.')}]" if row["section"] else ""
            origin = "not set" if unset else (row["file"] or "default") + section
            print(printable(f"{line:<44}  # {origin}"))
        print()
