"""`offbeat keys`: who may speak to servers from other machines. What is needed is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

keys = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Create and show the keys that connections from other machines need.",
    epilog="Example: offbeat keys new run.keys, then copy run.keys to all machines of the run",
)
KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="A file of keys; only its owner can read it.")]


@keys.command(no_args_is_help=True, epilog="Example: offbeat keys new run.keys")
def new(file: KeyFile) -> None:
    """Create a key pair. Every process that has this file may connect."""
    from offbeat.runtime.messages.keys import Keys

    made = Keys.generate()
    made.save(file)
    print(f"{file} has a new pair of keys. It is secret: copy it only to the machines of your own runs.")
    print(f"Its public key, which may be shown: {made.public}")


@keys.command(no_args_is_help=True, epilog="Example: offbeat keys show run.keys")
def show(file: KeyFile) -> None:
    """Print the public key and the allowed keys; never the secret key."""
    from offbeat.runtime.messages.keys import Keys

    known = Keys.load(file)
    print(f"public   {known.public}")
    for public in known.allowed:
        print(f"allowed  {public}")


@keys.command(no_args_is_help=True, epilog="Example: offbeat keys allow server.keys PUBLIC")
def allow(
    file: KeyFile, public: Annotated[str, typer.Argument(help="The public key of somebody who has another file.")]
) -> None:
    """Allow the holder of another key file to connect, by its public key."""
    from offbeat.runtime.messages.keys import Keys

    Keys.load(file).allow(public).save(file, overwrite=True)
    print(f"{file} now lets in {public}")
