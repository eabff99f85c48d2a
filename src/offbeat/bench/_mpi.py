"""Starts ranks by mpiexec, if there is one: MPI processes that also form a torch process group."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from offbeat.errors import RunError, WaitError

SILENCE = 180.0
"""Seconds without output after which the ranks are given up."""
GRACE = 5.0
"""Seconds for mpiexec to end its ranks before they are killed."""
LEVELS = ("single", "multiple")
"""MPI thread levels; MPICH waits differently at each."""


def mpiexec() -> Path | None:
    """The mpiexec beside this Python, whose library mpi4py then finds too, or else the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    return None if path is None else Path(path)


def why_no_mpi() -> str | None:
    """Why MPI cannot be measured here, or None if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py mpich)"
    if mpiexec() is None:
        return "there is no mpiexec (pip install mpich, or your distribution's package)"
    return None


def run_under_mpi(config: Mapping[str, Any], receive: Callable[[Mapping[str, Any]], None]) -> None:
    """Run the ranks of a configuration; none of them is left, however it ends."""
    command = [str(mpiexec()), "-n", str(config["ranks"]), sys.executable, "-m", "offbeat.bench._ranks"]
    with tempfile.TemporaryFile() as errors, _started([*command, json.dumps(config)], errors) as process:
        for line in _lines(process):
            # Libraries print too; lines that are not ours are ignored.
            with contextlib.suppress(json.JSONDecodeError):
                receive(json.loads(line))
        if code := process.wait(GRACE):
            errors.seek(0)
            output = errors.read().decode(errors="replace").strip()
            raise RunError(f"a benchmark under mpiexec ended with {code}:\n{output[-3000:]}")


@contextlib.contextmanager
def _started(command: list[str], errors: IO[bytes]) -> Generator[subprocess.Popen[bytes]]:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:  # Ask mpiexec to end its ranks; if it does not, kill it and its proxies.
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(GRACE)
        finally:
            if process.stdout is not None:
                process.stdout.close()


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """The lines that the ranks print, with a deadline for each, which a pipe alone does not have."""
    assert process.stdout is not None  # noqa: S101 (it is a pipe)
    rest = b""
    while select.select([process.stdout], [], [], SILENCE)[0]:
        new = os.read(process.stdout.fileno(), 1 << 16)
        if not new:
            return
        *lines, rest = (rest + new).split(b"\n")
        yield from lines
    raise WaitError(f"ranks under mpiexec printed nothing for {SILENCE:g} s; they were ended")
