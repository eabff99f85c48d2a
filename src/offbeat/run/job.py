"""Jobs: the script or task to run, and how; completed and checked before anything starts."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from offbeat import limits
from offbeat.errors import CheckpointError, OffbeatWarning, StrategyError, TaskError, UsageError
from offbeat.runtime.federated.privacy_accountant import check_installed
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.run.folder import RUN_FILE, RunFolder, part
from offbeat.runtime.run.result import Result
from offbeat.runtime.run.settings import Goal, Target
from offbeat.runtime.run.untrusted_files import is_file, is_folder, is_there
from offbeat.runtime.state.checkpoint import newest, newest_step
from offbeat.strategies import Combined, Pipeline, combined, parse
from offbeat.strategies.federated.strategy import Federated
from offbeat.strategies.federated.update_path import rules_of
from offbeat.strategies.sandblaster import Sandblaster
from offbeat.strategies.splitting.layouts import check_placement, relaid
from offbeat.task import AnyTask, IterativeTask, Task, TaskReference, reference_to
from offbeat.team.task_checks import check_task


@dataclass(frozen=True)
class Script:
    """A user's script and its arguments."""

    path: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Job:
    """What to run, how, and where to put the run folder."""

    what: Script | TaskReference
    """A script or a task."""
    goal: Goal
    """Strategy, target, budget and other settings."""
    workers: int = 1
    """Number of workers."""
    threads: int | None = None
    """Threads of each worker; None divides the cores by the workers."""
    out: Path = Path("runs")
    """Parent of the run folder."""
    resume: Path | None = None
    """Folder of the run to resume."""
    port: int = 0
    """Rendezvous port; 0 picks a free one."""
    hosts: Hosts | None = None
    """Hosts of the processes; None is this machine alone."""
    ship: Path | None = None
    """Folder of code to send to the machines; None: they have it."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense, or that no machine has capacity for."""
        limits.whole("--workers", self.workers, limits.WORKERS, why="each is a process")
        if self.threads is not None:
            limits.whole("--threads", self.threads, limits.THREADS)
        limits.port("--port", self.port)
        agreed_workers(self.hosts, self.workers, self.workers)

    @property
    def host_of_workers(self) -> tuple[int, ...]:
        """The host of each worker."""
        return (0,) * self.workers if self.hosts is None else self.hosts.of_workers()


def target_of(target: AnyTask | str | Path, arguments: Sequence[str] = ()) -> Script | TaskReference:
    """The script (`file.py`) or task (`file.py:Class`, or a module) that a target names, or the task that it is."""
    if isinstance(target, Task | IterativeTask):
        return reference_to(target)
    text = str(target)
    source, _, name = text.partition(":")
    if source.endswith(".py"):
        if not is_file(Path(source)):
            raise TaskError(f"There is no file {source!r} (looked in {Path.cwd()}). Check the path.")
        if not name:
            return Script(str(Path(source).resolve()), tuple(arguments))
        source = str(Path(source).resolve())
    elif "/" in source or not source or is_file(Path(source)) or _is_plain_folder(Path(source)):
        raise TaskError(
            f"{text!r} is neither a Python file nor a module. Give `file.py`, `file.py:Class` or e.g. "
            f"offbeat.tasks.digits."
        )
    reference = TaskReference(source, name or None)
    return dataclasses.replace(reference, arguments=_constructor_arguments(reference, arguments))


def _is_plain_folder(path: Path) -> bool:
    return is_folder(path) and not is_there(path / "__init__.py")


def _constructor_arguments(reference: TaskReference, arguments: Sequence[str]) -> dict[str, Any]:
    """`--name value --flag` after `--`, as keyword arguments of the task's class; values may be JSON."""
    keywords: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise TaskError(f"{word!r} after `--` is not an argument of {reference}: write `--name value`.")
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        try:
            keywords[name.replace("-", "_")] = json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            keywords[name.replace("-", "_")] = value
    return keywords


def resolve(job: Job) -> Job:
    """Fill in defaults, and refuse what cannot be run."""
    if job.resume is not None:
        job = _as_before(job)
    goal = job.goal
    if goal.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs TensorBoard: pip install 'offbeat[tensorboard]'.")
    strategy = combined(parse(goal.strategy or ("single" if job.workers == 1 else "allreduce")))
    strategy.check(job.workers)
    if goal.replace and not strategy.traits.elastic:
        raise StrategyError(
            f"--replace {goal.replace}: under {strategy} no worker can join a run that has begun. Omit it, or use a "
            f"strategy with servers, such as server, and replicas that are not split."
        )
    if goal.replace and isinstance(strategy.exchange, Sandblaster):
        raise StrategyError(
            f"--replace {goal.replace}: under sandblaster idle workers compute what a dead one leaves, and none takes "
            f"its place. Omit it."
        )
    if job.hosts is not None:
        strategy.check_hosts(len(set(job.hosts.of_workers())))
    if goal.strategy is not None or not isinstance(job.what, Script):
        check_placement(strategy, goal.placement, job.host_of_workers)
    # A script may name a strategy to offbeat.init(), or not use offbeat at all: that is known only when it runs.
    own = isinstance(job.what, Script) and goal.strategy is None
    changes: dict[str, Any] = {} if own else {"strategy": str(strategy)}
    if goal.data_servers:
        _check_data_servers(job.what.build() if isinstance(job.what, TaskReference) else None, strategy)
    if isinstance(job.what, TaskReference):
        task = job.what.build()
        changes |= _from_task(task, goal)
        if isinstance(strategy.exchange, Federated):
            changes |= _in_rounds(strategy.exchange, task, job)
            job = dataclasses.replace(job, threads=1)
            _check_federated(task, strategy, strategy.exchange, job.hosts)
        if isinstance(strategy.exchange, Sandblaster):
            strategy.exchange.check_task(task)
            changes |= _in_iterations(task, job)
        if strategy.split:
            _refuse_unsplittable(task, strategy, job.workers)
        if isinstance(task, IterativeTask) and goal.replace:
            raise StrategyError(
                f"--replace {goal.replace}: a worker of {type(task).__name__} keeps its part of the data and its "
                f"last statistics, so another cannot take its place. Omit it."
            )
        if isinstance(task, IterativeTask) and strategy.when is not None:
            raise StrategyError(
                f"{strategy.when} cannot be used with {type(task).__name__}: it has no gradients to accumulate, "
                f"every step already sums over all data. Use {strategy.exchange} alone."
            )
    return dataclasses.replace(job, goal=dataclasses.replace(goal, **changes))


def _check_data_servers(task: AnyTask | None, strategy: Combined) -> None:
    """Refuse data servers where no batches of a training loader are read; without a task it is a script."""
    what = strategy.exchange if isinstance(strategy.exchange, Federated | Sandblaster) else type(task).__name__
    if isinstance(task, IterativeTask) or what is strategy.exchange:
        raise StrategyError(
            f"--data-servers cannot be used with {what}: its workers keep parts of the data, and read no batches that "
            f"others could prepare. Omit it."
        )


def check_iterative(task: IterativeTask, strategy: Combined) -> None:
    """Refuse what clients that send statistics cannot do."""
    name = type(task).__name__
    rules_of(strategy).check_iterative(name)
    if strategy.compressions:
        raise StrategyError(
            f"{strategy.compressions[0]} cannot be used with {name}: its clients send sums of statistics anew in "
            f"every round, so what one message left out would never be sent. Omit it."
        )


def _check_federated(task: AnyTask, strategy: Combined, rules: Federated, hosts: Hosts | None) -> None:
    """Refuse what clients of this task cannot do, and warn of a promise that is weak."""
    if isinstance(task, IterativeTask):
        check_iterative(task, strategy)
    owing = [part for part in strategy.compressions if getattr(part, "owes", False)]
    if owing and hosts is not None and len(set(hosts.of_workers())) > 1:
        raise StrategyError(
            f"under federated, {owing[0]} keeps what each client has not sent yet in the run's folder, which several "
            f"hosts do not share. Put all workers on one host, or say feedback=False."
        )
    if (terms := rules.privacy_terms) is not None:
        check_installed()
        if terms.doubt:
            warnings.warn(terms.doubt, OffbeatWarning, stacklevel=3)


def _in_rounds(strategy: Federated, task: AnyTask, job: Job) -> dict[str, Any]:
    """The budget in rounds, of which each is a step; refuse threads on which the bits of the result would depend."""
    if job.threads not in (None, 1):
        raise UsageError(
            f"--threads {job.threads}: under federated a worker has one thread, because sums inside an operator, and "
            f"so the bits of the result, depend on their number. Omit it, and ask for more workers."
        )
    passes = job.goal.epochs or (task.epochs if isinstance(task, Task) else None)
    if job.goal.steps is not None or passes is None:
        return {}
    return {"steps": strategy.rounds(passes), "epochs": None}


def _in_iterations(task: AnyTask, job: Job) -> dict[str, Any]:
    """The budget in iterations, each of which counts as an epoch."""
    passes = job.goal.epochs or (task.epochs if isinstance(task, Task) else None)
    return {} if job.goal.steps is not None or passes is None else {"steps": passes, "epochs": None}


def _refuse_unsplittable(task: AnyTask, strategy: Combined, workers: int) -> None:
    """Refuse tasks that call the whole model."""
    spread, name = " + ".join(map(str, strategy.split)), type(task).__name__
    if isinstance(task, IterativeTask):
        raise StrategyError(
            f"{spread} cannot be used with {name}: it sums statistics of its parameters and has no model to split. "
            f"Omit it."
        )
    if any(isinstance(part, Pipeline) for part in strategy.split) and type(task).loss is not Task.loss:
        raise StrategyError(
            f"{spread} cannot be used with {name}, which overrides loss(model, batch): no worker has a whole model to "
            f"call. Give {name} a criterion(output, target) in place of loss."
        )
    check_task(task, strategy, workers)


def agreed_workers(hosts: Hosts | None, requested: int | None, default: int) -> int:
    """Number of workers: that of the hosts, with which a requested number must agree."""
    if hosts is None:
        return default if requested is None else requested
    if requested not in (None, hosts.workers):
        raise UsageError(
            f"the hosts have {hosts.workers} workers together, but --workers says {requested}. Omit --workers, or say "
            f"how many each host has."
        )
    return hosts.workers


def _from_task(task: AnyTask, goal: Goal) -> dict[str, Any]:
    changes: dict[str, Any] = {"seed": goal.seed if goal.seed is not None else 0}
    if goal.target is None and task.target is not None:
        changes["target"] = f"score={task.target!r}"
    elif goal.target is not None and Target.parse(goal.target).name not in (None, "score"):
        raise UsageError(f"--target {goal.target}: a task has one score, so give just the number, or score=NUMBER.")
    if goal.steps is None and goal.epochs is None:
        changes |= {"epochs": task.epochs} if isinstance(task, Task) else {"steps": task.steps}
    elif isinstance(task, IterativeTask) and goal.steps is None:
        changes |= {"steps": goal.epochs}
    return changes


def _related(before: str | None, now: str) -> bool:
    """Whether a run of one strategy can go on under the other, as one that shards what the other does not."""
    return before is not None and combined(parse(before)).lineage == combined(parse(now)).lineage


def _as_before(job: Job) -> Job:
    """The earlier run's job with the settings requested now; those that must not change are refused."""
    folder = RunFolder.open(job.resume or Path())
    before = earlier(folder.path)
    if newest(folder.checkpoints) is None:
        raise CheckpointError(f"{folder.path} has no checkpoint, so there is nothing to resume from. Start a new run.")
    requested = {name: value for name, value in job.goal.plain().items() if value != getattr(Goal(), name)}
    if "strategy" in requested:
        requested["strategy"] = str(combined(parse(requested["strategy"])))
    was = dict(before["goal"])
    # A checkpoint does not depend on how its model was spread over workers.
    moves = bool(was.get("strategy")) and relaid(was["strategy"], requested.get("strategy", was["strategy"]))
    for name in ("strategy", "seed", "parts"):
        if name not in requested or requested[name] == was.get(name):
            continue
        if name != "strategy" or not (moves or _related(was[name], requested[name])):
            raise CheckpointError(
                f"{folder.path} was run with {name} {was.get(name)}, not {requested[name]}: it cannot be changed now."
            )
    if job.workers != before["workers"] and not moves:
        raise CheckpointError(
            f"{folder.path} was run with {before['workers']} workers, not {job.workers}. Resume with as many."
        )
    # A new budget of one kind replaces the old budget of the other kind.
    budgets = {"steps", "epochs"}
    replaced = budgets - requested.keys() if budgets & requested.keys() else set[str]()
    goal = Goal.from_plain(was | requested | dict.fromkeys(replaced))
    hosts = Hosts.from_plain(before["hosts"]) if job.hosts is None and before.get("hosts") else job.hosts
    threads = before["threads"] if job.threads is None else job.threads
    return dataclasses.replace(job, goal=goal, threads=threads, hosts=hosts)


def finished_result(job: Job) -> Result | None:
    """The result of the run that a resolved job resumes, if nothing is left to do; else None."""
    if job.resume is None:
        return None
    folder = RunFolder.open(job.resume)
    known = folder.read()
    result, goal = part(known, "result"), job.goal
    if known.get("state") != "finished" or not {"strategy", "workers", "task"} <= set(result):
        return None
    if 0 < newest_step(folder.checkpoints) < (result.get("steps") or 0):
        return None  # Later checkpoints were removed: it is to resume from an earlier one.
    if isinstance(job.what, Script) and _modified(Path(job.what.path)) > _modified(folder.path / RUN_FILE):
        return None  # Its loop may be longer now.
    before = Goal.from_plain(part(known, "config", "goal"))
    same = (goal.steps, goal.epochs) == (before.steps, before.epochs)
    if result.get("reached_target"):
        over = goal.target == before.target
    else:
        steps, epochs = result.get("steps") or 0, result.get("epochs") or 0
        # The last epoch may be incomplete.
        spent = (goal.steps is not None and steps >= goal.steps) or (goal.epochs is not None and epochs > goal.epochs)
        over = same or spent
    return Result.from_plain(result | {"run": str(job.resume)}) if over else None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def earlier(run: Path) -> dict[str, Any]:
    """The configuration of an earlier run: its script or task, settings, workers and threads."""
    config = RunFolder.open(run).read().get("config")
    if not (isinstance(config, dict) and {"what", "goal", "workers", "threads"} <= set(cast("dict[str, Any]", config))):
        raise CheckpointError(
            f"{run} cannot be resumed: its run.json does not say what was run. It may have been edited."
        )
    return cast("dict[str, Any]", config)


def short_name(what: Script | TaskReference) -> str:
    """A name for the run's folder: a file's without its path."""
    if isinstance(what, Script):
        return Path(what.path).stem
    source = Path(what.source).stem if what.source.endswith(".py") else what.source
    return f"{source}-{what.name}" if what.name else source


def plain_target(what: Script | TaskReference) -> dict[str, Any]:
    """The script or task as JSON data."""
    if isinstance(what, Script):
        return {"script": what.path, "arguments": list(what.arguments)}
    return {"task": dataclasses.asdict(what)}


def target_from_plain(data: Mapping[str, Any]) -> Script | TaskReference:
    """The script or task of JSON data from a file."""
    try:
        if "script" in data:
            return Script(data["script"], msgspec.convert(data["arguments"], tuple[str, ...]))
        return msgspec.convert(data["task"], TaskReference)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{dict(data)} does not say which script or task was run ({error!r}).") from error


def identity_of(job: Job) -> dict[str, Any]:
    """What must be equal to resume from a checkpoint, beside strategy and number of workers."""
    return {"task": json.dumps(plain_target(job.what), sort_keys=True)}


def named(what: Mapping[str, Any]) -> str:
    """The text of such data."""
    target = target_from_plain(what)
    if isinstance(target, Script):
        return " ".join([target.path, *target.arguments])
    return f"{target} {target.arguments or ''}".rstrip()
