"""Finished batches cut along their first dimension, whatever they are made of."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import DataError
from offbeat.runtime.data.batch_slicing import cut, examples_in


class Sample(NamedTuple):
    x: torch.Tensor
    names: list[str]


class Encoding(UserDict[str, Any]):
    """A mapping with a method of its own, as tokenizers give."""

    def shout(self) -> str:
        return "here"


@given(st.integers(1, 40), st.integers(1, 9))
def test_slices_put_together_are_the_batch_and_empty_ones_hold_one_example(count: int, size: int) -> None:
    whole = torch.arange(count)
    pieces = [cut((whole, whole * 2), rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([content[0][:examples] for content, examples, _ in pieces]), whole)
    for content, examples, total in pieces:
        assert total == count
        assert len(content[0]) == len(content[1]) == (examples or 1)
        assert torch.equal(content[1], content[0] * 2)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.arange(4), torch.tensor([2, 3])),
        ([torch.arange(4), 0.5, None, "text"], [torch.tensor([2, 3]), 0.5, None, "text"]),
        ((torch.arange(4), torch.tensor(7)), (torch.tensor([2, 3]), torch.tensor(7))),
        ({"x": np.arange(4), "names": ["a", "b", "c", "d"]}, {"x": np.array([2, 3]), "names": ["c", "d"]}),
        ((torch.arange(4), ("a", "b", "c", "d")), (torch.tensor([2, 3]), ("c", "d"))),
        ((torch.arange(4), ["a", "b"]), (torch.tensor([2, 3]), ["a", "b"])),
        (Sample(torch.arange(4), ["a", "b", "c", "d"]), Sample(torch.tensor([2, 3]), ["c", "d"])),
        (Encoding(x=torch.arange(4)), Encoding(x=torch.tensor([2, 3]))),
        (OrderedDict(x=torch.arange(4)), OrderedDict(x=torch.tensor([2, 3]))),
        (MappingProxyType({"x": torch.arange(4)}), {"x": torch.tensor([2, 3])}),
        ([{"deep": (torch.arange(8).view(4, 2),)}], [{"deep": (torch.tensor([[4, 5], [6, 7]]),)}]),
    ],
)
def test_every_kind_of_batch_keeps_its_form(batch: Any, expected: Any) -> None:
    before = repr(batch)
    content, examples, total = cut(batch, 1, 2)
    assert (examples, total) == (2, 4)
    assert type(content) is type(expected)
    assert repr(content) == repr(expected)
    assert repr(batch) == before, "the whole batch is left as it was"


def test_a_mapping_with_methods_keeps_them() -> None:
    assert cut(Encoding(x=torch.arange(4)), 0, 2)[0].shout() == "here"


@pytest.mark.parametrize("batch", [(torch.rand(3), torch.rand(4)), "text", {"x": torch.tensor(1)}, ["a", "b"], 5])
def test_what_has_no_common_first_dimension_is_refused_only_if_it_must_be_divided(batch: Any) -> None:
    assert examples_in(batch) is None
    with pytest.raises(DataError, match=r"type \w+ cannot be divided over 2 workers"):
        cut(batch, 0, 2)
    content, examples, total = cut(batch, 0, 1)
    assert content is batch
    assert (examples, total) == (1, 1)
