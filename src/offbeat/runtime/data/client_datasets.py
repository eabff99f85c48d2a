"""Training data that is divided over clients beforehand: a dataset of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from offbeat.errors import DataError


class ClientDatasets(ConcatDataset[Any]):
    """The datasets of all clients, one after the other; some may be empty.

    Use it as a task's training data: under `federated` each client has its own dataset, and other strategies train on
    all examples.

    Args:
        datasets: A list, of which client 0 has the first; or by the clients' names, in that order.

    """

    def __init__(self, datasets: Sequence[Dataset[Any]] | Mapping[str, Dataset[Any]]) -> None:
        named = isinstance(datasets, Mapping)
        parts = list(datasets.values() if named else datasets)
        if not parts:
            raise DataError("ClientDatasets has no dataset, so there are no clients. Give each client one.")
        if any(isinstance(part, IterableDataset) for part in parts):
            raise DataError(
                "ClientDatasets has a stream, and a client passes over its data again and again. Use map-style "
                "datasets."
            )
        super().__init__(parts)
        self.names: tuple[str, ...] = tuple(datasets) if named else ()
        """What clients are called; empty: they have numbers only."""
        self.sizes: list[int] = [len(cast("Any", part)) for part in parts]
        """Examples of each client."""
