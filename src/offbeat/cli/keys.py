"""`offbeat keys`: who may speak to servers from other machines."""

from __future__ import annotations

from pathlib import Path

from offbeat.runtime.messages.keys import Keys


def new_keys(path: Path) -> None:
    """Make a pair of keys, and say what to do with it."""
    keys = Keys.generate()
    keys.save(path)
    print(f"{path} has a new pair of keys. It is secret: copy it only to the machines of your own runs.")
    print(f"Its public key, which may be shown: {keys.public}")


def show_keys(path: Path) -> None:
    """Print the public key, and the public keys that are let in."""
    keys = Keys.load(path)
    print(f"public   {keys.public}")
    for public in keys.allowed:
        print(f"allowed  {public}")


def allow_key(path: Path, public: str) -> None:
    """Let the owner of another key in."""
    Keys.load(path).allow(public).save(path, overwrite=True)
    print(f"{path} now lets in {public}")
