"""How training data is divided: evenly at random, or skewed by label."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from offbeat.errors import DataError


@dataclass(frozen=True)
class Parts:
    """How training data is divided over the workers."""

    alpha: float | None = None
    """None: every global batch is divided evenly. A number: labels are spread by Dirichlet(alpha)."""

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise DataError(f"dirichlet({self.alpha}) makes no sense: alpha must be a number above 0.")

    def __str__(self) -> str:
        return "iid" if self.alpha is None else f"dirichlet({self.alpha:.15g})"

    @classmethod
    def parse(cls, text: str) -> Parts:
        """Read `iid` or `dirichlet(0.3)`."""
        if text.strip() == "iid":
            return cls()
        match = re.fullmatch(r"\s*dirichlet\(\s*([^()\s]+)\s*\)\s*", text)
        with suppress(ValueError):
            if match:
                return cls(float(match[1]))
        raise DataError(
            f"{text!r} is not a way to divide data. Use `iid` or `dirichlet(alpha)`, for example dirichlet(0.3)."
        )


def labels_of(dataset: Dataset[Any]) -> NDArray[np.int64]:
    """The label of every example of a map-style dataset."""
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    count = len(dataset)  # pyright: ignore[reportArgumentType]
    for name in ("targets", "labels"):
        labels = getattr(dataset, name, None)
        # Of another length it is something else, such as the names of the classes.
        if isinstance(labels, Tensor | np.ndarray | Sequence) and len(labels) == count and not isinstance(labels, str):
            return _as_labels(labels)
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        return _as_labels(dataset.tensors[1])
    return _as_labels([_label_of_example(dataset[i]) for i in range(count)])


def _label_of_example(example: Any) -> Any:
    if isinstance(example, tuple | list) and len(example) > 1:
        return example[1]
    raise DataError(
        "dirichlet(alpha) divides data by label, but the examples are not pairs (input, label). "
        "Give the dataset a `targets` attribute, or use iid parts."
    )


def _as_labels(values: Any) -> NDArray[np.int64]:
    labels = np.asarray(values)
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise DataError(
            f"dirichlet(alpha) divides data by label, but these labels are {labels.dtype} of shape {labels.shape}, "
            f"not one integer per example. Use iid parts, or give the dataset integer `targets`."
        )
    return labels.astype(np.int64)
