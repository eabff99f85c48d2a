"""The data of a task, as loaders, and batches on a device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from offbeat.errors import TaskError
from offbeat.task import Data, IterativeTask, Task


def loader_over(
    data: Dataset[Any], batch: int, collate: Callable[[list[Any]], Any] | None, shuffle: bool
) -> DataLoader[Any]:
    """A plain loader."""
    streamed = isinstance(data, IterableDataset)
    return DataLoader(data, batch_size=batch, shuffle=None if streamed else shuffle, collate_fn=collate)


def size_of(data: Dataset[Any]) -> int:
    """Number of examples."""
    try:
        return len(cast("Any", data))
    except TypeError:
        return sys.maxsize  # A stream is as large as needed.


def data_of(task: Task | IterativeTask) -> Data:
    """The three parts of a task's data."""
    data = task.data()
    if not isinstance(data, Data):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TaskError(
            f"{type(task).__name__}.data() is a {type(data).__name__}. Return offbeat.Data(train, validation, test)."
        )
    return data


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: on_device(value, device) for key, value in cast("Mapping[Any, Any]", batch).items()}
    if isinstance(batch, list | tuple):
        moved = [on_device(value, device) for value in cast("list[Any]", batch)]
        return moved if isinstance(batch, list) else tuple(moved)
    return batch
