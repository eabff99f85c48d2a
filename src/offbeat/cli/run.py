"""`offbeat run`: from options to a job, and from its result to words."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from offbeat.cli.display import Display, gossip_in_words, kinds_in_words
from offbeat.cli.served import amount, served_in_words
from offbeat.errors import OffbeatError, TaskError
from offbeat.fitting import WARM, Result, drive
from offbeat.jobs import Job, Script, agreed_workers, earlier, target_of
from offbeat.runtime.goal import Goal
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.strategies import combined, parse
from offbeat.task import Reference


@dataclass(frozen=True)
class Asked:
    """The options that are not the goal's."""

    what: str | None
    arguments: tuple[str, ...]
    workers: int | None
    threads: int | None
    out: Path
    resume: Path | None
    port: int
    as_json: bool
    hosts: Path | None = None


def run_job(asked: Asked, goal: dict[str, Any]) -> None:
    """Run what was asked for and print its result."""
    display = Display(quiet=asked.as_json)
    try:
        with Launcher(WARM) as launcher:
            launcher.start()  # Imports torch there while it is imported here.
            job = _job(asked, Goal(**goal))
            with display:
                result = drive(job, launcher=launcher, watcher=display)
    except (OffbeatError, KeyboardInterrupt):
        display.say_how_to_resume()
        raise
    if asked.as_json:
        print(json.dumps(result.plain()))
    else:
        _print(result, asked)


def _job(asked: Asked, goal: Goal) -> Job:
    if asked.what is None:
        if asked.resume is None:
            raise TaskError("nothing to run: give a script, a task, or --resume RUN.")
        what: Script | Reference = _what_was_run(asked.resume)
    else:
        what = target_of(asked.what, asked.arguments)
    hosts = None if asked.hosts is None else Hosts.read(asked.hosts)
    default = 1 if hosts is not None else _default_workers(goal.strategy, asked.resume)
    workers = agreed_workers(hosts, asked.workers, default)
    return Job(what, goal, workers, asked.threads, asked.out, asked.resume, asked.port, hosts)


def _what_was_run(folder: Path) -> Script | Reference:
    known = earlier(folder)["what"]
    if "script" in known:
        return Script(known["script"], tuple(known["arguments"]))
    return Reference(**known["task"])


def _default_workers(strategy: str | None, resume: Path | None) -> int:
    if resume is not None:
        return earlier(resume)["workers"]
    if strategy is None or combined(parse(strategy)).exchange.name == "single":
        return 1
    return len(os.sched_getaffinity(0))


def _print(result: Result, asked: Asked) -> None:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    if not result.seconds_by_kind:
        console.print(
            "The script ended well. It never called offbeat.init(), so there is nothing to report about its training."
        )
        return
    console.print()
    console.print(_headline(result))
    if result.test_score is not None:
        console.print(f"  on test data        {result.test_score:.4g} (scored once, at the end)")
    epochs = "" if result.epochs is None else f", {result.epochs} epochs"
    examples = f", {result.samples:,} examples" if result.samples else ""
    console.print(f"  work done           {result.steps:,} steps{epochs}{examples}")
    speed = f"{result.samples_per_second:,.0f} examples/s; " if result.samples else ""
    console.print(f"  speed               {speed}{result.core_seconds:.1f} core-seconds")
    console.print(f"  where the time went {kinds_in_words(result.seconds_by_kind)}")
    if result.workers > 1:
        console.print(f"  sent                {amount(result.bytes_sent)} between {result.workers} workers")
    for name, said in served_in_words(result) if result.servers else ():
        console.print(f"  {name:<19} {said}", markup=False)
    if result.hosts:
        console.print(f"  hosts               {_hosts_in_words(result.hosts)}", markup=False)
    if result.foretold:
        console.print(f"  foretold            {result.foretold['words']}", markup=False)
    if result.pays:
        console.print(f"  compression         {result.pays['words']}", markup=False)
    if result.gossip:
        console.print(f"  gossip              {gossip_in_words(result.gossip)}")
    if result.died:
        console.print(f"  died on the way     {', '.join(result.died)}")
    if result.joined:
        console.print(f"  joined on the way   {', '.join(result.joined)}")
    if result.disturbances.get("asked"):
        fired = f"{result.disturbances['fired']:,} fired, {result.disturbances['asked']:,} asked for"
        console.print(f"  disturbances        {fired}")
    console.print(f"  start-up            {result.startup_seconds:.1f} s, not counted above")
    console.print(f"  everything is in    {result.run}", markup=False)
    console.print()
    for line in _next_steps(result, asked):
        console.print(line, style="dim", markup=False)


def _hosts_in_words(hosts: Sequence[Mapping[str, Any]]) -> str:
    """Who was where: `a (10.77.0.2, 100Mbit): workers 0 1, server 0`."""
    said: list[str] = []
    for host in hosts:
        rate = f", {host['rate']}" if host["rate"] else ""
        numbers = {what: " ".join(map(str, host[f"{what}s"])) for what in ("worker", "server")}
        here = [f"{what}{'s' if ' ' in known else ''} {known}" for what, known in numbers.items() if known]
        said.append(f"{host['name']} ({host['address']}{rate}): {', '.join(here) or 'nobody'}")
    return "; ".join(said)


def _headline(result: Result) -> str:
    who = f"{result.workers} worker{'s' if result.workers > 1 else ''}, {result.strategy}"
    score = "no score reported" if result.score is None else f"score {result.score:.4g}"
    wanted = (result.target or "").removeprefix("score=")
    if result.reached_target:
        reached = f"[bold green]Target reached[/bold green]: {score} (wanted {wanted})"
        return f"{reached} after {result.seconds_to_target:.2f} s. {escape(who)}."
    if result.reached_target is False:
        best = "" if result.best_score is None else f", best {result.best_score:.4g}"
        missed = f"[bold yellow]Target missed[/bold yellow]: {score}{best} (wanted {wanted})"
        return f"{missed} after {result.seconds:.2f} s. {escape(who)}."
    return f"[bold]Done[/bold]: {score} after {result.seconds:.2f} s. {escape(who)}."


def _next_steps(result: Result, asked: Asked) -> list[str]:
    target = shlex.quote(asked.what) if asked.what else "TARGET"
    tail = f" -- {shlex.join(asked.arguments)}" if asked.arguments else ""
    other = "ddp" if not result.strategy.startswith("ddp") else "allreduce"
    offbeat = _this_command()
    lines = ["Try next:"]
    if result.workers == 1:
        lines.append(f"  {offbeat} run {target} --workers 2{tail}")
    else:
        lines.append(f"  {offbeat} run {target} --workers {result.workers} --strategy {other}{tail}    # another way")
    lines.append(f"  {offbeat} strategies                     # all ways there are")
    if result.reached_target is False and result.epochs:
        lines.append(f"  {offbeat} run --resume {result.run} --epochs {2 * result.epochs}    # go on where it stopped")
    return lines


def _this_command() -> str:
    """How this program can be called again: by its name, if that is on the path."""
    if shutil.which("offbeat"):
        return "offbeat"
    return sys.argv[0] if Path(sys.argv[0]).name == "offbeat" else "python -m offbeat"
