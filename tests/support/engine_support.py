"""What the tests of all engines share."""

from __future__ import annotations

import os
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


MARK = f"OFFBEAT_TESTED_BY={os.getpid()}"
"""What the environment of every process has that this test process has started, through whatever engine."""
os.environ.update([MARK.split("=")])


def agents() -> list[int]:
    """Processes of agents that this test process has started."""
    listed: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, variables = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if b"offbeat.runtime.agents.agent" in command and MARK.encode() in variables.split(b"\0"):
            listed.append(int(entry.name))
    return listed
