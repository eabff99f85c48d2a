"""`offbeat keys`: key files that let processes on other machines connect to servers."""

from __future__ import annotations

from offbeat.cli.options import AllowedKey, NewKeys, ShownKeys
from offbeat.runtime.messages.keys import Keys


def new(options: NewKeys) -> None:
    """Create a key pair."""
    keys = Keys.generate()
    keys.save(options.file)
    print(f"{options.file} has a new pair of keys. It is secret: copy it only to the machines of your own runs.")
    print(f"Its public key, which may be shown: {keys.public}")


def show(options: ShownKeys) -> None:
    """Print the public key and the allowed keys."""
    keys = Keys.load(options.file)
    print(f"public   {keys.public}")
    for public in keys.allowed:
        print(f"allowed  {public}")


def allow(options: AllowedKey) -> None:
    """Add another key file's public key to the allowed ones."""
    Keys.load(options.file).allow(options.public).save(options.file, overwrite=True)
    print(f"{options.file} now lets in {options.public}")
