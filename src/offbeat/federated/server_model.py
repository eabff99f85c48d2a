"""The global model of a federated server: how the mean of the updates moves it, and how it is scored and kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import RunError
from offbeat.federated.description import StatisticForms, TaskDescription, describe, described
from offbeat.federated.vectors import UpdateFormat, packed
from offbeat.protocols.machine import Payload
from offbeat.runtime.federated.aggregation import UpdateLayout
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.local_training import LocalTrainer
from offbeat.runtime.federated.noise import SystemNoise
from offbeat.strategies._base import Combined
from offbeat.strategies.federated.update_path import UpdatePath, aggregation, rules_of, update_path
from offbeat.task import AnyTask, IterativeTask, Task, TaskReference
from offbeat.worker.federated_learner import GlobalModel
from offbeat.worker.federated_statistics import FlatTensors, IterativeModel
from offbeat.worker.task_data import loader_over


class ServerModel(ABC):
    """The model of one kind of task, and the way of an update to its move."""

    model: GlobalModel
    path: UpdatePath

    @property
    def format(self) -> UpdateFormat:
        """How updates travel."""
        return UpdateFormat.of(self.path.layout, self.path.filters)

    @abstractmethod
    def describe(self, reference: TaskReference) -> TaskDescription:
        """What clients are compared with when they join."""

    @abstractmethod
    def payload(self) -> Payload:
        """What clients get."""

    @abstractmethod
    def move(self, mean: Tensor, extra: Tensor | None, *, examples: int, number: int) -> None:
        """Move the model by what the updates of round `number` amount to; all clients have so many examples."""

    @abstractmethod
    def round_done(self) -> None:
        """A round is over, whether or not the model has moved."""

    @abstractmethod
    def score(self, data: Any) -> float:
        """The task's score of the model on some data."""

    @abstractmethod
    def trained(self) -> dict[str, Tensor]:
        """The model, for its file."""


class GradientModel(ServerModel):
    """The model of a `Task`, which clients train."""

    def __init__(self, task: Task, strategy: Combined, seed: int) -> None:
        self._task, rules = task, rules_of(strategy)
        self._flat = FlatModel(task.model())
        optimizer = task.optimizer(self._flat.parameters)
        self._schedule = task.schedule(optimizer)
        self._trainer = LocalTrainer(self._flat, optimizer, _no_data, _no_data, seed, 1, None)
        self._algorithm = rules.algorithm
        self._server = rules.algorithm.server(self._flat, rules.clients)
        # Noise comes from the system, as clients know the seed.
        self.path = update_path(strategy, self._flat, seed, SystemNoise())
        kept = {"server": self._server, "aggregation": self.path.aggregation, "optimizer": optimizer}
        self.model = GlobalModel(
            self._flat.values.clone(), kept if self._schedule is None else {**kept, "schedule": self._schedule}
        )

    def describe(self, reference: TaskReference) -> TaskDescription:
        """Its parameters and buffers."""
        return describe(reference, self._flat.module)

    def payload(self) -> Payload:
        """The parameters, and what the algorithm adds to them."""
        return packed([self.model.base, self._server.start_message()])

    def move(self, mean: Tensor, extra: Tensor | None, *, examples: int, number: int) -> None:
        """A step of the server's optimizer, or of the task's with the cohort's gradient."""
        del examples, number
        if self._algorithm.whole_gradient:
            self._trainer.step(self.model.base, mean)
        else:
            self._server.apply(self.model.base, mean, extra)

    def round_done(self) -> None:
        """The schedule of the learning rate goes by rounds."""
        if self._schedule is not None:
            self._schedule.step()

    def score(self, data: Any) -> float:
        """The score of the module."""
        self._flat.load(self.model.base)
        return score_on(self._task, self._flat.module, data)

    def trained(self) -> dict[str, Tensor]:
        """The state of the module."""
        self._flat.load(self.model.base)
        return {name: value for name, value in self._flat.module.state_dict().items() if isinstance(value, Tensor)}


class StatisticsModel(ServerModel):
    """The parameters of an `IterativeTask`, of whose statistics the server knows nothing before a client says it."""

    def __init__(self, task: IterativeTask, strategy: Combined, seed: int) -> None:
        self._strategy, self._seed = strategy, seed
        self._steps = IterativeModel(task)
        # Neither a mean nor a robust rule keeps anything between rounds.
        self.model = GlobalModel(self._steps.first, {})
        self.expect({})

    def expect(self, forms: StatisticForms) -> None:
        """Clients sum statistics of these forms."""
        self._statistics = FlatTensors({name: form.empty for name, form in forms.items()}, "the statistics")
        layout = UpdateLayout(self._statistics.size, self._statistics.size, torch.float64)
        params_bytes = self._steps.params.size * torch.float64.itemsize
        self.path = UpdatePath(layout, (), aggregation(self._strategy, layout, self._seed), params_bytes)

    def describe(self, reference: TaskReference) -> TaskDescription:
        """Its parameters."""
        return described(reference, self._steps.initial)

    def payload(self) -> Payload:
        """The parameters, as 64-bit numbers."""
        return packed([self.model.base])

    def move(self, mean: Tensor, extra: Tensor | None, *, examples: int, number: int) -> None:
        """The next parameters, from the mean over the cohort's examples times all examples."""
        del extra
        self._steps.move(self.model.base, self._statistics.unpack(mean * examples), number)

    def round_done(self) -> None:
        """Nothing goes by rounds."""

    def score(self, data: Any) -> float:
        """The score on all examples at once."""
        return self._steps.score(self.trained(), data)

    def trained(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return self._steps.params.unpack(self.model.base)


def server_model(task: AnyTask, strategy: Combined, seed: int) -> ServerModel:
    """The model of a task."""
    kind = StatisticsModel if isinstance(task, IterativeTask) else GradientModel
    return kind(task, strategy, seed)  # pyright: ignore[reportArgumentType]


def score_on(task: Task, module: nn.Module, data: Any) -> float:
    """A task's score of a model on some data."""
    batches = loader_over(data, task.evaluate_batch, task.collate, shuffle=False)
    with torch.no_grad():
        module.eval()
        return float(task.score(module, batches))


def _no_data(_any: Any) -> Any:
    raise RunError("A federated server has no data to train on.")
