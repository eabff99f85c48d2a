"""One run, from what was asked to its result: check, make the run folder, launch the workers, collect what they say.

`fit` learns a task; `drive` runs any job, a task or a user's script, and is what the command line calls.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from offbeat.errors import CheckpointError, OffbeatError, StrategyError, TaskError, UsageError
from offbeat.runtime.assignment import ASSIGNED
from offbeat.runtime.checkpoint import newest
from offbeat.runtime.goal import Goal, Target
from offbeat.runtime.launch import PRELOAD, Launcher, Role, serve_store, threads_for, worker_environment
from offbeat.runtime.records import RunFolder, environment
from offbeat.strategies import Strategy, combined, parse
from offbeat.task import AnyTask, IterativeTask, Reference, Task, reference_to

WARM = (*PRELOAD, "torch._dynamo", "offbeat.working")
"""What the fork server imports, so that a worker has everything there (torch's optimizers import _dynamo)."""


@dataclass(frozen=True)
class Script:
    """A user's own program: its file and its arguments."""

    path: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Job:
    """What is to be run, how, and where it leaves its traces."""

    what: Script | Reference
    """A script or a task."""
    goal: Goal
    """How far, and with what."""
    workers: int = 1
    """How many processes train."""
    threads: int | None = None
    """Threads in each; None: the cores divided by the workers."""
    out: Path = Path("runs")
    """Where run folders are made."""
    resume: Path | None = None
    """The folder of an earlier run to go on with."""
    port: int = 0
    """The loopback port to meet at; 0 is any that is free."""


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
    """Faults that were asked for and that were fired."""

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


class _Nobody:
    def begin(self, job: Job, folder: RunFolder) -> None:
        """Not shown."""

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """Not shown."""

    def tick(self) -> None:
        """Not shown."""


def fit(
    task: AnyTask | str,
    strategy: str | Strategy | None = None,
    *,
    workers: int | None = None,
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
    launcher: Launcher | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Learn a task under a strategy on so many workers, and answer what came of it.

    `task` is an instance, or its name as on the command line (`offbeat.tasks.digits`). Everything else has a default:
    one worker, or, with `resume`, as many as before.
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
    )
    where = None if resume is None else Path(resume)
    known: int = 1 if where is None else earlier(where)["workers"]
    job = Job(_reference(task), goal, known if workers is None else workers, threads, Path(out), where)
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


def target_of(text: str, arguments: tuple[str, ...]) -> Script | Reference:
    """What a command-line target means: a script (`file.py`), or a task (`file.py:Class`, or a module)."""
    source, _, name = text.partition(":")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise TaskError(f"There is no file {source!r} (looked in {Path.cwd()}). Check the path.")
        if not name:
            return Script(str(Path(source).resolve()), arguments)
        source = str(Path(source).resolve())
    elif "/" in source or not source or _is_no_module(Path(source)):
        raise TaskError(
            f"{text!r} is neither a Python file nor a module. Give `file.py`, `file.py:Class` or e.g. "
            f"offbeat.tasks.digits."
        )
    plain = Reference(source, name or None)
    return dataclasses.replace(plain, arguments=_constructor_arguments(plain, arguments))


def _is_no_module(path: Path) -> bool:
    """Whether a file or folder of this name is here that Python could not import."""
    return path.is_file() or (path.is_dir() and not (path / "__init__.py").exists())


def _constructor_arguments(reference: Reference, arguments: tuple[str, ...]) -> dict[str, Any]:
    """`--name value --flag` after `--`, as keyword arguments of the task's class; values that are JSON are read so."""
    found: dict[str, Any] = {}
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--") or word == "--":
            raise TaskError(f"{word!r} after `--` is no argument of {reference}: write `--name value`.")
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        found[name.replace("-", "_")] = _read(value)
    return found


def _read(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


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
        job = resolve(job)
        store = serve_store(job.port)  # Before the folder: a port that is taken leaves no traces.
        folder = _folder_for(job)
        collected = _Collected(watcher or _Nobody(), start)
        collected.watcher.begin(job, folder)
        try:
            starter.run(_roles(job, folder, store.port), on_message=collected.message, on_tick=collected.watcher.tick)
        except BaseException as error:
            with suppress(OffbeatError):  # A disk that is full may be the very reason.
                folder.write(state="failed" if isinstance(error, Exception) else "interrupted")
            raise
        del store
        return _finish(job, folder, collected)


def resolve(job: Job) -> Job:
    """Fill in what was left open, and refuse what cannot be run."""
    if job.resume is not None:
        job = _as_before(job)
    _check_numbers(job)
    goal = job.goal
    if goal.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs TensorBoard: pip install 'offbeat[tensorboard]'.")
    strategy = combined(parse(_default_strategy(job.workers) if goal.strategy is None else goal.strategy))
    strategy.check(job.workers)
    changes: dict[str, Any] = {"strategy": str(strategy)}
    if isinstance(job.what, Reference):
        task = job.what.build()
        changes |= _from_task(task, goal)
        if isinstance(task, IterativeTask) and strategy.when is not None:
            raise StrategyError(
                f"{strategy.when} cannot be used with {type(task).__name__}: it has no gradients to accumulate, "
                f"every step already "
                f"sums over all data. Use {strategy.exchange} alone."
            )
    return dataclasses.replace(job, goal=dataclasses.replace(goal, **changes))


def _default_strategy(workers: int) -> str:
    return "single" if workers == 1 else "allreduce"


def _check_numbers(job: Job) -> None:
    for name, value in (("workers", job.workers), ("threads", 1 if job.threads is None else job.threads)):
        if type(value) is not int or value < 1:
            raise UsageError(f"--{name} {value!r} makes no sense: it must be a whole number, 1 or more.")
    if not 0 <= job.port < 1 << 16:
        raise UsageError(f"--port {job.port} makes no sense: ports go up to 65535, and 0 takes one that is free.")


def _from_task(task: AnyTask, goal: Goal) -> dict[str, Any]:
    changes: dict[str, Any] = {"seed": goal.seed if goal.seed is not None else 0}
    if goal.target is None and task.target is not None:
        changes["target"] = f"score={task.target!r}"
    elif goal.target is not None and Target.parse(goal.target).name not in (None, "score"):
        raise UsageError(f"--target {goal.target}: a task has one score, so say just the number, or score=NUMBER.")
    if goal.steps is None and goal.epochs is None:
        changes |= {"epochs": task.epochs} if isinstance(task, Task) else {"steps": task.steps}
    elif isinstance(task, IterativeTask) and goal.steps is None:
        changes |= {"steps": goal.epochs}
    return changes


def _as_before(job: Job) -> Job:
    """The earlier run's job, with what is asked for differently now; what it may not differ in is refused."""
    folder = RunFolder.open(job.resume or Path())
    before = earlier(folder.path)
    if newest(folder.checkpoints) is None:
        raise CheckpointError(f"{folder.path} has no checkpoint, so there is nothing to resume from. Start a new run.")
    told = {name: value for name, value in job.goal.plain().items() if value != getattr(Goal(), name)}
    was = dict(before["goal"])
    for name in ("strategy", "seed", "parts"):
        if name in told and name == "strategy":
            told[name] = str(combined(parse(told[name])))
        if name in told and told[name] != was.get(name):
            raise CheckpointError(
                f"{folder.path} was run with {name} {was.get(name)}, not {told[name]}: it cannot go on differently."
            )
    if job.workers != before["workers"]:
        raise CheckpointError(
            f"{folder.path} was run with {before['workers']} workers, not {job.workers}. Resume with as many."
        )
    goal = Goal.from_plain(was | told | _budget(told))
    return dataclasses.replace(job, goal=goal, threads=before["threads"] if job.threads is None else job.threads)


def earlier(run: Path) -> dict[str, Any]:
    """The configuration of an earlier run: what was run, its goal, its workers and their threads."""
    config = RunFolder.open(run).read().get("config")
    if not (isinstance(config, dict) and {"what", "goal", "workers", "threads"} <= set(cast("dict[str, Any]", config))):
        raise CheckpointError(f"{run} cannot be resumed: its run.json says not what was run. It may have been edited.")
    return cast("dict[str, Any]", config)


def _budget(told: Mapping[str, Any]) -> dict[str, Any]:
    """A new budget of one kind replaces the old one of the other kind."""
    if "steps" in told and "epochs" not in told:
        return {"epochs": None}
    return {"steps": None} if "epochs" in told and "steps" not in told else {}


def _folder_for(job: Job) -> RunFolder:
    folder = (
        RunFolder.open(job.resume)
        if job.resume
        else RunFolder.create(job.out, _short(job.what), job.goal.strategy or "")
    )
    config: dict[str, Any] = {
        "what": _plain_target(job.what),
        "goal": job.goal.plain(),
        "workers": job.workers,
        "threads": job.threads or threads_for(job.workers),
    }
    if job.resume:
        known = earlier(folder.path)["what"]
        if known != config["what"]:
            raise CheckpointError(
                f"{folder.path} is a run of {_named(known)}, not of {_named(config['what'])}. Give the run of this "
                f"task, or start a new one."
            )
    folder.write(config=config, environment=environment(), state="running")
    return folder


def _short(what: Script | Reference) -> str:
    """A name for the run's folder: a file's without where it is."""
    if isinstance(what, Script):
        return Path(what.path).stem
    source = Path(what.source).stem if what.source.endswith(".py") else what.source
    return f"{source}-{what.name}" if what.name else source


def _plain_target(what: Script | Reference) -> dict[str, Any]:
    if isinstance(what, Script):
        return {"script": what.path, "arguments": list(what.arguments)}
    return {"task": dataclasses.asdict(what)}


def _named(what: Mapping[str, Any]) -> str:
    if "script" in what:
        return " ".join([what["script"], *what["arguments"]])
    return f"{Reference(**what['task'])} {what['task']['arguments'] or ''}".rstrip()


def _roles(job: Job, folder: RunFolder, port: int) -> list[Role]:
    target = _plain_target(job.what)
    config = {
        "goal": job.goal.plain(),
        "folder": str(folder.path.resolve()),
        "resume": job.resume is not None,
        "identity": {"task": json.dumps(target, sort_keys=True)},
        **target,
    }
    return [
        Role(
            kind="worker",
            rank=rank,
            entry="offbeat.working:work",
            config=config,
            environment=worker_environment(rank, job.workers, port),
            log=folder.log("worker", rank),
            threads=job.threads or threads_for(job.workers),
        )
        for rank in range(job.workers)
    ]


class _Collected:
    """What the workers have said."""

    def __init__(self, watcher: Watcher, start: float) -> None:
        self.watcher = watcher
        self.start = start
        self.startup_seconds = 0.0
        self.result: dict[str, Any] | None = None
        self._ready: set[int] = set()

    def message(self, role: Role, message: Mapping[str, Any]) -> None:
        """Keep what matters for the result, pass everything on."""
        if message.get("kind") == "ready":
            self._ready.add(role.rank)
            self.startup_seconds = time.monotonic() - self.start
        elif message.get("kind") == "result":
            self.result = {name: value for name, value in message.items() if name != "kind"}
        self.watcher.message(role, message)


def _finish(job: Job, folder: RunFolder, collected: _Collected) -> Result:
    said = collected.result
    data: dict[str, Any] = {
        "strategy": job.goal.strategy,
        "workers": job.workers,
        "task": str(job.what),
        "run": str(folder.path),
        "startup_seconds": collected.startup_seconds,
        **(said or {}),
    }
    result = Result.from_plain(data)
    folder.write(state="finished" if said else "finished without a team", result=result.plain())
    return result
