"""A random order of rows that reads a table part by part, so that few parts are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch.utils.data import Sampler

from offbeat import limits
from offbeat.protocols.partition import Indices


def groups_of_rows(lengths: Sequence[int], buffer: int, seed: int) -> Iterator[Indices]:
    """The rows in random order: parts are shuffled, and then the rows of each group of parts with `buffer` rows."""
    chance = np.random.default_rng(seed)
    starts = [0, *accumulate(lengths)]
    group: list[Indices] = []
    held = 0
    for part in chance.permutation(len(lengths)):
        group.append(np.arange(starts[part], starts[part + 1], dtype=np.int64))
        held += lengths[part]
        if held >= buffer:
            yield chance.permutation(np.concatenate(group))
            group, held = [], 0
    if held:
        yield chance.permutation(np.concatenate(group))


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """A seed from torch's generator: the order follows from `torch.manual_seed`, and a checkpoint has it."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class PartSampler(Sampler[int]):
    """A sampler for `DataLoader(table, sampler=...)` that shuffles parts, and rows within `buffer` rows of parts.

    Args:
        lengths: Rows of each part: `table.part_lengths`.
        buffer: Rows that are shuffled together; the parts they are in should fit into the table's memory.
        generator: Where each pass draws its seed; None is torch's global one.

    """

    def __init__(self, lengths: Sequence[int], buffer: int = 10_000, generator: torch.Generator | None = None) -> None:
        limits.whole("buffer =", buffer, limits.COUNT)
        self._lengths, self._buffer, self.generator = list(lengths), buffer, generator

    def __len__(self) -> int:
        return sum(self._lengths)

    def __iter__(self) -> Iterator[int]:
        for group in groups_of_rows(self._lengths, self._buffer, drawn_seed(self.generator)):
            yield from group.tolist()
