"""Which examples each client of a run has: from the strategy's setting, or from the run's `--parts`."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, IterableDataset

from offbeat.errors import DataError
from offbeat.protocols.federated import client_parts
from offbeat.protocols.federated.client_parts import ClientParts
from offbeat.runtime.data.client_datasets import ClientDatasets
from offbeat.runtime.data.label_skew import Parts, labels_of
from offbeat.strategies.federated.clients import (
    ClientData,
    DirichletClients,
    LabelShards,
    QuantitySkew,
    TaskClients,
)
from offbeat.strategies.federated.strategy import Federated
from offbeat.task import IterativeTask, Task
from offbeat.worker.task_data import size_of


def divided(train: Dataset[Any], task: Task | IterativeTask, strategy: Federated, parts: str, seed: int) -> ClientParts:
    """The examples of each client."""
    if isinstance(train, IterableDataset):
        raise DataError(
            "federated gives every client examples of its own, and the training data is a stream, which cannot be "
            "divided beforehand. Use a map-style dataset."
        )
    count, clients, setting = size_of(train), strategy.clients, strategy.data
    alpha = Parts.parse(parts).alpha if setting is None else None
    if alpha is not None:
        setting = DirichletClients(alpha)
    if isinstance(train, ClientDatasets):
        return _own(train, strategy, setting)
    match setting:
        case DirichletClients():
            divided = client_parts.dirichlet(labels_of(train), clients, setting.alpha, seed)
        case LabelShards():
            divided = client_parts.shards(labels_of(train), clients, setting.labels, seed)
        case QuantitySkew():
            divided = client_parts.quantity(count, clients, setting.alpha, seed)
        case TaskClients():
            divided = client_parts.by_client([task.client_of(train[index]) for index in range(count)])
            _check_number(len(divided), clients)
        case _:
            divided = client_parts.iid(count, clients, seed)
    return divided


def _own(train: ClientDatasets, strategy: Federated, setting: ClientData | None) -> ClientParts:
    """Each client's own dataset."""
    if setting is not None and not isinstance(setting, TaskClients):
        raise DataError(
            f"the training data has a dataset of each client, and data={setting} would divide it anew. Omit it, and "
            f"--parts."
        )
    _check_number(len(train.sizes), strategy.clients)
    return client_parts.by_size(train.sizes, train.names)


def _check_number(present: int, clients: int) -> None:
    if present != clients:
        raise DataError(
            f"the task's examples are those of {present:,} clients, and federated(clients={clients}) says otherwise. "
            f"Say clients={present}."
        )


def classes_of(train: Dataset[Any]) -> int:
    """The number of labels, which are counted from 0."""
    return int(labels_of(train).max()) + 1
