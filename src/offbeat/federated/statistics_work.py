"""What a client of an iterative task does with its data: it sums statistics of all its examples, in the background."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from offbeat.errors import DataError, TaskError
from offbeat.federated.background_work import AbandonedError, BackgroundWork, rules_from
from offbeat.federated.client_work import DataSource
from offbeat.federated.description import TensorForm, bad_statistics
from offbeat.federated.vectors import packed, unpacked
from offbeat.protocols.federated.messages import (
    Finish,
    Goodbye,
    RoundTask,
    Settled,
    Trained,
    UpdateSent,
    Welcome,
)
from offbeat.protocols.machine import Payload
from offbeat.runtime.federated.local_training import examples_of
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.task import Data, IterativeTask
from offbeat.worker.federated_statistics import FlatTensors, IterativeModel
from offbeat.worker.model_file import write_tensors
from offbeat.worker.task_data import size_of


def first_statistics(task: IterativeTask, model: IterativeModel, train: Dataset[Any]) -> dict[str, Tensor]:
    """The statistics of a client's first example, which say names, types and shapes; empty without an example."""
    if not size_of(train):
        return {}
    example = examples_of(train, task.collate)(np.arange(1))
    statistics = dict(task.statistics(model.initial, example))
    FlatTensors(statistics, "the statistics")  # Refuses complex ones.
    if not statistics:
        raise TaskError(f"{type(task).__name__}.statistics() returns nothing, so there is nothing to sum.")
    if why := bad_statistics({name: TensorForm.of(value) for name, value in statistics.items()}):
        raise TaskError(f"{type(task).__name__} cannot be deployed: {why}.")
    return statistics


@dataclass
class StatisticsWork(BackgroundWork):
    """A client's data, and the sums over it."""

    task: IterativeTask
    model: IterativeModel
    statistics: FlatTensors
    """Those that it announced when it joined."""
    source: DataSource
    folder: Path
    report: Callable[[str], None]
    """Shows a line."""
    _data: Data | None = field(default=None, init=False)
    _batch: Any = field(default=None, init=False)
    _client: int = field(default=-1, init=False)

    @property
    def model_bytes(self) -> int:
        """Size of the parameters."""
        return self.model.params.size * torch.float64.itemsize

    def _prepare(self, welcome: Welcome) -> int:
        rules = rules_from(welcome)
        rules.check_iterative(type(self.task).__name__)
        self._data = self.source(rules, welcome.seed).data
        examples = size_of(self._data.train)
        if examples:
            self._batch = examples_of(self._data.train, self.task.collate)(np.arange(examples, dtype=np.int64))
        self.report(f"joined as client {welcome.client}, with {examples:,} examples: {welcome.strategy}")
        return examples

    def _train(self, task: RoundTask, model: Payload) -> Trained:
        if task.number in self._abandoned:
            raise AbandonedError
        params, data = self._params(model), self._ready()
        score, scored = self._score(params) if task.score else (None, 0)
        self.report(f"round {task.number}: summing" + ("" if score is None else f" (score {score:.4g})"))
        examples = size_of(data.train)
        mean = self.model.mean(self.statistics, params, self._batch, examples)
        return Trained(UpdateSent(task.number, math.nan, examples, score, scored, task.version), packed([mean]))

    def _keep(self, finish: Finish, model: Payload) -> Goodbye:
        params = self._params(model)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_tensors(params, self.folder / MODEL_FILE)
        score, scored = self._score(params) if finish.score else (None, 0)
        words = "" if score is None else f": score {score:.4g} on own data"
        self.report(f"the last round is over{words}")
        return Goodbye(score, scored)

    def _conclude(self, settled: Settled) -> None:
        self.report(f"round {settled.number}: {settled.fate}" + (f": {settled.why}" if settled.why else ""))

    def _ready(self) -> Data:
        if self._data is None:
            raise DataError("the server has sent a task before this client was ready.")
        return self._data

    def _params(self, model: Payload) -> dict[str, Tensor]:
        params = self.model.params
        return params.unpack(unpacked(model, 1, params.size, torch.float64)[0])

    def _score(self, params: dict[str, Tensor]) -> tuple[float | None, int]:
        data = self._ready().validation
        count = size_of(data)
        if not count:
            return None, 0
        self.last_score = self.model.score(params, data)
        return self.last_score, count
