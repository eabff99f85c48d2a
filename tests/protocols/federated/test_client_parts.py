"""Which client has which examples: every example has one owner, and skew is what was asked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import DataError, UsageError
from offbeat.protocols.federated import client_parts
from offbeat.protocols.federated.client_parts import ClientParts

LABELS = np.arange(600) % 10
WAYS: dict[str, Callable[[int, int], ClientParts]] = {
    "iid": lambda clients, seed: client_parts.iid(600, clients, seed),
    "dirichlet": lambda clients, seed: client_parts.dirichlet(LABELS, clients, 0.1, seed),
    "shards": lambda clients, seed: client_parts.shards(LABELS, clients, 2, seed),
    "quantity": lambda clients, seed: client_parts.quantity(600, clients, 0.2, seed),
}


@pytest.mark.parametrize("way", WAYS)
@given(clients=st.integers(1, 300), seed=st.integers(0, 2**40))
def test_every_example_has_one_owner(way: str, clients: int, seed: int) -> None:
    parts = WAYS[way](clients, seed)
    assert len(parts) == clients
    assert sorted(parts.order.tolist()) == list(range(600))
    joined = np.concatenate([parts.part(client) for client in range(clients)])
    assert np.array_equal(joined, parts.order)
    assert parts.sizes.sum() == 600
    assert np.array_equal(WAYS[way](clients, seed).order, parts.order)


@pytest.mark.parametrize("way", WAYS)
def test_another_seed_gives_other_parts(way: str) -> None:
    assert not np.array_equal(WAYS[way](20, 1).order, WAYS[way](20, 2).order)


def test_iid_parts_differ_by_one_example_and_there_may_be_more_clients_than_examples() -> None:
    assert set(client_parts.iid(605, 100, 0).sizes.tolist()) == {6, 7}
    sizes = client_parts.iid(7, 100, 0).sizes
    assert (sizes.sum(), sizes.max()) == (7, 1)


def test_two_shards_give_most_clients_two_labels() -> None:
    parts = client_parts.shards(LABELS, 30, 2, 0)
    assert set(parts.sizes.tolist()) == {20}
    labels = [len(set(LABELS[parts.part(client)].tolist())) for client in range(30)]
    assert max(labels) <= 2
    assert labels.count(2) > 15


def test_a_small_alpha_gives_few_labels_and_a_large_one_nearly_all() -> None:
    def labels(alpha: float) -> float:
        parts = client_parts.dirichlet(LABELS, 20, alpha, 0)
        return float(np.mean([len(set(LABELS[parts.part(client)].tolist())) for client in range(20)]))

    assert labels(0.05) < 3 < 9 < labels(100)


def test_quantity_skew_is_in_size_only() -> None:
    parts = client_parts.quantity(60_000, 20, 0.3, 1)
    labels = np.arange(60_000) % 2
    largest = int(np.argmax(parts.sizes))
    assert parts.sizes.max() > 4 * np.median(parts.sizes)
    assert abs(labels[parts.part(largest)].mean() - 0.5) < 0.05


def test_clients_of_the_data_are_numbered_in_the_order_of_their_names() -> None:
    parts = client_parts.by_client(["south", "north", "south", "east"])
    assert parts.names == ("east", "north", "south")
    assert [parts.part(client).tolist() for client in range(3)] == [[3], [1], [0, 2]]


def test_consecutive_parts_may_be_empty() -> None:
    parts = client_parts.by_size([2, 0, 3], ("a", "b", "c"))
    assert [parts.part(client).tolist() for client in range(3)] == [[0, 1], [], [2, 3, 4]]


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: client_parts.iid(10, 0, 0), UsageError, "clients"),
        (lambda: client_parts.shards(LABELS, 400, 2, 0), DataError, "800 shards"),
        (lambda: client_parts.shards(LABELS, 4, 0, 0), UsageError, "labels"),
        (lambda: client_parts.dirichlet(LABELS, 4, 0.0, 0), DataError, "alpha"),
        (lambda: client_parts.by_client([]), DataError, "no examples"),
        (lambda: client_parts.iid(10, 10**12, 0), UsageError, "clients"),
    ],
)
def test_parts_that_cannot_be_are_refused(make: Callable[[], object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make()
