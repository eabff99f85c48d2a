"""Commands to try after a run, ready to paste into the same shell."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.run.job import Job, Script, resolve
from offbeat.runtime.run.result import Result
from offbeat.runtime.run.settings import Goal
from offbeat.strategies import combined, parse
from offbeat.task import IterativeTask, TaskReference

_REPEATED = ("target", "epochs", "steps", "seed", "device", "backend", "parts", "timeout", "rate_factor")
"""Options that another run must share with this one to be comparable."""


def next_steps(result: Result, job: Job, target: str | None, hosts: Path | None) -> Iterator[str]:
    """Commands: other workers or another strategy, the list of strategies, and a longer run if the target was missed.

    `target` and `hosts` are as given on the command line.
    """
    known = resolve(job)
    job = job if job.resume is None else known
    if result.workers == 1:
        yield _again(job, target, ["--workers", "2"])
    else:
        where = ["--workers", str(result.workers)] if hosts is None else ["--hosts", str(hosts)]
        other = _another_strategy(job, result.strategy)
        if other is not None:
            yield _again(job, target, [*where, "--strategy", other])
    yield f"{this_command()} strategies"
    if result.reached_target is False:
        yield from longer_steps(result, known)


def this_command() -> str:
    """How to call this program again: by its name, if that is on the path."""
    if shutil.which("offbeat"):
        return "offbeat"
    return shlex.quote(sys.argv[0]) if Path(sys.argv[0]).name == "offbeat" else "python -m offbeat"


def longer_steps(result: Result, job: Job) -> Iterator[str]:
    """Commands that resume a run with twice the epochs or steps; none if the command line did not limit them."""
    resume = f"{this_command()} run --resume {shlex.quote(str(result.run))}"
    if job.goal.epochs is not None and result.epochs:
        yield f"{resume} --epochs {2 * result.epochs}"
    elif job.goal.steps is not None and result.steps:
        yield f"{resume} --steps {2 * result.steps}"


def _again(job: Job, target: str | None, options: list[str]) -> str:
    words = [target or str(job.what), *options]
    for name in _REPEATED:
        value = getattr(job.goal, name)
        if value != getattr(Goal(), name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--threads", str(job.threads)] if job.threads is not None and job.resume is None else []
    arguments = list(_arguments(job.what))
    return f"{this_command()} run {shlex.join([*words, *(['--', *arguments] if arguments else [])])}"


def _arguments(what: Script | TaskReference) -> Iterator[str]:
    if isinstance(what, Script):
        yield from what.arguments
        return
    values: dict[str, Any] = what.arguments
    for name, value in values.items():
        yield f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def _another_strategy(job: Job, strategy: str) -> str | None:
    """The first of some well-known strategies that differs from this one and can run the same job."""
    used = combined(parse(strategy)).exchange.name
    iterative = isinstance(job.what, TaskReference) and issubclass(job.what.find(), IterativeTask)
    for name in ("server", "allreduce") if iterative else ("ddp", "allreduce"):
        goal = dataclasses.replace(job.goal, strategy=name, disturb=(), replace=0)
        try:
            resolve(dataclasses.replace(job, goal=goal, resume=None))
        except OffbeatError:
            continue
        if name != used:
            return name
    return None
