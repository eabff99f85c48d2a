"""`offbeat.compare`: from what was asked to a league, run by run."""

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
from offbeat.league._conductor import Conductor
from offbeat.league._contestants import field_of, resolved
from offbeat.league._facts import facts_of
from offbeat.league._league import League
from offbeat.league._order import LeaguePlan, Planned
from offbeat.league._records import HOSTS_FILE, Entry, LeagueFolder, of_result
from offbeat.league._settings import GRID, SEEDS, LeagueSettings
from offbeat.run.drive import WARM, Watcher, drive
from offbeat.run.job import Job, Script, agreed_workers, plain_target, short_name, target_of
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import RunFolder, write_whole
from offbeat.strategies import Strategy
from offbeat.task import AnyTask, IterativeTask, reference_to


class Spectator(Protocol):
    """Somebody who is told how a league goes: the display."""

    def begin(self, league: League, left: int, seconds: float) -> None:
        """So many runs are to do; that takes so long, as far as is known (0: nothing is)."""
        ...

    def starting(self, planned: Planned) -> Watcher | None:
        """A run starts; what is answered is told how it goes."""
        ...

    def ended(self, entry: Entry, league: League, left: int, seconds: float) -> None:
        """A run has ended; so many are left."""
        ...


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
    device: str = "cpu",
    timeout: float = 600.0,
    out: str | Path = "runs",
    resume: str | Path | None = None,
    launcher: Launcher | None = None,
    spectator: Spectator | None = None,
) -> League:
    """Find out which strategy is the first to reach a target, here, on this script or task.

    Every strategy runs with the same seeds, and so with the same initial model and order of data; runs take turns.
    `ddp` takes part in any case, and once more as the measure of noise; `single`, one worker alone, unless it is left
    out. `tune` are factors of the learning rate that each strategy may choose from on a seed of its own (None: the
    script's own rate). `budget` is in seconds: if it does not suffice, all strategies have fewer seeds. With `resume`,
    the folder of a league, that one goes on; what has ended is not run again.
    """
    if budget is not None:
        limits.seconds("--budget", budget)
    goal: dict[str, Any] = {"epochs": epochs, "steps": steps, "parts": parts, "device": device, "timeout": timeout}
    goal["disturb"] = [disturb] if isinstance(disturb, str) else list(disturb)
    asked = None
    if what is not None:
        wanted = Hosts.read(Path(hosts)) if isinstance(hosts, str | Path) else hosts
        known = target_of(str(what), tuple(arguments)) if isinstance(what, str | Path) else reference_to(what)
        asked = LeagueSettings(
            what=plain_target(known),
            strategies=tuple(map(str, strategies)),
            workers=agreed_workers(wanted, workers, max(2, len(os.sched_getaffinity(0)))),
            seeds=SEEDS if seeds is None else seeds,
            seed=seed,
            tune=(1.0,) if tune is None else tuple(map(float, tune)),
            single=single,
            threads=threads,
            hosts=None if wanted is None else wanted.plain(),
            target=None if target is None else str(target),
            goal=goal,
        )
        asked.job(Path(out))  # Refuses numbers that make no sense, before any process is started.
    elif resume is None:
        raise UsageError("nothing to compare strategies on: give a script, a task, or --resume LEAGUE.")
    with nullcontext(launcher) if launcher else Launcher(WARM) as starter:
        starter.start()  # Imports torch there while everything is checked here.
        folder, league = _begun(asked, Path(out)) if resume is None else _gone_on(asked, Path(resume), seeds)
        return _played(league, folder, starter, spectator, budget)


def _begun(asked: LeagueSettings | None, out: Path) -> tuple[LeagueFolder, League]:
    assert asked is not None  # noqa: S101 (checked by the caller)
    job = asked.job(out)
    field = field_of(job, asked.strategies, asked.single)
    # A task must have a target; what a script's is only it can tell.
    if resolved(job, field.contestants[0]).goal.target is None and not isinstance(job.what, Script):
        raise UsageError(_NO_TARGET)
    facts = facts_of(job)
    folder = LeagueFolder.create(out, short_name(job.what))
    if job.hosts is not None:
        write_whole(folder.path / HOSTS_FILE, job.hosts.text())
    league = League(folder.path, asked.plain(), facts, field.contestants, field.refused, ())
    folder.write(league.kept())
    return folder, league


_NO_TARGET = (
    "there is no target, so nobody can be the first to reach it. Say one: --target 0.97, or --target accuracy=0.97 "
    "for a script that reports an accuracy."
)


def _gone_on(asked: LeagueSettings | None, path: Path, seeds: int | None) -> tuple[LeagueFolder, League]:
    folder = LeagueFolder.open(path)
    league = League.from_plain(folder.path, folder.read())
    before = LeagueSettings.from_plain(league.asked)
    if asked is not None:
        asked.check_same(before)
    now = facts_of(before.job(folder.path))
    for name, what in (("source", "the script or the task's file"), ("data", "the data")):
        kept = dict(league.facts)[name]
        if now[name] != kept and not (name == "data" and now[name]["hash"] is None):
            raise CheckpointError(
                f"{what} has changed since {folder.path.name} was begun ({kept} then, {now[name]} now): its runs and "
                f"new ones would not be of the same. Start a new league."
            )
    said = [
        f"{name} was {league.facts[name]} when the league was begun, and {now[name]} when it went on."
        for name in ("commit", "environment")
        if _lasting(now[name]) != _lasting(league.facts[name])
    ]
    wanted = dict(league.asked) | ({} if seeds is None else {"seeds": seeds})
    LeagueSettings.from_plain(wanted)
    said = list(dict.fromkeys([*league.said, *said]))
    return folder, dataclasses.replace(league, asked=wanted, said=tuple(said))


def _lasting(known: Any) -> Any:
    """Without the time at which it was looked at."""
    if not isinstance(known, Mapping):
        return known
    return {name: value for name, value in dict[str, Any](known).items() if name != "started"}


def _played(
    league: League, folder: LeagueFolder, starter: Launcher, spectator: Spectator | None, budget: float | None
) -> League:
    asked = LeagueSettings.from_plain(league.asked)
    job = asked.job(folder.path / "runs")
    # What is not gradient descent has no learning rate.
    tunable = isinstance(job.what, Script) or not issubclass(job.what.find(), IterativeTask)
    plan = LeaguePlan(league.contestants, asked.seed, asked.seeds, asked.tune if tunable else (1.0,))

    def run(planned: Planned) -> Entry:
        return _one_run(planned, job, conductor, starter, spectator)

    def state() -> League:
        found = dataclasses.replace(
            league,
            entries=tuple(conductor.entries),
            given_up=tuple(conductor.given_up),
            undone=tuple(conductor.undone),
            facts=_with_first_batch(league.facts, conductor.entries),
        )
        folder.write(found.kept())
        return found

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
    entry = Entry(planned.name, planned.seed, planned.factor, planned.tuning)
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
        raise UsageError(f"{job.what} never called offbeat.init(), so that nothing is known of its training.")
    if result.target is None:
        raise UsageError(_NO_TARGET)
    # A run of a league is never gone on with, and checkpoints of all of them could fill a disk.
    shutil.rmtree(RunFolder(result.run).checkpoints, ignore_errors=True)
    return dataclasses.replace(of_result(entry, result), wall_seconds=time.monotonic() - start)


def _refuse_hopeless(conductor: Conductor, failed: Entry) -> None:
    """When everybody has failed once and nobody has not, the fault is not a strategy's."""
    entries = [*conductor.entries, failed]
    names = {entry.name for entry in entries}
    everybody = {
        one.name for one in conductor.plan.contestants if not entries[0].tuning or one.name in conductor.plan.tuned
    }
    if names == everybody and all(entry.reason is not None for entry in entries):
        raise RunError(f"no strategy could run it. The first failed so: {entries[0].reason}")


def _with_first_batch(facts: Mapping[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """A script's data is known by what its first run had first."""
    if facts["data"]["hash"] is not None:
        return dict(facts)
    found = next((entry.first_batch for entry in entries if entry.first_batch), None)
    return dict(facts) | {"data": dict(facts["data"]) | {"hash": found}}
