"""One run, from what was asked to its result: check, make the run folder, launch the workers, collect what they say.

`fit` learns a task; `drive` runs any job, a task or a user's script, and is what the command line calls.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from offbeat.errors import CheckpointError, OutputError, RunError, TaskError, UsageError, VerdictError
from offbeat.foretelling import foretold
from offbeat.jobs import (
    Job,
    Script,
    agreed_workers,
    earlier,
    identity_of,
    named,
    plain_target,
    resolve,
    short_name,
    target_of,
)
from offbeat.monitor import LASTING, STRAGGLER, Verdict, Watch
from offbeat.paying import verdict
from offbeat.protocols.disturbances import asked, check
from offbeat.runtime.assignment import ASSIGNED
from offbeat.runtime.goal import Goal
from offbeat.runtime.hosts import Hosts, Placed, placed
from offbeat.runtime.launch import (
    EVERYWHERE,
    PRELOAD,
    Launcher,
    Outcome,
    Role,
    serve_store,
    threads_for,
    worker_environment,
)
from offbeat.runtime.processes import passport
from offbeat.runtime.records import RunFolder, environment
from offbeat.serving import Serving, servers_of, serving
from offbeat.strategies import Strategy
from offbeat.task import AnyTask, Reference, reference_to

if TYPE_CHECKING:
    from torch.distributed import TCPStore

WARM = (*PRELOAD, "torch._dynamo", "offbeat.working", "offbeat.runtime.servers.process", "offbeat.runtime.served")
"""What the fork server imports, so that a worker has everything there (torch's optimizers import _dynamo)."""


@dataclass(frozen=True)
class Result:
    """What a run came to; `offbeat run --format json` prints exactly these."""

    strategy: str
    """How it was distributed."""
    workers: int
    """How many processes trained."""
    task: str
    """What was learned: a task, or a script's path."""
    run: Path
    """The run's folder."""
    seed: int | None = None
    """What fixed its random choices."""
    steps: int = 0
    """Updates done."""
    epochs: int | None = None
    """Passes over the training data, the last one maybe not complete."""
    samples: int = 0
    """Training examples seen, over all workers."""
    score: float | None = None
    """The last reported score, on validation data for tasks."""
    best_score: float | None = None
    """The best reported score."""
    test_score: float | None = None
    """The score on test data, taken once, at the end; tasks only."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Everything in the last report."""
    target: str | None = None
    """The score that was to be reached."""
    reached_target: bool | None = None
    """Whether it was; None if there was none."""
    seconds_to_target: float | None = None
    """Training time until the report that reached it."""
    seconds: float = 0.0
    """Training time, evaluations included, start-up not; the mean over workers."""
    startup_seconds: float = 0.0
    """From the start of the launch until training began."""
    samples_per_second: float = 0.0
    """Examples per second of training time."""
    core_seconds: float = 0.0
    """Processor time of all workers together."""
    bytes_sent: int = 0
    """Payload bytes that the workers sent, by the formulas of the algorithms used."""
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    """Where the time went; sums to `seconds`. `communicate` is only the part that backward did not hide."""
    overlapped_seconds: float = 0.0
    """Time during which an exchange was under way beside backward; not part of the sum."""
    staleness: dict[str, int] = field(default_factory=dict)
    """How many steps old what a worker read was: how often each."""
    disturbances: dict[str, int] = field(default_factory=dict)
    """Faults: how many were asked for, how many have fired; each sentence's own count is in run.json."""
    choices: dict[str, Any] = field(default_factory=dict)
    """What the strategy chose by measuring, against which others, in seconds; see `allreduce(auto)`."""
    optimizer_bytes: list[int] = field(default_factory=list)
    """How much optimizer state each worker holds, where it is divided."""
    gossip: dict[str, Any] = field(default_factory=dict[str, Any])
    """How fast replicas should come together by their graph, and how fast they did; see `gossip`."""
    compression: dict[str, float] = field(default_factory=dict)
    """What compressing has cost and saved a worker, their mean: bytes before and after, seconds for both, and dense."""
    pays: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whether compression pays: both sides of time per step times steps to the target, and the verdict in words."""
    foretold: dict[str, Any] = field(default_factory=dict[str, Any])
    """What a step took, and what its schedules on these links foretell; or why nobody can foretell it."""

    waits: list[float] = field(default_factory=list[float])
    """Seconds that each worker that is there at the end has waited for others, in the order of their ranks."""
    refusals: list[str] = field(default_factory=list[str])
    """Why servers have refused pushes, and whose they were; the first ones."""
    servers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """What each shard has to say: pushes by what became of them, staleness of reads, bytes by link."""
    hosts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The hosts of the run: name, kind, address, rate, and the numbers of the workers and server processes there."""
    died: list[str] = field(default_factory=list[str])
    """Workers and servers that died on the way, where the run went on without them."""
    joined: list[str] = field(default_factory=list[str])
    """Workers that joined on the way, in place of others, and servers that hold a copy in place of others."""
    first_batch: str | None = None
    """A fingerprint of the first training batch that the worker had who wrote this: the same data gives the same."""

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return dataclasses.asdict(self) | {"run": str(self.run)}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Result:
        """From JSON data; unknown entries are ignored."""
        known: dict[str, Any] = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        known["run"] = Path(data["run"])
        return cls(**known)


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


def _reference(task: AnyTask | str) -> Reference:
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
    # The fork server imports torch while everything is checked here.
    with nullcontext(launcher) if launcher else Launcher(WARM) as starter:
        starter.start()
        job = _disturbed_as_asked(resolve(job), job.goal.disturb)
        with nullcontext() if job.hosts is None else placed(job.hosts) as there:
            # Before the folder: a port that is taken leaves no traces.
            store = _store(job, there)
            folder = _folder_for(job)
            collected = _Collected(watcher or _Nobody(), start, _Disturbed(job))
            collected.watcher.begin(job, folder)
            try:
                _launch(starter, job, folder, store.port, collected, there)
            finally:
                del store  # Now, not when whoever catches an error lets go of its traceback.
        return _finish(job, folder, collected)


def _store(job: Job, there: Placed | None) -> TCPStore:
    """Where the workers meet: on loopback, or where only the hosts of the run can reach it."""
    if there is None:
        return serve_store(job.port)
    with there.inside():
        return serve_store(job.port, EVERYWHERE)


def _launch(
    starter: Launcher, job: Job, folder: RunFolder, port: int, collected: _Collected, there: Placed | None
) -> None:
    watch = Watch(folder.path, job.workers) if job.goal.watch else None
    try:
        with serving(job, folder, there) as servers:

            def tick() -> None:
                servers.tick(collected.watcher.tick)
                _look(watch, folder, collected.watcher)
                for role in servers.condemned(time.monotonic()):
                    starter.kill(role)
                for new in servers.renewals():
                    starter.add(new)

            def ended(outcome: Outcome) -> None:
                servers.ended(outcome)
                if watch is not None:
                    watch.ended(outcome)
                    if outcome.role.kind == "server":
                        watch.lost_server(servers.name_of(outcome.role), outcome)
                new = servers.replacement(outcome, job.goal.replace)
                if new is not None:
                    config = {**new.config, "disturbed": collected.disturbed.at(new)}
                    starter.add(dataclasses.replace(new, config=config))

            starter.run(
                [*_roles(job, folder, port, servers, there), *servers.roles(job, folder)],
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
            folder.write(state=state, **collected.disturbed.told())
            if watch is not None:
                _conclude(watch, folder, error)
        raise


def _look(watch: Watch | None, folder: RunFolder, watcher: Watcher) -> None:
    """End a run that can never go on; say of one that may."""
    found = None if watch is None else watch.look()
    if found is None:
        return
    watcher.verdict(found)  # At once: ending the workers takes a while.
    if found.final:
        raise VerdictError(found.headline, kind=found.kind, verdict=found.plain())
    if found.kind != STRAGGLER:  # Whoever asks later is told what the whole run says of it.
        folder.write(verdict=found.plain())


def _conclude(watch: Watch, folder: RunFolder, error: BaseException) -> None:
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


def _cast(job: Job) -> dict[str, int]:
    """How many processes of each role the run will have; of servers, how many shards."""
    needs = servers_of(job)
    return {"worker": job.workers} | ({"server": needs[0]} if needs and needs[0] else {})


def _folder_for(job: Job) -> RunFolder:
    folder = (
        RunFolder.open(job.resume)
        if job.resume
        else RunFolder.create(job.out, short_name(job.what), job.goal.strategy or "")
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
    folder.write(config=config, environment=environment(), state="running", process=msgspec.to_builtins(passport()))
    return folder


def _roles(job: Job, folder: RunFolder, port: int, servers: Serving, there: Placed | None) -> list[Role]:
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
            entry="offbeat.working:work",
            config=config,
            environment=worker_environment(rank, job.workers, port, address, seat),
            log=folder.log("worker", rank),
            threads=job.threads or threads_for(job.workers),
            expendable=servers.plan is not None,
            network=None if seat is None else seat.host.network,
        )
        for rank, seat in enumerate(seats)
    ]


class _Collected:
    """What the workers have said."""

    def __init__(self, watcher: Watcher, start: float, disturbed: _Disturbed) -> None:
        self.watcher = watcher
        self.start = start
        self.disturbed = disturbed
        self.startup_seconds = 0.0
        self.result: dict[str, Any] | None = None
        self.servers: dict[int, dict[str, Any]] = {}
        self.died: list[str] = []
        self.joined: list[str] = []
        self.hosts: list[dict[str, Any]] = []
        self._ready: set[int] = set()

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """Keep what matters for the result, pass everything on."""
        if message.get("kind") == "ready":
            self._ready.add(role.rank)
            self.startup_seconds = time.monotonic() - self.start
        elif message.get("kind") == "result":
            self.result = {name: value for name, value in message.items() if name != "kind"}
        elif message.get("kind") == "server":
            self._hear_server({name: value for name, value in message.items() if name != "kind"})
        elif message.get("kind") == "disturbed":
            self.disturbed.fired[message["number"], str(role)] += 1
        self.watcher.message(role, message)

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


def _finish(job: Job, folder: RunFolder, collected: _Collected) -> Result:
    said = collected.result
    data: dict[str, Any] = {
        "strategy": job.goal.strategy,
        "workers": job.workers,
        "task": str(job.what),
        "run": str(folder.path),
        "startup_seconds": collected.startup_seconds,
        "disturbances": collected.disturbed.counts(),
        **(said or {}),
        "died": collected.died,
        "joined": collected.joined,
        "hosts": collected.hosts,
    }
    if collected.servers:
        data["servers"] = [collected.servers[shard] for shard in sorted(collected.servers)]
    if said:
        config = folder.read()["config"]
        data["pays"], data["foretold"] = verdict(data, config, folder.path.parent), foretold(data, config)
    result = Result.from_plain(data)
    state = "finished" if said else "finished without a team"
    # Whoever was missing for long has come after all; the dead stay dead.
    lasting = (folder.read().get("verdict") or {}).get("kind") in LASTING
    healthy = {"verdict": None} if job.goal.watch and not lasting else {}
    folder.write(state=state, result=result.plain(), **collected.disturbed.told(), **healthy)
    return result
