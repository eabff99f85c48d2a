"""What the tests of all engines share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from offbeat.run.drive import Watcher


class At(Watcher):
    """Does something once, at the first report of progress."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.done = act, False

    def message(self, role: object, message: object) -> None:
        """Do it."""
        del role
        if not self.done and isinstance(message, dict) and message.get("kind") == "progress":
            self.done = True
            self.act()


def agents() -> list[int]:
    """Processes of agents on this machine, and of their fork servers and roles."""
    marks = (b"offbeat.runtime.agents.agent",)
    listed = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if any(mark in entry.read_bytes() for mark in marks):
                listed.append(int(entry.parent.name))
        except OSError:
            continue
    return listed
