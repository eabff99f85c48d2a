"""Batches as memory: what goes in comes out, of the same types, and what is not plain data is refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from offbeat.errors import DataError
from offbeat.runtime.data_servers.batch_format import Memory, read, written
from offbeat.runtime.data_servers.room import BatchRoom
from offbeat.runtime.data_servers.sources import unreadable


def there_and_back(batch: Any) -> Any:
    memory = written(batch, lambda nbytes: np.full(nbytes, 255, dtype=np.uint8))
    memory.flags.writeable = False  # As borrowed memory is.
    return read(memory)


TENSORS = [
    torch.arange(12.0).reshape(3, 4),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.tensor(3),
    torch.zeros(0, 5, dtype=torch.float64),
    torch.tensor([True, False]),
    torch.arange(5).to(torch.bfloat16),
    torch.complex(torch.ones(2), -torch.ones(2)).conj(),
    torch.arange(10, dtype=torch.uint8)[3:7],
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}")
def test_a_tensor_comes_back_with_its_bits_at_an_aligned_address(tensor: torch.Tensor) -> None:
    (again, _) = there_and_back([tensor, torch.ones(3)])
    assert again.dtype == tensor.dtype
    assert torch.equal(again, tensor)
    assert not again.numel() or again.data_ptr() % 64 == 0
    again.zero_()  # Its own memory.


def test_nested_batches_keep_their_types() -> None:
    batch = {
        "pairs": [(torch.ones(2), "left"), (torch.zeros(2), "right")],
        3: (None, True, 2**63 - 1, -1.5, b"raw"),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(0.1),
    }
    again = there_and_back(batch)
    assert list(again) == list(batch)
    assert torch.equal(again["pairs"][1][0], torch.zeros(2))
    assert again["pairs"][0][1] == "left"
    assert again[3] == batch[3]
    assert again["array"].dtype == np.int16
    assert again["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert type(again["scalar"]) is np.float32


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([{1, 2}], r"the batch\[0\] is a builtins.set"),
        ({"x": OrderedDict()}, r"the batch\['x'\] is a collections.OrderedDict"),
        (np.array([object()]), "an array of object"),
        (torch.eye(2).to_sparse(), "sparse"),
        ({(1, 2): 3}, r"has the key \(1, 2\)"),
        (2**70, "more than 64 bits"),
    ],
)
def test_what_would_need_a_pickle_is_refused_with_its_place(batch: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        there_and_back(batch)


def test_memory_is_used_again_and_lent_once() -> None:
    lent: list[Any] = []
    room = BatchRoom(lent.append)
    first: Memory = room.allocate(70_000)
    room.free(first)
    second = room.allocate(100_000)  # The same size of segment.
    assert second.ctypes.data == first.ctypes.data
    room.allocate(100_000)
    assert len(lent) == 2
    room.free(first)  # Freed already: nothing happens.
    assert room.allocate(70_000).ctypes.data != second.ctypes.data


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Unindexed:
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ([1, 2], "a list hands out finished batches"),
        (DataLoader(Rows(), batch_size=None), "batch_size=None its stream yields finished batches"),
        (DataLoader([1, 2], batch_size=None), "batch_size=None each example is a finished batch"),
        (DataLoader(Unindexed(), batch_size=2), "a Unindexed, cannot be indexed"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_loaders_that_cannot_be_read_elsewhere_say_why(loader: Any, words: str) -> None:
    assert words in (unreadable(loader) or "")
    assert unreadable(DataLoader([1, 2], batch_size=2)) is None  # pyright: ignore[reportArgumentType]
