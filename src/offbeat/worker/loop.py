"""What a worker process does: run a user's script, or the training loop of a task.

The loop of a task uses the same team as scripts do, so that both give the same result.
"""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from offbeat.errors import DataError, NonFiniteError, TaskError
from offbeat.protocols.partition import share
from offbeat.runtime.backend import stand_in_for_gloo
from offbeat.runtime.data_servers.plan import DataServerPlan
from offbeat.runtime.events.worker import written_down
from offbeat.runtime.launch import Control
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.run.settings import ASSIGNED, Assignment, Goal
from offbeat.runtime.servers.plan import ServerPlan
from offbeat.runtime.state.random_state import seed_everything
from offbeat.strategies import Pipeline
from offbeat.strategies.federated.strategy import Federated
from offbeat.strategies.sandblaster import Sandblaster
from offbeat.strategies.worker.capabilities import PartsKeeper, StatisticsKeeper
from offbeat.task import Data, IterativeTask, Task, TaskReference
from offbeat.team.team import Team
from offbeat.worker.federated import federate
from offbeat.worker.model_file import write_model
from offbeat.worker.per_example_gradients import checks
from offbeat.worker.sandblaster import sandblast
from offbeat.worker.score import finite, scorer
from offbeat.worker.task_data import data_of, loader_over, on_device, size_of


def work(config: Mapping[str, Any], control: Control) -> None:
    """Entry point of a worker process; its configuration is plain data from the launcher."""
    assignment = Assignment(
        goal=Goal.from_plain(config["goal"]),
        folder=Path(config["folder"]),
        resume=config["resume"],
        joins=config.get("joins", False),
        disturbed=tuple(config.get("disturbed", ())),
        identity=config["identity"],
        machines=tuple(config.get("machines", ())),
        send=control.send,
        fail=control.fail,
        servers=ServerPlan.from_plain(config["servers"]) if config.get("servers") else None,
        data_servers=DataServerPlan.from_plain(config["data_servers"]) if config.get("data_servers") else None,
    )
    ASSIGNED.set(assignment)
    goal, in_place_of_gloo = assignment.goal, assignment.goal.backend == "offbeat"
    if in_place_of_gloo and not goal.watch:
        stand_in_for_gloo()
    events = Path(config.get("events") or config["folder"])
    recording = written_down(events, where().rank, in_place_of_gloo) if goal.watch else nullcontext()
    with recording:
        if not config.get("script"):
            learn(TaskReference(**config["task"]), assignment)
            return
        if goal.seed is not None:
            seed_everything(goal.seed)  # A model may be created before the script calls init().
        assignment.send({"kind": "script", "script": config["script"]})
        run_script(config["script"], config["arguments"])
        for team in assignment.open_teams:
            team.close()


def run_script(path: str, arguments: list[str]) -> None:
    """Run a script as `python` does: its module is `__main__`, also while the process ends."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    try:
        exec(code, vars(module))  # noqa: S102 - the user's own script
    except SystemExit as request:
        if request.code not in (None, 0):
            raise


def learn(reference: TaskReference, assignment: Assignment) -> None:
    """Train a task as one of the workers."""
    with Team(assignment, where()) as team:
        task = reference.build()
        if isinstance(team.strategy.exchange, Federated):
            federate(task, team)
        elif isinstance(team.strategy.exchange, Sandblaster):
            sandblast(task, team)
        elif isinstance(task, IterativeTask):
            iterate(task, team)
        else:
            train(task, team)


# -- gradient descent ------------------------------------------------------------------------------------------------


def train(task: Task, team: Team) -> None:
    """Minimize a task's loss until its target or the budget is reached."""
    data = data_of(task)
    _check_batch(task.global_batch)
    _check_enough(data, task.global_batch, team.strategy.replicas(team.size))
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    schedule = task.schedule(optimizer)
    batches = loader_over(data.train, task.global_batch, task.collate, shuffle=True)
    own = task.tensor_plan(model)
    if own is not None:
        team.tensor_plan(own)
    model, optimizer, batches = team.prepare(model, optimizer, batches)
    if schedule is not None:
        team.prepare(schedule)
    staged = any(isinstance(part, Pipeline) for part in team.strategy.split)
    step = team.pipeline(model, task.criterion, task.stages(model)) if staged else None
    validate = scorer(task, model, team, data.validation)
    judged = -1
    check_noise = checks(task, model, team) if team.goal.gauge else None
    for _ in team.epochs(team.goal.epochs):
        for batch in batches:
            optimizer.zero_grad()
            batch = on_device(batch, team.device)
            loss = task.loss(model, batch) if step is None else step(*batch)
            team.reports.last_loss = finite(loss, team)
            if step is None:
                loss.backward()
            optimizer.step()
            if schedule is not None and team.pace.updating:
                schedule.step()
            if check_noise is not None:
                check_noise()
            if task.evaluate_every and team.pace.updating and team.step % task.evaluate_every == 0:
                judged = team.step
                if team.report(score=validate()):
                    break
        if not team.stopping and judged != team.step and (team.exhausted or not task.evaluate_every):
            judged = team.step
            team.report(score=validate())
        if team.exhausted:
            break
    team.notes["test_score"] = team.mean(score=scorer(task, model, team, data.test)())["score"]
    if team.folder is not None:
        with team.averaged(model):
            write_model({k: value for k, value in model.state_dict().items() if isinstance(value, Tensor)}, team)


# -- iterations that are not gradient descent -------------------------------------------------------------------------


class _Parameters:
    """The parameters of an iterative task, for checkpoints."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = {name: value.clone() for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = dict(state)


def iterate(task: IterativeTask, team: Team) -> None:
    """Repeat `update(params, sum of statistics)` until the target or the budget is reached."""
    data = data_of(task)
    if task.global_batch is not None:
        _check_batch(task.global_batch)
    if isinstance(data.train, IterableDataset):
        raise DataError("an iterative task passes over its training data in every step: a stream cannot be split.")
    _check_enough(data, 1, team.size)
    params = team.prepare(_Parameters(task.initial()))
    for name in sorted(params.values):
        team.group.share(params.values[name], "the sharing of worker 0's parameters")
    members = tuple(range(team.size))
    part = _part_of(data.train, task, team, members)
    validate = list(loader_over(data.validation, size_of(data.validation), task.collate, shuffle=False))
    team.resume()
    while team.boundary():
        with team.stopwatch.spent_on("compute"):
            team.begin_step()
            mine = _summed(task, params.values, part, team)
        with team.stopwatch.spent_on("communicate"):
            keeper = team.exchange if isinstance(team.exchange, StatisticsKeeper) else None
            total = team.group.sums(mine, "the sum of statistics") if keeper is None else keeper.total(mine)
        with team.stopwatch.spent_on("compute"):
            params.values = {name: value.clone() for name, value in task.update(params.values, total).items()}
        team.ledger.steps += 1
        team.ledger.samples += size_of(data.train)
        for name, value in params.values.items():
            if not bool(torch.isfinite(value).all()):
                raise NonFiniteError(
                    f"worker {team.rank}: parameter {name!r} became NaN or infinite in step {team.step}. The last "
                    f"checkpoint is from before."
                )
        if team.step % task.evaluate_every == 0 or team.exhausted:
            with team.stopwatch.spent_on("evaluate"):
                score = float(task.score(params.values, validate))
            team.report(score=score)
            if team.group.membership.present != members:
                if isinstance(team.exchange, PartsKeeper):
                    team.exchange.take_over()
                members = team.group.membership.present
                part = _part_of(data.train, task, team, members)
    test = list(loader_over(data.test, size_of(data.test), task.collate, shuffle=False))
    team.notes["test_score"] = team.mean(score=float(task.score(params.values, test)))["score"]
    team.notes["epochs"] = team.step
    write_model(params.values, team)


def _part_of(train: Dataset[Any], task: IterativeTask, team: Team, members: Sequence[int]) -> Iterable[Any]:
    start, stop = share(size_of(train), members.index(team.rank), len(members))
    size = stop - start if task.global_batch is None else max(1, task.global_batch // len(members))
    loader = loader_over(Subset(train, range(start, stop)), size, task.collate, shuffle=False)
    # A whole part in one batch is loaded once: it is the same in every step.
    return list(loader) if task.global_batch is None else loader


def _summed(task: IterativeTask, params: Mapping[str, Tensor], part: Iterable[Any], team: Team) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for batch in part:
        for name, value in task.statistics(params, on_device(batch, team.device)).items():
            total[name] = total[name] + value if name in total else value
    return total


# -- checks ----------------------------------------------------------------------------------------------------------


def _check_batch(batch: int) -> None:
    if type(batch) is not int or batch < 1:
        raise TaskError(f"global_batch is {batch!r}, but a batch is a whole number of examples, 1 or more.")


def _check_enough(data: Data, batch: int, workers: int) -> None:
    for name, part in (("training", data.train), ("validation", data.validation), ("test", data.test)):
        if size_of(part) == 0:
            raise DataError(
                f"the {name} data is empty: there is nothing to train on or to score. Look at the task's data()."
            )
    size = size_of(data.train)
    if size < workers:
        raise DataError(
            f"there are {size} training examples for {workers} workers: some would have none. Ask for fewer workers."
        )
    if size < batch:
        raise DataError(
            f"there are {size} training examples, fewer than one global batch of {batch}: no full step could "
            f"be made. Lower the task's global_batch."
        )
