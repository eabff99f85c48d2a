"""The command line: parse, call, print."""

from offbeat.cli.app import main

__all__ = ["main"]
