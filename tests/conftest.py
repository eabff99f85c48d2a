"""What tests share: one fork server for all, a command line that is really run, and waiting with a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from offbeat.run.drive import WARM
from offbeat.runtime.hosts import existing, made_here, why_not
from offbeat.runtime.launch import Launcher
from wide import WIDE

# A machine that is busy with something else is not a failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A shell that starts us in the background lets us ignore Ctrl-C, and the runs that we interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Several test processes share the cores, and threads that wait for each other would slow all of them.
torch.set_num_threads(1)


_STARTS_PROCESSES = {"launcher", "cli", "networks"}
_SMOKE = {"test_fit.py", "test_launch.py"}
"""Files of which `make check` runs what is not marked slow, although it starts processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help="run the variants of `tests/wide.py`, and nothing else")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that start processes as slow; deselect wide variants unless they are named or asked for."""
    for item in items:
        starts_processes = _STARTS_PROCESSES & set(getattr(item, "fixturenames", ()))
        if starts_processes and item.path.name not in _SMOKE:
            item.add_marker("slow")
    if any("::" in argument for argument in config.args):
        return
    wide = bool(config.getoption("--wide"))
    wanted, omitted = [], []
    for item in items:
        (wanted if bool(WIDE.search(item.nodeid)) is wide else omitted).append(item)
    if omitted:
        config.hook.pytest_deselected(items=omitted)
        items[:] = wanted


DEADLINE = 90.0


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """A launcher whose fork server serves all tests of a session."""
    with Launcher(WARM) as started:
        yield started


Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs `offbeat ...` as a user would, in a folder of its own; answers what it printed and its exit code."""

    def run(
        *words: str | Path, timeout: float = DEADLINE, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "offbeat", *map(str, words)]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=clean_environment() | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


def clean_environment() -> dict[str, str]:
    """The environment without what a launcher around the tests may have left in it."""
    prefixes = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_", "GROUP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)} | {"COLUMNS": "200"}


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    """Wait for a condition; fail with what was waited for when the deadline passes."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.02)


@pytest.fixture
def networks() -> Iterator[None]:
    """For tests that make hosts: skips where that cannot be, but not on a machine that is there to test it."""
    reason = why_not()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"hosts cannot be made on the machine that tests them: {reason}")
        pytest.skip(f"hosts cannot be made here: {reason}")
    before = mine()
    yield
    assert mine() <= before


def mine() -> set[str]:
    """The namespaces that this process has made and not removed."""
    return {name for name in existing() if made_here(name)}


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Any]:
    """Makes federated deployments whose processes are gone at the end."""
    from federation import Deployment

    made: list[Deployment] = []

    def make(task: str = "Owners", **arguments: Any) -> Deployment:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Deployment(folder, task, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()
