"""Some of the numbers, with their indices: the largest ones, or all above a magnitude.

A payload holds the indices in ascending order, then the values as an inner coder encodes them.

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
"""Numbers sampled to estimate the magnitude of the largest."""


class SparseCoder(Coder):
    """Base of coders that send some of the numbers."""

    def __init__(self, inner: Coder | None = None) -> None:
        self._inner = PlainCoder() if inner is None else inner

    @abstractmethod
    def select(self, row: NDArray[Any]) -> Indices:
        """Indices of the numbers to send, in ascending order."""

    def head(self, kept: int) -> list[Tensor]:
        """Bytes before the indices; none if the reader knows how many indices there are."""
        del kept
        return []

    @abstractmethod
    def read_head(self, payload: Tensor, count: int) -> tuple[int, Tensor]:
        """How many of `count` numbers a payload holds, and the payload without its head."""

    def encode(self, row: Tensor) -> Tensor:
        """Indices, then values."""
        if row.numel() > LARGEST_ROW:
            raise RunError(
                f"a row of {row.numel():,} numbers is too long: indices have 32 bits. Use another compressor."
            )
        values = row.detach().numpy()
        chosen = self.select(values)
        indices = torch.from_numpy(chosen.astype(np.int32).view(np.uint8))
        return torch.cat([*self.head(len(chosen)), indices, self._inner.encode(row_of(values[chosen]))])

    def add(self, payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add the values at their indices."""
        kept, payload = self.read_head(payload, out.numel())
        cut = kept * INDEX_BYTES
        if cut > payload.numel():
            expect(payload, cut)
        indices = numbers(payload[:cut], torch.int32).numpy()
        _check(indices, out.numel())
        values = torch.zeros(kept, dtype=out.dtype)
        self._inner.add(payload[cut:], values, weight)
        out.numpy()[indices] += values.numpy()

    def state_dict(self) -> dict[str, Any]:
        """The inner coder's state."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the inner coder's state."""
        self._inner.load_state_dict(state)


class TopKCoder(SparseCoder):
    """A fraction of the numbers: the largest by magnitude."""

    def __init__(self, fraction: float, inner: Coder | None = None) -> None:
        super().__init__(inner)
        self._fraction = fraction

    def select(self, row: NDArray[Any]) -> Indices:
        """The fraction, exactly."""
        return largest(row, kept_of(len(row), self._fraction))

    def read_head(self, payload: Tensor, count: int) -> tuple[int, Tensor]:
        """The row's length determines the count."""
        return kept_of(count, self._fraction), payload


class ThresholdCoder(SparseCoder):
    """All numbers above a magnitude."""

    fixed = False

    def __init__(self, above: float, inner: Coder | None = None) -> None:
        super().__init__(inner)
        self._above = above

    def select(self, row: NDArray[Any]) -> Indices:
        """NaN is sent, too, so that it is noticed."""
        return _above(row, self._above, also_equal=False)

    def head(self, kept: int) -> list[Tensor]:
        """The number of indices."""
        return [torch.tensor([kept], dtype=torch.int64).view(torch.uint8)]

    def read_head(self, payload: Tensor, count: int) -> tuple[int, Tensor]:
        """A plausible count."""
        if payload.numel() < COUNT_BYTES:
            expect(payload, COUNT_BYTES)
        kept = int(numbers(payload[:COUNT_BYTES], torch.int64))
        if not 0 <= kept <= count:
            raise RunError(f"a payload claims to hold {kept:,} of {count:,} numbers, which cannot be.")
        return kept, payload[COUNT_BYTES:]


def largest(row: NDArray[Any], kept: int) -> Indices:
    """Indices of the `kept` largest by magnitude, in ascending order, without sorting the row.

    A sample gives a magnitude that somewhat too many numbers reach. Those are found in one pass, and the surplus is
    dropped. If the sample was misleading, a lower magnitude is tried.
    """
    count = len(row)
    if kept >= count:
        return np.arange(count)
    sample = np.abs(row[:: max(1, count // _SAMPLE) | 1])
    expected = kept / count * len(sample)
    position = math.ceil(expected + 4 * math.sqrt(expected)) + 1
    indices: Indices = np.empty(0, np.int64)
    while len(indices) < kept and position < len(sample):
        magnitude = float(np.partition(sample, -position)[-position])
        if not magnitude > 0:
            break
        indices = _above(row, magnitude, also_equal=True)
        position *= 4
    if len(indices) < kept:  # A small row, or most numbers are zero: take all others, and zeros to make up the number.
        indices = np.flatnonzero(row)
        zeros = np.flatnonzero(row[: 2 * kept] == 0)[: max(0, kept - len(indices))]
        indices = np.sort(np.concatenate([indices, zeros])) if len(zeros) else indices
    surplus = len(indices) - kept
    if not surplus:
        return indices
    chosen = np.argpartition(np.abs(row[indices]), surplus)[surplus:]  # NaN counts as largest.
    chosen.sort()
    return indices[chosen]


def _above(row: NDArray[Any], magnitude: float, also_equal: bool) -> Indices:
    """Indices of all numbers above a magnitude (or equal to it), piece by piece; NaN counts as above."""
    below = np.less if also_equal else np.less_equal
    size = min(PIECE, max(1, len(row)))
    held, small = np.empty(size, row.dtype), np.empty(size, np.bool_)
    bound = row.dtype.type(magnitude)
    parts: list[Indices] = []
    for start in range(0, len(row), size):
        piece = row[start : start + size]
        magnitudes, flags = held[: len(piece)], small[: len(piece)]
        np.abs(piece, out=magnitudes)
        below(magnitudes, bound, out=flags)
        np.logical_not(flags, out=flags)
        parts.append(np.flatnonzero(flags) + start)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _check(indices: NDArray[np.int32], count: int) -> None:
    if len(indices) and (indices[0] < 0 or indices[-1] >= count or not (indices[1:] > indices[:-1]).all()):
        raise RunError(
            f"a payload has indices that do not fit a row of {count:,} numbers, or are not in order. It was damaged, "
            f"or comes from another model."
        )
