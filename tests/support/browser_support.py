"""A real browser for tests: Chromium from the system, driven by playwright."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-default-apps", "--no-first-run", "--no-pings"),
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Where Chromium is. Root installs Debian's once if it is missing; anybody else skips with the reason."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed, which drives the browser: pip install -r requirements-dev.txt")
    found = _found()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        with _alone():
            found = _found() or _installed()
    if found is None:
        pytest.skip("there is no Chromium on this machine, and it cannot be installed from here")
    return found


def _found() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


def _installed() -> str | None:
    quiet = {"check": False, "capture_output": True, "timeout": 170}
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
    if subprocess.run(command, env=environment, **quiet).returncode != 0:
        subprocess.run(["apt-get", "update"], env=environment, **quiet)
        subprocess.run(command, env=environment, **quiet)
    return _found()


@contextmanager
def _alone() -> Iterator[None]:
    """One test process at a time."""
    with (Path(tempfile.gettempdir()) / "offbeat-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def until(page: Any, expression: str, seconds: float = 60.0) -> None:
    """Wait until a JavaScript expression is true; playwright's own way would need `eval`, which the page forbids."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:g} s in vain for {expression}")
        page.wait_for_timeout(30)


class Seen:
    """What went wrong on a page, and where its requests went."""

    def __init__(self, page: Any) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: said.type in ("error", "warning") and self.errors.append(said.text))
        page.on("request", lambda request: self.requests.append(request.url))

    def elsewhere(self, *allowed: str) -> list[str]:
        """Requests that went anywhere else."""
        return [url for url in self.requests if not url.startswith(allowed)]
