"""One run, from what was asked to its result: check, make the run folder, launch the workers, collect what they say.

`fit` learns a task; `drive` runs any job, a task or a user's script, and is what the command line calls.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from offbeat.errors import CheckpointError, OutputError, RunError, TaskError, UsageError, VerdictError
from offbeat.monitor import LASTING, STRAGGLER, LiveWatch, Verdict
from offbeat.protocols.disturbances import asked, check
from offbeat.run.compression_payoff import verdict
from offbeat.run.job import (
    Job,
    Script,
    agreed_workers,
    earlier,
    finished_result,
    identity_of,
    named,
    plain_target,
    resolve,
    short_name,
    target_of,
)
from offbeat.run.predicted_step import predicted
from offbeat.run.server_supervisor import Serving, servers_of, serving
from offbeat.runtime.hosts import Hosts, Placed, placed
from offbeat.runtime.launch import (
    EVERYWHERE,
    PRELOAD,
    Launcher,
    PrivateStore,
    Role,
    RoleOutcome,
    private_store,
    serve_store,
    threads_for,
    worker_environment,
)
from offbeat.runtime.run.assignment import ASSIGNED
from offbeat.runtime.run.folder import BY_SCRIPT, RunFolder, environment, part
from offbeat.runtime.run.procfs import passport
from offbeat.runtime.run.result import Result, failure
from offbeat.runtime.run.settings import Goal
from offbeat.runtime.system.capacity import check_room
from offbeat.strategies import Strategy
from offbeat.task import AnyTask, TaskReference, reference_to

WARM = (
    *PRELOAD,
    "torch._dynamo",
    "offbeat.worker.loop",
    "offbeat.runtime.servers.process",
    "offbeat.runtime.groups.coordinated",
)
"""What the fork server imports, so that a worker has everything there (torch's optimizers import _dynamo)."""


class Watcher(Protocol):
    """Somebody who is told how a run goes: the display."""

    def begin(self, job: Job, folder: RunFolder) -> None:
        """The folder is made, the workers are about to start."""
        ...

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """A worker said something."""
        ...

    def tick(self) -> None:
        """About ten times a second."""
        ...

    def verdict(self, verdict: Verdict) -> None:
        """The monitor has found something; if it can never become better, the run is about to be ended."""
        ...


class _Nobody:
    def begin(self, job: Job, folder: RunFolder) -> None:
        """Not shown."""

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """Not shown."""

    def tick(self) -> None:
        """Not shown."""

    def verdict(self, verdict: Verdict) -> None:
        """Not shown."""


def fit(
    task: AnyTask | str,
    strategy: str | Strategy | None = None,
    *,
    workers: int | None = None,
    hosts: Hosts | str | Path | None = None,
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
    disturb: str | Sequence[str] = (),
    watch: bool = False,
    rate_factor: float = 1.0,
    launcher: Launcher | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Learn a task under a strategy on so many workers, and answer what came of it.

    `task` is an instance, or its name as on the command line (`offbeat.tasks.digits`). Everything else has a default:
    one worker; with `hosts`, given as such or as the path of a file, as many as those have; with `resume`, as many as
    before. `disturb` asks for faults, a sentence each; `replace` is how many workers that have died are replaced by new
    ones. `watch` has the workers' events written down and judged as they come; `rate_factor` multiplies learning rates.
    A launcher that is handed in is used and left open, so that several runs share one fork server.
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
        disturb=(disturb,) if isinstance(disturb, str) else tuple(disturb),
        watch=watch,
        rate_factor=rate_factor,
    )
    where = None if resume is None else Path(resume)
    wanted = Hosts.read(Path(hosts)) if isinstance(hosts, str | Path) else hosts
    count = agreed_workers(wanted, workers, 1 if where is None else earlier(where)["workers"])
    job = Job(_reference(task), goal, count, threads, Path(out), where, hosts=wanted)
    return drive(job, launcher=launcher, watcher=watcher)


def _reference(task: AnyTask | str) -> TaskReference:
    if isinstance(task, str):
        found = target_of(task, ())
        if isinstance(found, Script):
            raise TaskError(
                f"{task!r} is a script, not a task. Run it with `offbeat run`, or name a class in it: '{task}:Class'."
            )
        return found
    return reference_to(task)


def drive(job: Job, *, launcher: Launcher | None = None, watcher: Watcher | None = None) -> Result:
    """Run a job and answer its result. What is wrong with it is said before any process starts."""
    if ASSIGNED.get() is not None:
        raise UsageError(
            "a worker of a run has started a run itself. A file that calls offbeat.fit must do so under "
            "`if __name__ == '__main__':`, because its workers import it too; start it with `python file.py`, not with "
            "`offbeat run`."
        )
    start = time.monotonic()
    if job.resume is not None and (kept := finished_result(resolve(job))) is not None:
        return kept
    # The fork server imports torch while everything is checked here.
    with nullcontext(launcher) if launcher else Launcher(WARM) as starter:
        starter.start()
        job = _disturbed_as_asked(resolve(job), job.goal.disturb)
        check_room(_processes(job), job.threads or threads_for(job.workers))
        with nullcontext() if job.hosts is None else placed(job.hosts) as there, _store(job, there) as store:
            # After the store: a port that is taken leaves no traces.
            folder = _folder_for(job)
            collected = _Collected(watcher or _Nobody(), start, _Disturbed(job), folder)
            collected.watcher.begin(job, folder)
            _launch(starter, job, folder, store, collected, there)
        return _finish(job, folder, collected)


@contextmanager
def _store(job: Job, there: Placed | None) -> Generator[PrivateStore | int]:
    """Where the workers meet: in memory of this user's, or at a port that only the hosts of the run can reach."""
    if there is None:
        with private_store(job.port) as store:
            yield store
        return
    with there.inside():
        served = serve_store(job.port, EVERYWHERE)
    try:
        yield served.port
    finally:
        del served  # Now, not when whoever catches an error lets go of its traceback.


def _launch(
    starter: Launcher,
    job: Job,
    folder: RunFolder,
    store: PrivateStore | int,
    collected: _Collected,
    there: Placed | None,
) -> None:
    watch = LiveWatch(folder.path, job.workers) if job.goal.watch else None
    try:
        with serving(job, folder, there) as servers:

            def tick() -> None:
                servers.tick(collected.watcher.tick)
                _look(watch, folder, collected.watcher)
                for role in servers.condemned(time.monotonic()):
                    starter.kill(role)
                for new in servers.renewals():
                    starter.add(new)

            def ended(outcome: RoleOutcome) -> None:
                servers.ended(outcome)
                if watch is not None:
                    watch.ended(outcome)
                    if outcome.role.kind == "server":
                        watch.lost_server(str(outcome.role), outcome)
                new = servers.replacement(outcome, job.goal.replace)
                if new is not None:
                    config = {**new.config, "disturbed": collected.disturbed.at(new)}
                    starter.add(dataclasses.replace(new, config=config))

            starter.run(
                [*_roles(job, folder, store, servers, there), *servers.roles(job, folder)],
                on_message=collected.message,
                on_tick=tick,
                on_end=ended,
            )
            collected.died, collected.joined = servers.died, servers.joined
            if there is not None:
                collected.hosts = there.plain(servers.places)
    except BaseException as error:
        with suppress(OutputError, CheckpointError):  # A disk that is full may be the very reason.
            state = "failed" if isinstance(error, Exception) else "interrupted"
            folder.write(
                state=state, result=_result_so_far(job, folder, collected, error), **collected.disturbed.told()
            )
            if watch is not None:
                _conclude(watch, folder, error)
        raise


def _look(watch: LiveWatch | None, folder: RunFolder, watcher: Watcher) -> None:
    """End a run that can never go on; say of one that may."""
    found = None if watch is None else watch.look()
    if found is None:
        return
    watcher.verdict(found)  # At once: ending the workers takes a while.
    if found.final:
        raise VerdictError(found.headline, kind=found.kind, verdict=found.plain())
    if found.kind != STRAGGLER:  # Whoever asks later is told what the whole run says of it.
        folder.write(verdict=found.plain())


def _conclude(watch: LiveWatch, folder: RunFolder, error: BaseException) -> None:
    """Keep the verdict on a run that has failed; raise it if the failure only followed from it."""
    if isinstance(error, VerdictError):
        folder.write(verdict=error.verdict)
        return
    found, says_more = watch.after_failure()
    if found is not None:
        folder.write(verdict=found.plain())
        if says_more and isinstance(error, RunError):
            raise VerdictError(found.headline, kind=found.kind, verdict=found.plain()) from error


def _disturbed_as_asked(job: Job, sentences: tuple[str, ...]) -> Job:
    """The job with the faults that were asked for now: a resumed run does not die of the same fault again."""
    goal = dataclasses.replace(job.goal, disturb=sentences)
    check(goal.disturbances, _cast(job))
    return dataclasses.replace(job, goal=goal)


def _processes(job: Job) -> int:
    """How many processes the run starts: its workers, and a server for every copy of every shard."""
    needs = servers_of(job)
    return job.workers + (needs[0] * (1 + needs[1]) if needs else 0)


def _cast(job: Job) -> dict[str, int]:
    """How many processes of each role the run will have; of servers, how many shards."""
    needs = servers_of(job)
    return {"worker": job.workers} | ({"server": needs[0]} if needs and needs[0] else {})


def _folder_for(job: Job) -> RunFolder:
    folder = (
        RunFolder.open(job.resume)
        if job.resume
        else RunFolder.create(job.out, short_name(job.what), job.goal.strategy or BY_SCRIPT)
    )
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
                f"{folder.path} is a run of {named(known)}, not of {named(config['what'])}. Give the run of this "
                f"task, or start a new one."
            )
        folder.write(result={**part(folder.read(), "result"), "error": None})
    folder.write(config=config, environment=environment(), state="running", process=msgspec.to_builtins(passport()))
    return folder


def _roles(
    job: Job, folder: RunFolder, store: PrivateStore | int, servers: Serving, there: Placed | None
) -> list[Role]:
    target = plain_target(job.what)
    config = {
        "servers": None if servers.plan is None else servers.plan.plain(),
        "goal": job.goal.plain(),
        "folder": str(folder.path.resolve()),
        "resume": job.resume is not None,
        "identity": identity_of(job),
        **target,
    }
    seats = [None if there is None else there.seat(rank) for rank in range(job.workers)]
    address = "127.0.0.1" if there is None else there.address
    return [
        Role(
            kind="worker",
            rank=rank,
            entry="offbeat.worker.loop:work",
            config=config,
            environment=worker_environment(rank, job.workers, store, address, seat),
            log=folder.log("worker", rank),
            threads=job.threads or threads_for(job.workers),
            expendable=servers.plan is not None,
            network=None if seat is None else seat.host.network,
            patience=job.goal.timeout,
        )
        for rank, seat in enumerate(seats)
    ]


class _Collected:
    """What the workers have said."""

    def __init__(self, watcher: Watcher, start: float, disturbed: _Disturbed, folder: RunFolder) -> None:
        self.watcher = watcher
        self._folder = folder
        self.strategy: str | None = None
        """What the workers' team runs under; None as long as there is no team."""
        self.start = start
        self.disturbed = disturbed
        self.startup_seconds = 0.0
        self.result: dict[str, Any] | None = None
        self.progress: dict[str, Any] = {}
        """The latest that the leading worker has told of itself."""
        self.metrics: dict[str, float] = {}
        """The latest report's."""
        self.servers: dict[int, dict[str, Any]] = {}
        self.died: list[str] = []
        self.joined: list[str] = []
        self.hosts: list[dict[str, Any]] = []
        self._ready: set[int] = set()

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """Keep what matters for the result, pass everything on."""
        if message.get("kind") == "ready":
            self._ready.add(role.rank)
            if self.strategy is None:
                self._note_strategy(message["strategy"])
            self.startup_seconds = time.monotonic() - self.start
        elif message.get("kind") in ("progress", "report"):
            self.progress, self.metrics = dict(message), dict(message.get("metrics", self.metrics))
        elif message.get("kind") == "result":
            self.result = {name: value for name, value in message.items() if name != "kind"}
        elif message.get("kind") == "server":
            self._hear_server({name: value for name, value in message.items() if name != "kind"})
        elif message.get("kind") == "disturbed":
            self.disturbed.fired[message["number"], str(role)] += 1
        self.watcher.message(role, message)

    def _note_strategy(self, strategy: str) -> None:
        """Keep what a script has said, for whoever looks at the run."""
        self.strategy = strategy
        config = self._folder.read()["config"]
        if config["goal"]["strategy"] != strategy:
            config["goal"]["strategy"] = strategy
            self._folder.write(config=config)

    def _hear_server(self, account: dict[str, Any]) -> None:
        """Of two who claim to serve a shard, the one in the later epoch does."""
        known = self.servers.get(account["shard"])
        if known is None or known["epoch"] < account["epoch"]:
            self.servers[account["shard"]] = account


class _Disturbed:
    """Counts the faults of a run here, where the last word of a killed process is heard too."""

    def __init__(self, job: Job) -> None:
        self._sentences = job.goal.disturb
        self._asked = asked(job.goal.disturbances, _cast(job))
        self.fired: Counter[tuple[int, str]] = Counter()
        """How often each sentence, by its number, has come true for each role."""

    def counts(self) -> dict[str, int]:
        """For the result."""
        return {"asked": self._asked, "fired": self.fired.total()}

    def at(self, role: Role) -> list[int]:
        """Numbers of the sentences that have come true for those who had this role."""
        return [number for number, name in self.fired if name == str(role)]

    def told(self) -> dict[str, Any]:
        """For run.json: how often each sentence came true; nothing if none was said."""
        if not self._sentences:
            return {}
        fired: Counter[int] = Counter()
        for (number, _), count in self.fired.items():
            fired[number] += count
        each = [{"sentence": sentence, "fired": fired[i]} for i, sentence in enumerate(self._sentences)]
        return {"disturbances": {**self.counts(), "each": each}}


def _facts(job: Job, folder: RunFolder, collected: _Collected) -> dict[str, Any]:
    """What is known of any run that has been started, as entries of its result."""
    return {
        "strategy": collected.strategy or job.goal.strategy or BY_SCRIPT,
        "workers": job.workers,
        "task": str(job.what),
        "run": str(folder.path),
        "target": job.goal.target,
        "startup_seconds": collected.startup_seconds,
        "disturbances": collected.disturbed.counts(),
    }


def _result_so_far(job: Job, folder: RunFolder, collected: _Collected, error: BaseException) -> dict[str, Any]:
    """What a run that failed had come to: those entries of the result that are known, and why it failed.

    If it was resumed, and had not gone far enough to say anything, that is what it had come to before.
    """
    before = part(folder.read(), "result")
    names = {"steps": "step", "epochs": "epoch", "samples": "samples", "seconds": "seconds"}
    told = {name: collected.progress[known] for name, known in names.items() if known in collected.progress}
    if "seconds_by_kind" in collected.progress:
        told["seconds_by_kind"] = collected.progress["seconds_by_kind"]
    if collected.metrics:
        told["metrics"] = collected.metrics
    return (
        before
        | _facts(job, folder, collected)
        | told
        | {"died": collected.died, "joined": collected.joined, "error": failure(error)}
    )


def _finish(job: Job, folder: RunFolder, collected: _Collected) -> Result:
    said = collected.result
    data: dict[str, Any] = {
        **_facts(job, folder, collected),
        **(said or {}),
        "died": collected.died,
        "joined": collected.joined,
        "hosts": collected.hosts,
    }
    if not said:
        data["strategy"] = BY_SCRIPT  # Whatever was asked for: it joined no team.
    if collected.servers:
        data["servers"] = [collected.servers[shard] for shard in sorted(collected.servers)]
    if said:
        config = folder.read()["config"]
        data["pays"], data["predicted"] = verdict(data, config, folder.path.parent), predicted(data, config)
    result = Result.from_plain(data)
    state = "finished" if said else "finished without a team"
    # Whoever was missing for long has come after all; the dead stay dead.
    lasting = (folder.read().get("verdict") or {}).get("kind") in LASTING
    healthy = {"verdict": None} if job.goal.watch and not lasting else {}
    folder.write(state=state, result=result.plain(), **collected.disturbed.told(), **healthy)
    return result
