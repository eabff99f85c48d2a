"""A worker under `sandblaster`: it computes loss and gradient of portions of the data, and steps are made elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import IterableDataset, Subset

from offbeat.errors import DataError
from offbeat.protocols.partition import share
from offbeat.protocols.sandblaster.messages import IterationEnd
from offbeat.strategies.sandblaster import Sandblaster, SandblasterWorker, check_model
from offbeat.task import AnyTask, Task
from offbeat.team.closures.portion_closures import figures_of, refuse_random
from offbeat.team.team import Team
from offbeat.worker.model_file import write_model
from offbeat.worker.score import finite, scorer
from offbeat.worker.task_data import data_of, loader_over, on_device, size_of

Row = NDArray[Any]


def sandblast(task: AnyTask, team: Team) -> None:
    """Minimize a task's loss on its whole training part, until the target, the optimum or the budget is reached."""
    strategy = cast("Sandblaster", team.strategy.exchange)
    strategy.check_task(task)
    worker, data = cast("SandblasterWorker", team.exchange), data_of(cast("Task", task))
    portions = PortionGradients(cast("Task", task), team, strategy)
    model, every = portions.model, cast("Task", task).evaluate_every or 1
    team.prepare(portions)
    team.resume()
    worker.start(portions.row)
    validate = scorer(cast("Task", task), model, team, data.validation)
    portions.check_random()
    stopped = ""
    while team.boundary() and not stopped:
        team.begin_step()
        with team.stopwatch.spent_on("communicate"):
            end = worker.link.iterate(portions.compute)
            portions.move(worker.link.read())
            # No worker begins the next iteration while another still reads the parameters of this one.
            team.group.barrier("the parameters of an iteration")
        stopped = end.stopped
        _account(end, team, worker, portions.size)
        if stopped or team.step % every == 0 or team.exhausted:
            with team.stopwatch.spent_on("evaluate"):
                score = validate()
            team.report(score=score)
    with team.stopwatch.spent_on("evaluate"):
        team.notes["test_score"] = team.mean(score=scorer(cast("Task", task), model, team, data.test)())["score"]
    team.notes["epochs"] = team.step
    write_model({k: value for k, value in model.state_dict().items() if isinstance(value, Tensor)}, team)


def _account(end: IterationEnd, team: Team, worker: SandblasterWorker, examples: int) -> None:
    """Count an iteration, and keep its figures for metrics and result."""
    team.ledger.steps += 1
    team.ledger.samples += examples * worker.ended(end)
    team.reports.last_loss = end.loss
    team.notes["sandblaster"] = figures_of(end)


class PortionGradients:
    """The loss and gradient of portions of the training part, and the parameters for checkpoints."""

    def __init__(self, task: Task, team: Team, strategy: Sandblaster) -> None:
        self._task, self._team, self._strategy = task, team, strategy
        self.model = task.model().to(team.device)
        self._parameters = check_model(self.model, strategy)
        self._train = data_of(task).train
        if isinstance(self._train, IterableDataset):
            raise DataError(f"{strategy} passes over the training data in every evaluation: a stream has no portions.")
        self.size = size_of(self._train)
        self._batches: dict[int, Any] = {}  # Portions that were computed are kept: they come again.
        self.row: Row = parameters_to_vector(self._parameters).detach().cpu().numpy()

    def move(self, row: Row) -> None:
        """Give the model these parameters."""
        self.row = row.copy()
        self._put(self.row)

    def compute(self, portion: int, row: Row) -> tuple[float, Row]:
        """The portion's share of the mean loss over all examples, and of its gradient, at these parameters."""
        with self._team.stopwatch.spent_on("compute"):
            start, stop = share(self.size, portion, self._strategy.portions)
            if start == stop:  # There are more portions than examples.
                return 0.0, np.zeros_like(row)
            self._put(row)
            loss = self._task.loss(self.model, on_device(self._batch(portion, start, stop), self._team.device))
            weight = (stop - start) / self.size
            value = finite(loss, self._team) * weight
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            return value, _joined(self._parameters, gradients, weight)

    def check_random(self) -> None:
        """Refuse a task whose loss is random, as far as one portion shows: it is computed twice."""
        first = next(
            n for n in range(self._strategy.portions) if len(range(*share(self.size, n, self._strategy.portions)))
        )
        once = self.compute(first, self.row)
        self._batches.clear()  # Its batch may be random, too.
        refuse_random(once, self.compute(first, self.row), f"{self._strategy}: {type(self._task).__name__}")
        self.move(self.row)

    def state_dict(self) -> dict[str, Any]:
        """The parameters."""
        return {"parameters": torch.from_numpy(self.row.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from these parameters."""
        self.move(cast("Tensor", state["parameters"]).numpy())

    def _put(self, row: Row) -> None:
        with torch.no_grad():
            vector_to_parameters(torch.from_numpy(row).to(self._team.device, copy=True), self._parameters)

    def _batch(self, portion: int, start: int, stop: int) -> Any:
        if portion not in self._batches:
            part = Subset(self._train, range(start, stop))
            (self._batches[portion],) = loader_over(part, stop - start, self._task.collate, shuffle=False)
        return self._batches[portion]


def _joined(parameters: Iterable[Tensor], gradients: Iterable[Tensor | None], weight: float) -> Row:
    parts = [
        (torch.zeros_like(parameter) if gradient is None else gradient).reshape(-1)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return np.ascontiguousarray((torch.cat(parts) * weight).cpu().numpy())
