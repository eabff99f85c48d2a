"""What the tests of the launcher share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch_entries

from offbeat.runtime.launch import Launcher, Role, RoleOutcome

MakeRole = Callable[..., Role]
Messages = list[tuple[int, dict[str, Any]]]


def role_maker(folder: Path) -> MakeRole:
    """A short way to write roles whose logs are in a folder."""

    def make(rank: int, entry: str, kind: str = "worker", threads: int | None = None, **config: Any) -> Role:
        environment = config.pop("environment", {})
        log = folder / "logs" / f"{kind}-{rank}.log"
        return Role(kind, rank, f"{launch_entries.__name__}:{entry}", config, environment, log, threads)

    return make


def run(launcher: Launcher, *roles: Role, **options: Any) -> tuple[list[RoleOutcome], Messages]:
    """A run whose messages are gathered."""
    messages: Messages = []
    outcomes = launcher.run(roles, on_message=lambda role, message: messages.append((role.rank, message)), **options)
    return outcomes, messages


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Wait for a condition, or fail with its description."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        time.sleep(0.01)


class Pids:
    """Gathers the process numbers that roles send, and makes a file when all that are expected have come."""

    def __init__(self, expected: int, go: Path | None = None) -> None:
        self.all: list[int] = []
        self._expected = expected
        self._go = go

    def __call__(self, _role: Role, message: dict[str, Any]) -> None:
        self.all += message.get("pids", [])
        if self._go is not None and len(self.all) == self._expected:
            self._go.touch()

    def assert_gone(self) -> None:
        assert len(self.all) == self._expected
        assert [pid for pid in self.all if is_alive(pid)] == []
