"""`offbeat run`: from options to a job, and from its result to words and commands to try next."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from offbeat.cli.display import Display, this_command
from offbeat.cli.options import RunOptions
from offbeat.cli.output import FailedError, print_json
from offbeat.errors import OffbeatError, TaskError, UsageError
from offbeat.run.drive import WARM, Result, drive
from offbeat.run.job import Job, Script, agreed_workers, earlier, finished_result, resolve, target_from_plain, target_of
from offbeat.run.machines import placement
from offbeat.runtime.engines import hosts_on
from offbeat.runtime.engines.placement import LOCAL
from offbeat.runtime.engines.slurm import batch_script, inside_allocation, submit
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.report import headline, report_lines
from offbeat.runtime.run.settings import Goal
from offbeat.strategies import combined, parse
from offbeat.task import IterativeTask, TaskReference

_STYLES = {"Target reached": "bold green", "Target missed": "bold yellow", "Done": "bold"}
_REPEATED = (
    "target",
    "epochs",
    "steps",
    "seed",
    "device",
    "backend",
    "parts",
    "timeout",
    "rate_factor",
    "data_servers",
)
"""Options that another run must share with this one to be comparable."""


def run_job(options: RunOptions, goal: dict[str, Any]) -> None:
    """Run the job and print its result."""
    if options.on == "slurm" and not inside_allocation():
        _submit(options)
        return
    if options.dry_run:
        print("\n".join(placement(resolve(_job(options, Goal(**goal))))))
        return
    if options.resume is not None and _print_if_finished(_job(options, Goal(**goal)), options.as_json):
        return
    display = Display(quiet=options.as_json)
    try:
        with Launcher(WARM) as launcher:
            if options.on in (None, LOCAL):
                launcher.start()  # Imports torch there while it is imported here.
            job = _job(options, Goal(**goal))
            with display:
                result = drive(job, launcher=launcher, watcher=display)
    except (OffbeatError, KeyboardInterrupt) as error:
        display.say_how_to_resume()
        raise FailedError(error, display.result_so_far()) from error
    if not result.seconds_by_kind and (ignored := Goal(**goal).without_effect()):
        pronoun = "them" if len(ignored) > 1 else "it"
        warning = f"{', '.join(ignored)} had no effect: only a script that calls offbeat.init() heeds {pronoun}"
        print(f"warning: {warning}. See docs/own-loops.md for the four lines.", file=sys.stderr)
    if options.as_json:
        print_json(result.plain())
    else:
        _print(result, job, options)


def _submit(options: RunOptions) -> None:
    """Submit this very command as a job of Slurm's, or print the script of the job."""
    words, own = list(sys.argv[1:]), [sys.executable, "-m", "offbeat"]
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--dry-run" and not word.startswith("--sbatch=")]
    if "--sbatch" in kept:
        del kept[kept.index("--sbatch") : kept.index("--sbatch") + 2]
    script = batch_script([*own, *kept, *words[end:]], options.workers, options.sbatch)
    if options.dry_run:
        print(script, end="")
        return
    number = submit(script)
    print(f"Slurm has the run as job {number}. What it prints is in offbeat-{number}.out; `scancel {number}` ends it.")


def _print_if_finished(job: Job, as_json: bool) -> bool:
    """Whether the run to resume is finished; then its result is printed, and no process is started."""
    job = resolve(job)
    result = finished_result(job)
    if result is None:
        return False
    if as_json:
        print_json(result.plain())
    else:
        _print_finished(result, job)
    return True


def _job(options: RunOptions, goal: Goal) -> Job:
    if options.what is None:
        if options.resume is None:
            raise TaskError("nothing to run: give a script, a task, or --resume RUN.")
        what: Script | TaskReference = target_from_plain(earlier(options.resume)["what"])
    else:
        what = target_of(options.what, options.arguments)
    hosts = hosts_on(on_or_hosts(options.on, options.hosts), options.workers)
    default = 1 if hosts is not None else _default_workers(goal.strategy, options.resume)
    workers = agreed_workers(hosts, options.workers, default)
    return Job(what, goal, workers, options.threads, options.out, options.resume, options.port, hosts, options.ship)


def on_or_hosts(on: str | None, hosts: Path | None) -> str | Path | None:
    """Where to run, of two options that both may name a file."""
    if on is not None and hosts is not None:
        raise UsageError(f"--on {on} and --hosts {hosts} both say where to run. Give one of them.")
    return hosts if on is None else on


def _default_workers(strategy: str | None, resume: Path | None) -> int:
    if resume is not None:
        return earlier(resume)["workers"]
    parsed = None if strategy is None else combined(parse(strategy))
    if parsed is None or parsed.exchange.name == "single":
        return 1 if parsed is None else parsed.replica_size
    return max(1, len(os.sched_getaffinity(0)) // parsed.replica_size) * parsed.replica_size


def _print(result: Result, job: Job, options: RunOptions) -> None:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    if not result.seconds_by_kind:
        console.print(
            "The script succeeded. It never called offbeat.init(), so there is nothing to report about its training."
        )
        if job.goal.strategy is not None:
            console.print(f"--strategy {job.goal.strategy} had no effect: the script distributes itself.", markup=False)
        return
    console.print()
    _print_report(result, console)
    console.print()
    console.print("Try next:", style="dim")
    for command in _next_steps(result, job, options.what, on_or_hosts(options.on, options.hosts)):
        console.print(f"  {command}", style="dim", markup=False)


def _print_report(result: Result, console: Console) -> None:
    mark, rest = headline(result)
    console.print(Text(mark, style=_STYLES[mark]).append(rest, style="not bold default"))
    for line in report_lines(result):
        console.print(line, markup=False)


def _print_finished(result: Result, job: Job) -> None:
    """Print that nothing is left to do, the result, and how to continue anyway."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"{result.run} is finished: nothing was started. Its result:", markup=False)
    if result.seconds_by_kind:
        _print_report(result, console)
    console.print()
    if result.reached_target:
        console.print("Its target is reached. To continue, give it a better one with --target.")
    elif commands := list(_longer_steps(result, job)):
        console.print("To continue, raise its limit:", style="dim")
        for command in commands:
            console.print(f"  {command}", style="dim", markup=False)
    else:
        console.print("Its script has ended. To continue, make its loop longer, then resume it.")


def _next_steps(result: Result, job: Job, target: str | None, hosts: str | Path | None) -> Iterator[str]:
    """Commands: other workers or another strategy, the list of strategies, and a longer run if the target was missed.

    `target` and `hosts` are as given on the command line.
    """
    known = resolve(job)
    job = job if job.resume is None else known
    if result.workers == 1:
        yield _again(job, target, ["--workers", "2"])
    else:
        where = ["--workers", str(result.workers)] if hosts is None else ["--on", str(hosts)]
        other = _another_strategy(job, result.strategy)
        if other is not None:
            yield _again(job, target, [*where, "--strategy", other])
    yield f"{this_command()} strategies"
    if result.reached_target is False:
        yield from _longer_steps(result, known)


def _longer_steps(result: Result, job: Job) -> Iterator[str]:
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
