"""Drives one run from its settings to its result: check, create the run folder, launch workers, collect messages.

`fit` trains a task; `drive` runs any job, a task or a user's script, and is what the command line calls.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from offbeat.errors import (
    CheckpointError,
    OutputError,
    RunError,
    TaskError,
    UsageError,
    VerdictError,
    WaitError,
    WorkerError,
)
from offbeat.monitor import LASTING, STRAGGLER, LiveWatch, Verdict
from offbeat.protocols.disturbances import asked, check
from offbeat.run import job as jobs
from offbeat.run.data_supervisor import DataServing, data_serving
from offbeat.run.event_links import event_links
from offbeat.run.input_advice import input_advice
from offbeat.run.job import Job, Script, agreed_workers, earlier, plain_target, resolve
from offbeat.run.machines import check_for_machines, settled
from offbeat.run.server_supervisor import Serving, role_counts, servers_of, serving
from offbeat.run.step_times import predicted, verdict
from offbeat.runtime import launch
from offbeat.runtime.agents.fleet import Fleet
from offbeat.runtime.engines import hosts_on, machines_of
from offbeat.runtime.hosts import Hosts, Placed, Seat, placed
from offbeat.runtime.launch import Launcher, PrivateStore, Role, RoleOutcome, threads_for
from offbeat.runtime.run.folder import BY_SCRIPT, RunFolder, environment, part
from offbeat.runtime.run.procfs import passport
from offbeat.runtime.run.result import Result, failure
from offbeat.runtime.run.settings import ASSIGNED, Goal
from offbeat.runtime.system.capacity import check_room, free_memory
from offbeat.strategies import Strategy
from offbeat.strategies.splitting.layouts import place_in_words
from offbeat.task import AnyTask

WARM = (
    *(*launch.PRELOAD, "torch._dynamo", "offbeat.worker.loop"),
    *("offbeat.runtime.servers.process", "offbeat.runtime.groups.coordinated_group", "offbeat.worker.data_server"),
)
"""What the fork server imports, so that workers start with everything loaded (torch's optimizers import _dynamo)."""


class Watcher(Protocol):
    """An observer of a run, such as the display."""

    def begin(self, job: Job, folder: RunFolder) -> None:
        """The folder exists, the workers are about to start."""

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """A worker has sent a message."""

    def tick(self) -> None:
        """About ten times a second."""

    def verdict(self, verdict: Verdict) -> None:
        """The monitor has reached a verdict; if it is final, the run is about to be ended."""


class _Unwatched(Watcher):
    """Shows nothing."""


def fit(
    task: AnyTask | str,
    strategy: str | Strategy | None = None,
    *,
    workers: int | None = None,
    hosts: Hosts | str | Path | None = None,
    ship: str | Path | None = None,
    target: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    device: str = "cpu",
    parts: str = "iid",
    threads: int | None = None,
    out: str | Path = "runs",
    resume: str | Path | None = None,
    checkpoint_every: int | None = None,
    timeout: float = 600.0,
    replace: int = 0,
    data_servers: int = 0,
    disturb: str | Sequence[str] = (),
    watch: bool = False,
    rate_factor: float = 1.0,
    launcher: Launcher | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Train a task under a strategy on a number of workers, and return the result.

    `task` is an instance, or its name as on the command line (`offbeat.tasks.digits`). Everything else has a default:
    one worker; with `hosts`, an object, the path of a file or an engine (`ray`, `slurm`), as many as those have; with
    `resume`, as many as before. `ship` is a folder of code to send to machines. `disturb` injects faults, a sentence
    each; `replace` is how many dead workers are replaced by new ones; `data_servers` is how many processes prepare
    batches for the workers. `watch` records and judges the workers' events during the run; `rate_factor` multiplies
    learning rates. A `launcher` is used and left open, so that several runs share one fork server.
    """
    goal = Goal(
        strategy=None if strategy is None else str(strategy),
        target=None if target is None else f"score={target!r}",
        epochs=epochs,
        steps=steps,
        seed=seed,
        device=device,
        timeout=timeout,
        checkpoint_every=checkpoint_every,
        parts=parts,
        replace=replace,
        data_servers=data_servers,
        disturb=(disturb,) if isinstance(disturb, str) else tuple(disturb),
        watch=watch,
        rate_factor=rate_factor,
    )
    before = None if resume is None else Path(resume)
    places = hosts_on(hosts, workers)
    count = agreed_workers(places, workers, 1 if before is None else earlier(before)["workers"])
    what = jobs.target_of(task)
    if isinstance(what, Script):
        raise TaskError(
            f"{task!r} is a script, not a task. Run it with `offbeat run`, or name a class in it: '{task}:Class'."
        )
    job = Job(what, goal, count, threads, Path(out), before, hosts=places, ship=None if ship is None else Path(ship))
    return drive(job, launcher=launcher, watcher=watcher)


def drive(job: Job, *, launcher: Launcher | None = None, watcher: Watcher | None = None) -> Result:
    """Run a job and return its result. Mistakes in it are reported before any process starts."""
    if ASSIGNED.get() is not None:
        raise UsageError(
            "a worker of a run has started a run itself. A file that calls offbeat.fit must do so under "
            "`if __name__ == '__main__':`, because its workers import it too; start it with `python file.py`, not with "
            "`offbeat run`."
        )
    start = time.monotonic()
    if job.resume is not None and (kept := jobs.finished_result(resolve(job))) is not None:
        return kept
    # The fork server imports torch while the job is checked.
    with nullcontext(launcher) if launcher else Launcher(WARM) as starter:
        remote = job.hosts is not None and job.hosts.are_machines
        if not remote:
            starter.start()
        # With the faults requested now: a resumed run does not die of the same fault again.
        sentences, job = job.goal.disturb, resolve(job)
        job = dataclasses.replace(job, goal=dataclasses.replace(job.goal, disturb=sentences))
        check(job.goal.disturbances, role_counts(job))
        needs = servers_of(job)
        processes = job.workers + (needs[0] * (1 + needs[1]) if needs else 0) + job.goal.data_servers
        if not remote:
            check_room(processes, job.threads or threads_for(job.workers))
        with _places(job) as (there, fleet), _store(job, there) as store:
            # After the store, so that a port that is taken leaves no folder behind.
            folder = _folder_for(job)
            collected = _Collected(job, folder, watcher or _Unwatched(), start)
            collected.watcher.begin(job, folder)
            _launch(starter, job, folder, store, collected, there, fleet)
        return _finish(job, folder, collected)


@contextmanager
def _places(job: Job) -> Generator[tuple[Placed | None, Fleet | None]]:
    """Where the processes of the run go, and the agents there; nowhere else than here without hosts."""
    if job.hosts is None:
        yield None, None
    elif job.hosts.are_machines:
        check_for_machines(job)
        with machines_of(job.hosts, WARM) as machines:
            yield machines.placed, machines.fleet
    else:
        with placed(job.hosts) as there:
            yield there, None


@contextmanager
def _store(job: Job, there: Placed | None) -> Generator[PrivateStore | int]:
    """The rendezvous store: in private memory, or at a port that only the hosts of the run can reach."""
    if there is None:
        with launch.private_store(job.port) as store:
            yield store
        return
    with there.inside():
        server = launch.serve_store(job.port, there.listening)
    try:
        yield server.port
    finally:
        del server  # Now, not when the traceback of an error is released.


def _launch(
    starter: Launcher,
    job: Job,
    folder: RunFolder,
    store: PrivateStore | int,
    collected: _Collected,
    there: Placed | None,
    fleet: Fleet | None,
) -> None:
    watch: LiveWatch | None = None
    try:
        with (
            event_links(job, folder, there) as links,
            serving(job, folder, there) as servers,
            data_serving(job, there) as data,
            settled(fleet, job, folder, servers, data, links.folder) as machines,
        ):
            collected.data = data
            if job.goal.watch:
                watch = LiveWatch(folder.path, job.workers, job.goal.delivery_rule, links.source)

            def tick() -> None:
                servers.tick(collected.watcher.tick)
                _look(watch, folder, collected.watcher)
                for role in servers.condemned(time.monotonic()):
                    starter.kill(role)
                for new in servers.renewals():
                    starter.add(links.on_its_host(new))

            def ended(outcome: RoleOutcome) -> None:
                servers.ended(outcome)
                if watch is not None:
                    watch.ended(outcome)
                    if outcome.role.kind == "server":
                        watch.lost_server(str(outcome.role), outcome)
                forwarder = links.replacement(outcome, () if fleet is None else fleet.lost)
                if forwarder is not None:
                    starter.add(forwarder)
                reader = data.ended(outcome, collected.fired_for(outcome.role), () if fleet is None else fleet.lost)
                if reader is not None:
                    starter.add(reader)
                new = servers.replacement(outcome, job.goal.replace)
                if new is not None:
                    data.worker_joins()
                    config = {**new.config, "disturbed": collected.fired_for(new)}
                    starter.add(links.on_its_host(dataclasses.replace(new, config=config)))

            starter.run(
                [
                    *map(links.on_its_host, _roles(job, folder, store, servers, data, there)),
                    *map(links.on_its_host, servers.roles(job, folder)),
                    *data.roles(job, folder),
                    *links.roles,
                ],
                on_message=collected.message,
                on_tick=tick,
                on_end=ended,
                machines=machines,
            )
            collected.died, collected.joined = [*servers.died, *data.died], [*servers.joined, *data.joined]
            if there is not None:
                collected.hosts = there.plain(servers.places)
    except BaseException as error:
        _name_stage(error, collected.strategy or job.goal.strategy, job)
        with suppress(OutputError, CheckpointError):  # A full disk may be the cause.
            state = "failed" if isinstance(error, Exception) else "interrupted"
            result = _result_so_far(job, folder, collected, error)
            folder.write(state=state, result=result, **collected.fault_summary())
            if watch is not None:
                _conclude(watch, folder, error)
        raise


def _name_stage(error: BaseException, strategy: str | None, job: Job) -> None:
    """Add to the error of a worker that has a part of the model which part that is."""
    # One that was stopped for too long has raised nothing itself.
    was_stopped = isinstance(error, WaitError) and not vars(error).get("remote_traceback")
    if not (isinstance(error, WorkerError) or was_stopped) or strategy is None:
        return
    role, rank = vars(error).get("role"), vars(error).get("rank")
    if role != "worker" or not isinstance(rank, int):
        return
    if words := place_in_words(strategy, rank, job.goal.placement, job.host_of_workers):
        error.args = (f"{str(error).rstrip('.')}. It had {words}.",)


def _look(watch: LiveWatch | None, folder: RunFolder, watcher: Watcher) -> None:
    """Report the monitor's verdict; end a run that can never continue."""
    verdict = None if watch is None else watch.look()
    if verdict is None:
        return
    watcher.verdict(verdict)  # At once: ending the workers takes a while.
    if verdict.final:
        raise VerdictError(verdict.headline, kind=verdict.kind, verdict=verdict.plain())
    if verdict.kind != STRAGGLER:  # Stragglers are judged by the whole run.
        folder.write(verdict=verdict.plain())


def _conclude(watch: LiveWatch, folder: RunFolder, error: BaseException) -> None:
    """Save the verdict on a failed run; raise it if it explains the failure."""
    if isinstance(error, VerdictError):
        folder.write(verdict=error.verdict)
        return
    verdict, explains = watch.after_failure()
    if verdict is not None:
        folder.write(verdict=verdict.plain())
        if explains and isinstance(error, RunError):
            raise VerdictError(verdict.headline, kind=verdict.kind, verdict=verdict.plain()) from error


def _folder_for(job: Job) -> RunFolder:
    if job.resume:
        folder = RunFolder.open(job.resume)
    else:
        folder = RunFolder.create(job.out, jobs.short_name(job.what), job.goal.strategy or BY_SCRIPT)
    config: dict[str, Any] = {
        "what": plain_target(job.what),
        "goal": job.goal.plain(),
        "workers": job.workers,
        "threads": job.threads or threads_for(job.workers),
        "hosts": None if job.hosts is None else job.hosts.plain(),
    }
    if job.resume:
        known = earlier(folder.path)["what"]
        if known != config["what"]:
            raise CheckpointError(
                f"{folder.path} is a run of {jobs.named(known)}, not of {jobs.named(config['what'])}. Give the "
                f"run of this task, or start a new one."
            )
        folder.write(result={**part(folder.read(), "result"), "error": None})
    folder.write(config=config, environment=environment(), state="running", process=msgspec.to_builtins(passport()))
    return folder


def _roles(
    job: Job,
    folder: RunFolder,
    store: PrivateStore | int,
    servers: Serving,
    data: DataServing,
    there: Placed | None,
) -> list[Role]:
    config = {
        "servers": None if servers.plan is None else servers.plan.plain(),
        "data_servers": None if data.plan is None else data.plan.plain(),
        "goal": job.goal.plain(),
        "folder": str(folder.path.resolve()),
        "resume": job.resume is not None,
        "identity": jobs.identity_of(job),
        "machines": list(job.host_of_workers) if job.hosts is not None and job.hosts.are_machines else [],
        **plain_target(job.what),
    }
    seats = [None if there is None else there.seat(rank) for rank in range(job.workers)]
    address = "127.0.0.1" if there is None else there.address
    return [
        Role(
            kind="worker",
            rank=rank,
            entry="offbeat.worker.loop:work",
            config=config,
            environment=launch.worker_environment(rank, job.workers, store, address, seat),
            log=folder.log("worker", rank),
            threads=job.threads or _threads(job, seat),
            expendable=servers.outlives_workers,
            network=None if seat is None else seat.host.network,
            machine="" if seat is None else seat.host.machine,
            patience=job.goal.timeout,
        )
        for rank, seat in enumerate(seats)
    ]


def _threads(job: Job, seat: Seat | None) -> int:
    """Threads of a worker by default: of a machine, its cores divided by its workers."""
    if seat is None or not seat.host.cores:
        return threads_for(job.workers)
    return max(1, seat.host.cores // seat.local_size)


class _Collected:
    """What the workers have reported."""

    def __init__(self, job: Job, folder: RunFolder, watcher: Watcher, start: float) -> None:
        self.watcher, self.start, self._job, self._folder = watcher, start, job, folder
        self.strategy: str | None = None  # The strategy of the workers' team; None as long as there is no team.
        self.startup_seconds = 0.0
        self.result: dict[str, Any] | None = None
        self.progress: dict[str, Any] = {}  # The leading worker's latest progress.
        self.metrics: dict[str, float] = {}  # The latest report's.
        self.servers: dict[int, dict[str, Any]] = {}
        self.died: list[str] = []
        self.joined: list[str] = []
        self.hosts: list[dict[str, Any]] = []
        self.data: DataServing | None = None  # The run's data servers.
        self._fired: Counter[tuple[int, str]] = Counter()
        """How often each injected fault, by its number, has fired for each role, also for one that it killed."""

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """Keep what matters for the result, and pass everything on."""
        fields = {name: value for name, value in message.items() if name != "kind"}
        match message.get("kind"):
            case "ready":
                if self.strategy is None:
                    self._note_strategy(message["strategy"])
                self.startup_seconds = time.monotonic() - self.start
            case "progress" | "report":
                self.progress, self.metrics = dict(message), dict(message.get("metrics", self.metrics))
            case "result":
                self.result = fields
            case "server":
                # Of two processes that claim to serve a shard, the one in the later epoch does.
                known = self.servers.get(fields["shard"])
                if known is None or known["epoch"] < fields["epoch"]:
                    self.servers[fields["shard"]] = fields
            case "data server" if self.data is not None:
                self.data.account(fields["account"])
            case "disturbed":
                self._fired[message["number"], str(role)] += 1
            case _:
                pass
        self.watcher.message(role, message)

    def _note_strategy(self, strategy: str) -> None:
        """Save the strategy that a script has chosen."""
        self.strategy = strategy
        config = self._folder.read()["config"]
        if config["goal"]["strategy"] != strategy:
            config["goal"]["strategy"] = strategy
            self._folder.write(config=config)

    def fault_counts(self) -> dict[str, int]:
        """How many faults were requested, and how many have fired."""
        requested = asked(self._job.goal.disturbances, role_counts(self._job))
        return {"asked": requested, "fired": self._fired.total()}

    def fired_for(self, role: Role) -> list[int]:
        """Numbers of the faults that have fired for earlier processes of this role."""
        return [number for number, name in self._fired if name == str(role)]

    def fault_summary(self) -> dict[str, Any]:
        """For run.json: how often each fault has fired; empty if there are none."""
        each = [
            {"sentence": sentence, "fired": sum(count for (i, _), count in self._fired.items() if i == number)}
            for number, sentence in enumerate(self._job.goal.disturb)
        ]
        return {"disturbances": {**self.fault_counts(), "each": each}} if each else {}


def _facts(job: Job, folder: RunFolder, collected: _Collected) -> dict[str, Any]:
    """Entries of the result that are known of any run that has started."""
    return {
        "strategy": collected.strategy or job.goal.strategy or BY_SCRIPT,
        "workers": job.workers,
        "task": str(job.what),
        "run": str(folder.path),
        "target": job.goal.target,
        "startup_seconds": collected.startup_seconds,
        "disturbances": collected.fault_counts(),
    }


def _result_so_far(job: Job, folder: RunFolder, collected: _Collected, error: BaseException) -> dict[str, Any]:
    """The known entries of a failed run's result, and the error; of a resumed run, over those from before."""
    progress = collected.progress
    names = {"steps": "step", "epochs": "epoch", "samples": "samples", "seconds": "seconds"}
    names["seconds_by_kind"] = "seconds_by_kind"
    known = {name: progress[key] for name, key in names.items() if key in progress}
    known |= {"metrics": collected.metrics} if collected.metrics else {}
    ending = {"died": collected.died, "joined": collected.joined, "error": failure(error)}
    return part(folder.read(), "result") | _facts(job, folder, collected) | known | ending


def _finish(job: Job, folder: RunFolder, collected: _Collected) -> Result:
    reported = collected.result
    data: dict[str, Any] = {
        **_facts(job, folder, collected),
        **(reported or {}),
        "died": collected.died,
        "joined": collected.joined,
        "hosts": collected.hosts,
    }
    if not reported:
        data["strategy"] = BY_SCRIPT  # Whatever was requested: it joined no team.
    if collected.data is not None and collected.data.accounts:
        data["data_servers"] = collected.data.summary
        data["skipped"] = data.get("skipped", 0) + sum(each["skipped"] for each in collected.data.summary)
    if collected.servers:
        data["servers"] = [collected.servers[shard] for shard in sorted(collected.servers)]
    if reported:
        config = folder.read()["config"]
        advice = input_advice(data, config, len(os.sched_getaffinity(0)), free_memory())
        if advice:
            data["input"]["advice"] = advice
        data["pays"], data["predicted"] = verdict(data, config, folder.path.parent), predicted(data, config)
    result = Result.from_plain(data)
    state = "finished" if reported else "finished without a team"
    # A worker that was missing for long has come back after all; the dead stay dead.
    lasting = (folder.read().get("verdict") or {}).get("kind") in LASTING
    healthy = {"verdict": None} if job.goal.watch and not lasting else {}
    folder.write(state=state, result=result.plain(), **collected.fault_summary(), **healthy)
    return result
