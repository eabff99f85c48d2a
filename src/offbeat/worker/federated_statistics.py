"""Iterative tasks under federated rounds: clients send sums of statistics of their data, as in EM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from offbeat.errors import NonFiniteError, TaskError
from offbeat.protocols.federated.client_parts import ClientParts
from offbeat.runtime.federated.aggregation import UpdateLayout
from offbeat.runtime.federated.client_state import ClientState
from offbeat.runtime.federated.local_training import Examples, LocalResult, Visit
from offbeat.strategies.federated.update_path import UpdatePath, aggregation, update_filters
from offbeat.task import IterativeTask
from offbeat.team.team import Team
from offbeat.worker.federated_learner import GlobalModel, Learner
from offbeat.worker.task_data import loader_over, on_device, size_of


class FlatTensors:
    """Named tensors side by side in one vector of 64-bit floating-point numbers."""

    def __init__(self, tensors: Mapping[str, Tensor], what: str) -> None:
        self._what = what
        self._kinds = {name: (value.shape, value.dtype) for name, value in sorted(tensors.items())}
        complex_ones = [name for name, value in tensors.items() if value.is_complex()]
        if complex_ones:
            raise TaskError(f"{what} {complex_ones[0]!r} is complex, and federated sums real numbers. Split it in two.")
        self._sizes = [shape.numel() for shape, _ in self._kinds.values()]
        self.size = sum(self._sizes)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector; tensors of other names or shapes are refused."""
        shapes = {name: value.shape for name, value in sorted(tensors.items())}
        expected = {name: shape for name, (shape, _) in self._kinds.items()}
        if shapes != expected:
            raise TaskError(
                f"{self._what} have changed from {_in_words(expected)} to {_in_words(shapes)}. Under federated they "
                f"keep their names and shapes, for all clients and rounds."
            )
        return torch.cat([tensors[name].detach().reshape(-1).to(torch.float64) for name in self._kinds])

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors, of their own types."""
        pieces = vector.split(self._sizes)
        return {
            name: piece.view(shape).to(dtype, copy=True)
            for (name, (shape, dtype)), piece in zip(self._kinds.items(), pieces, strict=True)
        }


def _in_words(shapes: Mapping[str, torch.Size]) -> str:
    return "(" + ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items()) + ")"


class IterativeModel:
    """The parameters of an `IterativeTask` as one vector: what clients compute from it, and how it moves."""

    def __init__(self, task: IterativeTask) -> None:
        self._task = task
        self.initial = task.initial()
        """The parameters to start from."""
        self.params = FlatTensors(self.initial, "the parameters")
        """All parameters, by name."""

    @property
    def first(self) -> Tensor:
        """The vector to start from."""
        return self.params.pack(self.initial)

    def mean(self, statistics: FlatTensors, params: Mapping[str, Tensor], batch: Any, examples: int) -> Tensor:
        """The statistics of all of a client's examples, by example."""
        return statistics.pack(self._task.statistics(params, batch)).div_(examples)

    def move(self, base: Tensor, total: Mapping[str, Tensor], number: int) -> None:
        """Compute new parameters from the total of round `number`."""
        after = self.params.pack(self._task.update(self.params.unpack(base), total))
        if not bool(torch.isfinite(after).all()):
            bad = [name for name, value in self.params.unpack(after).items() if not bool(torch.isfinite(value).all())]
            raise NonFiniteError(
                f"parameter {bad[0]!r} became NaN or infinite in round {number}. The last checkpoint is from before."
            )
        base.copy_(after)

    def score(self, params: Mapping[str, Tensor], data: Dataset[Any]) -> float:
        """The score of parameters on all examples at once."""
        batches = loader_over(data, size_of(data), self._task.collate, shuffle=False)
        return float(self._task.score(params, batches))


class StatisticsLearner(Learner):
    """Clients sum the statistics of an `IterativeTask` over their data.

    A client sends its sums divided by its examples, so that a mean by examples is the mean over the cohort's examples.
    That, times the examples of all clients, is the total from which the task computes new parameters: exact if all
    clients take part, else an estimate.
    """

    def __init__(self, task: IterativeTask, team: Team, examples: Examples, parts: ClientParts) -> None:
        self._task, self._team = task, team
        self._all = int(parts.sizes.sum())
        self._steps = IterativeModel(task)
        self._load = examples
        probe = task.statistics(self._steps.initial, self._batch(parts.part(int(np.flatnonzero(parts.sizes)[0]))[:1]))
        self._statistics = FlatTensors(probe, "the statistics")
        layout = UpdateLayout(self._statistics.size, self._statistics.size, torch.float64)
        strategy = team.strategy
        self.path = UpdatePath(
            layout,
            update_filters(strategy, layout, team.seed),
            aggregation(strategy, layout, team.seed),
            self._steps.params.size * torch.float64.itemsize,
        )
        self.keeps_state = self.path.keeps_state
        self.model = GlobalModel(self._steps.first, {"aggregation": self.path.aggregation})
        self._at: tuple[int, dict[str, Tensor]] = (-1, {})

    def _batch(self, indices: Any) -> Any:
        return on_device(self._load(indices), self._team.device)

    def result(self, visit: Visit, base: Tensor, state: ClientState | None) -> LocalResult:
        """The statistics of all of the client's examples, by example."""
        del state
        if self._at[0] != visit.number:
            self._at = visit.number, self._steps.params.unpack(base)
        examples = len(visit.indices)
        mean = self._steps.mean(self._statistics, self._at[1], self._batch(visit.indices), examples)
        return LocalResult(mean, None, float("nan"), examples)

    def move(self, base: Tensor, mean: Tensor, extra: Tensor | None) -> None:
        """Compute new parameters from the total."""
        del extra
        self._steps.move(base, self._statistics.unpack(mean * self._all), self._team.step + 1)

    def round_done(self) -> None:
        """Nothing goes by rounds."""

    def scorer(self, data: Dataset[Any]) -> Callable[[], float]:
        """Scores the global parameters on all examples at once."""
        batches = list(loader_over(data, size_of(data), self._task.collate, shuffle=False))
        return lambda: float(self._task.score(self.trained(), batches))

    def trained(self) -> dict[str, Tensor]:
        """The global parameters by name."""
        return self._steps.params.unpack(self.model.base)
