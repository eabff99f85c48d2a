"""What the tests of all engines share."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

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


def need(*packages: str, commands: tuple[str, ...]) -> None:
    """Skip where these commands are missing; where everything must be tested, install their Debian packages."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in commands if shutil.which(name, path=path) is None]
    if not missing:
        return
    words = f"there is no {', '.join(missing)}: install {' '.join(packages)}"
    if not os.environ.get("CI"):
        pytest.skip(words)
    with (Path(tempfile.gettempdir()) / "offbeat-tests-install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            done = subprocess.run(
                ["apt-get", "-qq", *command], env=environment, capture_output=True, text=True, timeout=300, check=False
            )
    if any(shutil.which(name, path=path) is None for name in commands):
        pytest.fail(f"{words}; apt-get said: {done.stderr}")
