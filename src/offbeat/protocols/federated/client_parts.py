"""Which examples each client has: dealt out in equal, skewed or uneven parts, or as the data says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import DataError
from offbeat.limits import SIMULATED_WORKERS, whole
from offbeat.protocols.partition import Indices, dirichlet_owners, mixed

HELD: Final = 0xC0441  # Which of a seed's streams of random numbers this is; see also `sampling`.


@dataclass(frozen=True, eq=False)
class ClientParts:
    """The parts of all clients, in two arrays: some parts may be empty."""

    order: Indices
    """The indices of all examples, those of client 0 first."""
    offsets: Indices
    """Where each client's examples begin in `order`, and at last where they end: one more than there are clients."""
    names: tuple[str, ...] = ()
    """What the data calls each client; empty: clients have numbers only."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Indices:
        """Number of examples of each client."""
        return np.diff(self.offsets)

    def part(self, client: int) -> Indices:
        """The indices of a client's examples."""
        return self.order[self.offsets[client] : self.offsets[client + 1]]


def held_out(parts: ClientParts, share: float, seed: int) -> tuple[ClientParts, ClientParts]:
    """What remains of each client's examples, and a random share of them that is held out.

    At least one example is held out and one remains, if a client has two; of a single one nothing is held out.
    """
    sizes = parts.sizes
    counts = np.where(sizes > 1, np.clip(np.floor(sizes * share + 0.5), 1, np.maximum(sizes - 1, 1)), 0)
    owners = np.repeat(np.arange(len(parts)), sizes)
    chance = np.random.default_rng(mixed(seed, HELD, len(parts))).random(len(parts.order))
    ranks = np.empty(len(owners), np.int64)
    # By client and then by chance: the place in this order, less that of the client's first, is its rank.
    ranks[np.lexsort((chance, owners))] = np.arange(len(owners)) - parts.offsets[owners]
    held = ranks < counts[owners]
    return _chosen(parts, ~held, owners), _chosen(parts, held, owners)


def _chosen(parts: ClientParts, chosen: NDArray[np.bool_], owners: Indices) -> ClientParts:
    """The chosen examples of each client, in their order."""
    sizes = np.bincount(owners[chosen], minlength=len(parts))
    return ClientParts(parts.order[chosen], np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), parts.names)


def iid(examples: int, clients: int, seed: int) -> ClientParts:
    """Shuffled, and dealt out in parts that differ by one example at most."""
    _check(clients)
    return ClientParts(_shuffled(examples, clients, seed), _even(examples, clients))


def dirichlet(labels: Sequence[int] | NDArray[np.int64], clients: int, alpha: float, seed: int) -> ClientParts:
    """Skewed by label, as `partition.dirichlet` has it; clients may be left without examples."""
    _check(clients)
    return _by_owner(dirichlet_owners(labels, clients, alpha, seed), clients)


def shards(labels: Sequence[int] | NDArray[np.int64], clients: int, labels_each: int, seed: int) -> ClientParts:
    """Sorted by label, cut into equal shards, of which each client gets a few at random (McMahan et al. 2017).

    With two each, as in the paper, most clients have examples of two labels.
    """
    _check(clients)
    whole("labels", labels_each, SIMULATED_WORKERS)
    known = np.asarray(labels)
    count = clients * labels_each
    if count > len(known):
        raise DataError(
            f"shards(labels={labels_each}) needs {count:,} shards for {clients:,} clients, but there are only "
            f"{len(known):,} examples. Use fewer clients or labels."
        )
    by_label = np.argsort(known, kind="stable").astype(np.int64)
    cuts = _even(len(known), count)
    dealt = np.random.default_rng(mixed(seed, clients)).permutation(count)
    owners = np.empty(len(known), np.int64)
    owners[by_label] = np.repeat(dealt // labels_each, np.diff(cuts))
    return _by_owner(owners, clients)


def quantity(examples: int, clients: int, alpha: float, seed: int) -> ClientParts:
    """Uneven in size only: shares are drawn from Dirichlet(alpha), and each part is a random sample."""
    _check(clients)
    # The skew by label of examples that all have the same one.
    owners = dirichlet_owners(np.zeros(examples, np.int64), clients, alpha, seed)
    return _by_owner(owners, clients)


def by_client(clients: Sequence[Any] | NDArray[Any]) -> ClientParts:
    """As the data says: the client of each example, by any name. Clients are numbered in the order of their names."""
    names, owners = np.unique(np.asarray(clients), return_inverse=True)
    if not len(names):
        raise DataError("there are no examples, so there are no clients: give each example the name of its client.")
    _check(len(names))
    return _by_owner(owners.astype(np.int64), len(names), tuple(str(name) for name in names))


def by_size(sizes: Sequence[int], names: tuple[str, ...] = ()) -> ClientParts:
    """Consecutive examples, this many for each client."""
    _check(len(sizes))
    offsets = np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(np.int64)
    return ClientParts(np.arange(offsets[-1], dtype=np.int64), offsets, names)


def _check(clients: int) -> None:
    whole("clients", clients, SIMULATED_WORKERS)


def _shuffled(examples: int, clients: int, seed: int) -> Indices:
    return np.random.default_rng(mixed(seed, clients)).permutation(examples).astype(np.int64)


def _even(count: int, parts: int) -> Indices:
    """Where each of some parts begins, and the last one ends; lengths differ by one at most."""
    return (np.arange(parts + 1, dtype=np.int64) * count) // parts


def _by_owner(owners: Indices, clients: int, names: tuple[str, ...] = ()) -> ClientParts:
    """Parts from the client of each example."""
    order = np.argsort(owners, kind="stable").astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=clients))]).astype(np.int64)
    return ClientParts(order, offsets, names)
