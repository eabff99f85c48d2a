"""`offbeat strategies`: the ways to distribute a run."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offbeat.cli.options import StrategiesOptions
from offbeat.strategies import aliases, describe, overview


def show(options: StrategiesOptions) -> None:
    """Print all strategies, or one with its arguments."""
    if options.as_json:
        entries = overview() if options.name is None else [describe(options.name)]
        plain = [dataclasses.asdict(entry) for entry in entries]
        print(json.dumps(plain if options.name is None else plain[0], default=str))
        return
    console = Console(highlight=False)
    if options.name is None:
        _list(console)
    else:
        _describe(console, options.name)


def _list(console: Console) -> None:
    table = Table("name", "axis", "what it does", "promises", box=None, padding=(0, 2), header_style="bold")
    for entry in overview():
        table.add_row(f"[bold]{entry.name}[/bold]", str(entry.axis), escape(entry.summary), _promises(entry.traits))
    console.print(table)
    console.print()
    known = ", ".join(f"{alias} = {text}" for alias, text in sorted(aliases().items()))
    console.print(f"Also known: {known}.", style="dim")
    console.print(
        "Add them with +: [bold]allreduce + accumulate(4)[/bold]. One in full: offbeat strategies allreduce",
        style="dim",
    )


def _describe(console: Console, name: str) -> None:
    entry = describe(name)
    console.print(f"[bold]{entry.name}[/bold] ({entry.axis}): {entry.summary}\n")
    if entry.docs:
        console.print(entry.docs + "\n", markup=False)
    console.print(f"  {entry.signature}\n", markup=False, style="bold")
    for field in entry.fields:
        default = "" if field.default is None else f" = {field.default}"
        console.print(f"  [bold]{field.name}[/bold]: " + escape(f"{field.type}{default}    {field.doc}"))
    console.print(f"\npromises: {_promises(entry.traits)}")
    if entry.aliases:
        console.print(f"also known as: {', '.join(entry.aliases)}")
    if entry.examples:
        console.print("examples: " + "   ".join(entry.examples))


def _promises(traits: object) -> str:
    return ", ".join(f.name for f in dataclasses.fields(traits) if getattr(traits, f.name)) or "-"  # pyright: ignore[reportArgumentType]
