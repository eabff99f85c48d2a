"""How a user asks for parts, and where the labels come from that skewed parts go by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

from offbeat.errors import DataError
from offbeat.runtime.data.label_skew import Parts, labels_of
from offbeat.runtime.data.loaders import Share, divide

NOBODY = cast("Any", None)
"""A feed that is never used: the refusal comes before any data."""


class Pairs(Dataset[Any]):
    """Examples (input, label) of any kind."""

    def __init__(self, held: list[Any], **attributes: Any) -> None:
        self.held = held
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), self.held[index]


@pytest.mark.parametrize(
    ("text", "alpha"), [("iid", None), (" iid ", None), ("dirichlet(0.3)", 0.3), ("dirichlet( 1e2 )", 100.0)]
)
def test_parts_are_read_as_they_are_written(text: str, alpha: float | None) -> None:
    assert Parts.parse(text).alpha == alpha


@given(st.none() | st.floats(1e-5, 1e5).map(lambda x: round(x, 9)))
def test_parts_written_and_read_again_are_the_same(alpha: float | None) -> None:
    assert Parts.parse(str(Parts(alpha))) == Parts(alpha)


@pytest.mark.parametrize("text", ["", "even", "dirichlet", "dirichlet()", "dirichlet(x)", "dirichlet(1", "iid(3)"])
def test_what_is_no_way_to_divide_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(DataError, match=r"is not a way to divide data\. Use `iid` or `dirichlet\(alpha\)`"):
        Parts.parse(text)


@pytest.mark.parametrize("alpha", ["0", "-1", "nan", "inf"])
def test_an_alpha_that_is_no_positive_number_is_refused(alpha: str) -> None:
    with pytest.raises(DataError, match="makes no sense: alpha must be a number above 0"):
        Parts.parse(f"dirichlet({alpha})")


@pytest.mark.parametrize(
    "dataset",
    [
        Pairs([2, 0, 1]),
        Pairs([torch.tensor(2), torch.tensor(0), torch.tensor(1)]),
        Pairs([9, 9, 9], targets=[2, 0, 1]),
        Pairs([9, 9, 9], labels=torch.tensor([2, 0, 1])),
        Pairs([9, 9, 9], targets=np.array([2, 0, 1], dtype=np.uint8)),
        Pairs([2, 0, 1], labels=["cat", "dog"]),
        Pairs([2, 0, 1], labels=[0, 1, 2, 3]),
        Pairs([2, 0, 1], labels="cat"),
        TensorDataset(torch.zeros(3), torch.tensor([2, 0, 1])),
        Subset(Pairs([7, 1, 0, 2]), [3, 2, 1]),
        Subset(Subset(TensorDataset(torch.zeros(4), torch.tensor([7, 1, 0, 2])), [3, 2, 1]), [0, 1, 2]),
    ],
)
def test_labels_are_found_wherever_a_dataset_keeps_them(dataset: Dataset[Any]) -> None:
    found = labels_of(dataset)
    assert found.tolist() == [2, 0, 1]
    assert found.dtype == np.int64


def test_an_empty_subset_has_no_labels() -> None:
    assert labels_of(Subset(Pairs([1, 2]), [])).tolist() == []


@pytest.mark.parametrize("labels", [[0.5, 1.5], [[1, 2], [3, 4]], ["a", "b"]])
def test_labels_that_are_no_whole_numbers_are_refused(labels: list[Any]) -> None:
    with pytest.raises(DataError, match="not one integer per example"):
        labels_of(Pairs(labels))


def test_examples_without_a_label_are_refused() -> None:
    with pytest.raises(DataError, match=r"the examples are not pairs \(input, label\)"):
        labels_of(cast("Dataset[Any]", [torch.zeros(1)]))


class Stream(IterableDataset[Any]):
    """It has no labels beforehand."""

    def __iter__(self) -> Iterator[Any]:
        return iter([1, 2])


def _loaders() -> list[tuple[Any, str]]:
    data = Pairs([0, 1, 2])
    return [
        (DataLoader(data, 2, sampler=SubsetRandomSampler([0, 1])), "SubsetRandomSampler may skip examples"),
        (DataLoader(data, batch_sampler=[[0, 1], [2]]), "batch sampler of your own"),
        (DataLoader(Stream(), 2), "which a stream does not"),
    ]


@pytest.mark.parametrize("number", range(3))
def test_skewed_parts_are_refused_where_they_could_not_keep_to_the_users_loader(number: int) -> None:
    loader, reason = _loaders()[number]
    with pytest.raises(DataError, match=reason):
        divide(loader, [Share(0, 2, 5, 0)], NOBODY, Parts(0.5))
    divide(loader, [Share(0, 2, 5, 0)], NOBODY, Parts())
