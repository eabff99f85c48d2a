"""`offbeat.compare`: from settings to a comparison, run by run."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from offbeat import limits
from offbeat.errors import CheckpointError, OffbeatError, RunError, StrategyError, UsageError
from offbeat.league._conductor import Conductor, LeaguePlan
from offbeat.league._contestants import field_of, resolved
from offbeat.league._facts import facts_of
from offbeat.league._league import HOSTS_FILE, LATEST, League
from offbeat.league._records import Entry, Planned, of_result
from offbeat.league._settings import GRID, SEEDS, LeagueSettings
from offbeat.run.drive import WARM, Watcher, drive
from offbeat.run.job import Job, Script, agreed_workers, plain_target, short_name, target_of
from offbeat.runtime.engines import hosts_on
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import RunFolder, new_folder, write_whole
from offbeat.runtime.run.settings import Target
from offbeat.strategies import Strategy
from offbeat.task import AnyTask, IterativeTask

_NO_TARGET = (
    "there is no target, so no strategy can be the first to reach it. Give one: --target 0.97, or --target "
    "accuracy=0.97 for a script that reports an accuracy."
)


class Spectator(Protocol):
    """Is notified of the progress of a comparison: the display."""

    def begin(self, league: League, left: int, seconds: float) -> None:
        """The number of remaining runs, and the seconds that they will take (0: unknown)."""

    def starting(self, planned: Planned) -> Watcher | None:
        """A run starts; the result is notified of its progress."""

    def ended(self, entry: Entry, league: League, left: int, seconds: float) -> None:
        """A run has ended."""


def compare(
    what: str | Path | AnyTask | None = None,
    strategies: Sequence[str | Strategy] = (),
    *,
    arguments: Sequence[str] = (),
    workers: int | None = None,
    seeds: int | None = None,
    seed: int = 0,
    target: str | float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    tune: Sequence[float] | None = GRID,
    single: bool = True,
    disturb: str | Sequence[str] = (),
    hosts: Hosts | str | Path | None = None,
    budget: float | None = None,
    threads: int | None = None,
    parts: str = "iid",
    data_servers: int = 0,
    device: str = "cpu",
    timeout: float = 600.0,
    out: str | Path = "runs",
    resume: str | Path | None = None,
    launcher: Launcher | None = None,
    spectator: Spectator | None = None,
) -> League:
    """Find out which strategy is the first to reach a target, on this machine and this script or task.

    Every strategy runs with the same seeds, and so with the same initial model and order of data; runs take turns.
    `ddp` always takes part, twice, to measure the noise; so does `single`, one worker alone, unless omitted. `tune` are
    factors of the learning rate that each strategy may choose from on a separate seed (None: the script's own rate).
    `budget` is in seconds: if it does not suffice, all strategies have fewer seeds. `resume` continues the comparison
    in that folder; finished runs are not repeated.
    """
    if budget is not None:
        limits.seconds("--budget", budget)
    goal: dict[str, Any] = {"epochs": epochs, "steps": steps, "parts": parts, "device": device, "timeout": timeout}
    goal["data_servers"] = data_servers
    goal["disturb"] = [disturb] if isinstance(disturb, str) else list(disturb)
    asked = None
    if what is not None:
        machines = hosts_on(hosts, workers)
        asked = LeagueSettings(
            what=plain_target(target_of(what, arguments)),
            strategies=tuple(map(str, strategies)),
            workers=agreed_workers(machines, workers, max(2, len(os.sched_getaffinity(0)))),
            seeds=SEEDS if seeds is None else seeds,
            seed=seed,
            tune=(1.0,) if tune is None else tuple(map(float, tune)),
            single=single,
            threads=threads,
            hosts=None if machines is None else machines.plain(),
            target=None if target is None else str(target),
            goal=goal,
        )
        asked.job(Path(out))  # Refuses numbers that make no sense, before any process is started.
    elif resume is None:
        raise UsageError("nothing to compare strategies on: give a script, a task, or --resume FOLDER.")
    with nullcontext(launcher) if launcher else Launcher(WARM) as starter:
        starter.start()  # Imports torch there while everything is checked here.
        if resume is not None:
            league = _resume(asked, resume, seeds)
        else:
            assert asked is not None  # noqa: S101 (checked above)
            league = _begin(asked, Path(out))
        return _play(league, starter, spectator, budget)


def _begin(asked: LeagueSettings, out: Path) -> League:
    job = asked.job(out)
    contestants, refused = field_of(job, asked.strategies, asked.single)
    # A task must have a target; a script's is known only when it runs.
    if resolved(job, contestants[0]).goal.target is None and not isinstance(job.what, Script):
        raise UsageError(_NO_TARGET)
    facts = facts_of(job)
    folder = new_folder(out, f"league-{short_name(job.what)}", LATEST)
    if job.hosts is not None:
        write_whole(folder / HOSTS_FILE, job.hosts.text())
    league = League(folder, asked.plain(), facts, contestants, refused, ())
    league.write()
    return league


def _resume(asked: LeagueSettings | None, path: str | Path, seeds: int | None) -> League:
    league = League.read(path)
    before = LeagueSettings.from_plain(league.asked)
    if asked is not None:
        asked.check_same(before)
    now = facts_of(before.job(league.folder))
    for name, what in (("source", "the script or the task's file"), ("data", "the data")):
        then = league.facts[name]
        if now[name] != then and not (name == "data" and now[name]["hash"] is None):
            raise CheckpointError(
                f"{what} has changed since {league.folder.name} was begun ({then} then, {now[name]} now): its runs and "
                f"new ones would not be comparable. Start a new comparison."
            )
    changes = [
        f"{name} was {league.facts[name]} when the comparison was begun, and {now[name]} when it went on."
        for name in ("commit", "environment")
        if _without_start(now[name]) != _without_start(league.facts[name])
    ]
    settings = dict(league.asked) | ({} if seeds is None else {"seeds": seeds})
    LeagueSettings.from_plain(settings)
    return dataclasses.replace(league, asked=settings, said=tuple(dict.fromkeys([*league.said, *changes])))


def _without_start(fact: Any) -> Any:
    if not isinstance(fact, Mapping):
        return fact
    return {name: value for name, value in dict[str, Any](fact).items() if name != "started"}


def _play(league: League, starter: Launcher, spectator: Spectator | None, budget: float | None) -> League:
    asked = LeagueSettings.from_plain(league.asked)
    job = asked.job(league.folder / "runs")
    # A task that is not gradient descent has no learning rate.
    tunable = isinstance(job.what, Script) or not issubclass(job.what.find(), IterativeTask)
    plan = LeaguePlan(league.contestants, asked.seed, asked.seeds, asked.tune if tunable else (1.0,))

    def run(planned: Planned) -> Entry:
        return _one_run(planned, job, conductor, starter, spectator)

    def state() -> League:
        current = dataclasses.replace(
            league,
            entries=tuple(conductor.entries),
            given_up=tuple(conductor.given_up),
            undone=tuple(conductor.undone),
            facts=_with_first_batch(league.facts, conductor.entries),
        )
        current.write()
        return current

    def changed() -> None:
        now = state()
        if spectator is not None:
            left = conductor.left()
            spectator.ended(conductor.entries[-1], now, len(left), conductor.estimate(left))

    conductor = Conductor(plan, league.entries, run, budget=budget, changed=changed)
    if spectator is not None:
        left = conductor.left()
        spectator.begin(league, len(left), conductor.estimate(left))
    conductor.go()
    return state()


def _one_run(planned: Planned, job: Job, conductor: Conductor, starter: Launcher, spectator: Spectator | None) -> Entry:
    contestant = next(one for one in conductor.plan.contestants if one.name == planned.name)
    watcher = None if spectator is None else spectator.starting(planned)
    entry = Entry(*planned.key)
    start = time.monotonic()
    try:
        result = drive(resolved(job, contestant, planned.seed, planned.factor), launcher=starter, watcher=watcher)
    except OffbeatError as error:
        if isinstance(error, UsageError) and not isinstance(error, StrategyError) and not conductor.entries:
            raise
        failed = dataclasses.replace(entry, wall_seconds=time.monotonic() - start, reason=str(error))
        _refuse_hopeless(conductor, failed)
        return failed
    if not result.seconds_by_kind:
        raise UsageError(f"{job.what} never called offbeat.init(), so nothing is known of its training.")
    if result.target is None:
        raise UsageError(_NO_TARGET)
    # These runs are never resumed, and checkpoints of all of them could fill a disk.
    shutil.rmtree(RunFolder(result.run).checkpoints, ignore_errors=True)
    return dataclasses.replace(
        of_result(entry, result, Target.parse(result.target)), wall_seconds=time.monotonic() - start
    )


def _refuse_hopeless(conductor: Conductor, failed: Entry) -> None:
    """When all contestants have failed and no run has succeeded, the fault is not a strategy's."""
    entries = [*conductor.entries, failed]
    plan = conductor.plan
    names = {one.name for one in plan.contestants if not entries[0].tuning or one.name in plan.tuned}
    if names == {entry.name for entry in entries} and all(entry.reason is not None for entry in entries):
        raise RunError(f"no strategy could run it. The first error: {entries[0].reason}")


def _with_first_batch(facts: Mapping[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """A script's data is identified by the first batch of its first run."""
    if facts["data"]["hash"] is not None:
        return dict(facts)
    batch = next((entry.first_batch for entry in entries if entry.first_batch), None)
    return dict(facts) | {"data": dict(facts["data"]) | {"hash": batch}}
