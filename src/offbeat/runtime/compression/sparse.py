"""Some of the numbers, with their indices: the largest ones, or all beyond a magnitude.

A letter holds the indices in rising order, then the values as an inner coder writes them.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017); Stich, Cordonnier and Jaggi,
"Sparsified SGD with Memory" (2018).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import RunError
from offbeat.protocols.compression import COUNT_BYTES, INDEX_BYTES, LARGEST_ROW, kept_of
from offbeat.runtime.compression.coder import PIECE, Coder, PlainCoder, expect, numbers, row_of

Indices = NDArray[np.int64]
_SAMPLE = 1 << 16
"""Numbers that are looked at to guess how large the largest are."""


class SparseCoder(Coder):
    """What coders that send some of the numbers have in common."""

    def __init__(self, inner: Coder | None = None) -> None:
        self._inner = PlainCoder() if inner is None else inner

    @abstractmethod
    def select(self, row: NDArray[Any]) -> Indices:
        """Which numbers are sent, in rising order."""

    def head(self, kept: int) -> list[Tensor]:
        """What stands before the indices; nothing, if the reader knows how many there are."""
        del kept
        return []

    @abstractmethod
    def read_head(self, letter: Tensor, count: int) -> tuple[int, Tensor]:
        """How many of `count` numbers a letter holds, and the letter without its head."""

    def encode(self, row: Tensor) -> Tensor:
        """Indices, then values."""
        if row.numel() > LARGEST_ROW:
            raise RunError(
                f"a row of {row.numel():,} numbers is too long: indices have 32 bits. Compress it otherwise."
            )
        values = row.detach().numpy()
        chosen = self.select(values)
        indices = torch.from_numpy(chosen.astype(np.int32).view(np.uint8))
        letter = self._inner.encode(row_of(values[chosen]))
        return torch.cat([*self.head(len(chosen)), indices, letter])

    def add(self, letter: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add the values at their indices."""
        kept, letter = self.read_head(letter, out.numel())
        cut = kept * INDEX_BYTES
        if cut > letter.numel():
            expect(letter, cut)
        indices = numbers(letter[:cut], torch.int32).numpy()
        _check(indices, out.numel())
        values = torch.zeros(kept, dtype=out.dtype)
        self._inner.add(letter[cut:], values, weight)
        out.numpy()[indices] += values.numpy()

    def state_dict(self) -> dict[str, Any]:
        """The inner coder's."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """For the inner coder."""
        self._inner.load_state_dict(state)


class Largest(SparseCoder):
    """A fraction of the numbers: the largest by magnitude."""

    def __init__(self, fraction: float, inner: Coder | None = None) -> None:
        super().__init__(inner)
        self._fraction = fraction

    def select(self, row: NDArray[Any]) -> Indices:
        """Exactly as many as are asked for."""
        return largest(row, kept_of(len(row), self._fraction))

    def read_head(self, letter: Tensor, count: int) -> tuple[int, Tensor]:
        """As many as the row's length says."""
        return kept_of(count, self._fraction), letter


class Beyond(SparseCoder):
    """All numbers beyond a magnitude, however many there are."""

    fixed = False

    def __init__(self, above: float, inner: Coder | None = None) -> None:
        super().__init__(inner)
        self._above = above

    def select(self, row: NDArray[Any]) -> Indices:
        """Numbers that are NaN are sent, too: somebody must see them."""
        return _beyond(row, self._above, also_equal=False)

    def head(self, kept: int) -> list[Tensor]:
        """How many there are."""
        return [torch.tensor([kept], dtype=torch.int64).view(torch.uint8)]

    def read_head(self, letter: Tensor, count: int) -> tuple[int, Tensor]:
        """A count that can be true."""
        if letter.numel() < COUNT_BYTES:
            expect(letter, COUNT_BYTES)
        kept = int(numbers(letter[:COUNT_BYTES], torch.int64))
        if not 0 <= kept <= count:
            raise RunError(f"a letter says that it has {kept:,} of {count:,} numbers, which cannot be.")
        return kept, letter[COUNT_BYTES:]


def largest(row: NDArray[Any], kept: int) -> Indices:
    """Indices of the `kept` largest by magnitude, in rising order, without sorting the row.

    A sample says which magnitude somewhat too many reach. Those that reach it are found in one pass, and the surplus is
    left out. If the sample has deceived, a lower magnitude is tried.
    """
    count = len(row)
    if kept >= count:
        return np.arange(count)
    sample = np.abs(row[:: max(1, count // _SAMPLE) | 1])
    expected = kept / count * len(sample)
    wanted = math.ceil(expected + 4 * math.sqrt(expected)) + 1
    found: Indices = np.empty(0, np.int64)
    while len(found) < kept and wanted < len(sample):
        magnitude = float(np.partition(sample, -wanted)[-wanted])
        if not magnitude > 0:
            break
        found = _beyond(row, magnitude, also_equal=True)
        wanted *= 4
    return _fallen_back(row, kept) if len(found) < kept else _trimmed(row, found, kept)


def _trimmed(row: NDArray[Any], found: Indices, kept: int) -> Indices:
    """The `kept` largest of those found; NaN counts as largest."""
    surplus = len(found) - kept
    if not surplus:
        return found
    chosen = np.argpartition(np.abs(row[found]), surplus)[surplus:]
    chosen.sort()
    return found[chosen]


def _fallen_back(row: NDArray[Any], kept: int) -> Indices:
    """Where most numbers are zero: all others, and as many zeros as are missing; small rows, too."""
    found = np.flatnonzero(row)
    if len(found) >= kept:
        return _trimmed(row, found, kept)
    zeros = np.flatnonzero(row[: 2 * kept] == 0)[: kept - len(found)]
    return np.sort(np.concatenate([found, zeros]))


def _beyond(row: NDArray[Any], magnitude: float, also_equal: bool) -> Indices:
    """Indices of all that are not below a magnitude (or not even equal to it), piece by piece; NaN is never below."""
    below = np.less if also_equal else np.less_equal
    size = min(PIECE, max(1, len(row)))
    held, small = np.empty(size, row.dtype), np.empty(size, np.bool_)
    bound = row.dtype.type(magnitude)
    found: list[Indices] = []
    for start in range(0, len(row), size):
        piece = row[start : start + size]
        magnitudes, flags = held[: len(piece)], small[: len(piece)]
        np.abs(piece, out=magnitudes)
        below(magnitudes, bound, out=flags)
        np.logical_not(flags, out=flags)
        found.append(np.flatnonzero(flags) + start)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _check(indices: NDArray[np.int32], count: int) -> None:
    """Refuse indices that are not in rising order, or outside of the row."""
    if not len(indices):
        return
    if indices[0] < 0 or indices[-1] >= count or not (indices[1:] > indices[:-1]).all():
        raise RunError(
            f"a letter has indices that do not fit a row of {count:,} numbers, or are not in order. It was damaged, or "
            f"comes from another model."
        )
