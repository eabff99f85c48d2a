"""Numbers at random places, the same on all workers: only values are sent, and are summed in transit.

The row is cut into as many stretches as numbers are kept, and one number of each is drawn; so places are spread evenly,
and drawing is cheap. (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.protocols.compression import COUNT_BYTES, kept_of
from offbeat.protocols.partition import mixed
from offbeat.runtime.compression.coder import Coder, GroupLink, PlainCoder, expect, numbers, row_of


class RandomKCoder(Coder):
    """One number out of each stretch of the row.

    `unbiased`: each is scaled by the length of its stretch, so that the mean over many draws is the row itself.
    """

    def __init__(self, fraction: float, seed: int, inner: Coder | None = None, unbiased: bool = False) -> None:
        self._fraction, self._seed, self._unbiased = fraction, seed, unbiased
        self._inner = PlainCoder() if inner is None else inner
        self.draws = 0
        """Number of draws so far."""

    def places(self, draw: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The indices of a draw, and the length of the stretch around each."""
        kept = kept_of(count, self._fraction)
        bounds = np.arange(kept + 1) * count // kept
        lengths = np.diff(bounds)
        chance = np.random.default_rng(mixed(self._seed, draw)).random(kept)
        return bounds[:-1] + (chance * lengths).astype(np.int64), lengths

    def encode(self, row: Tensor) -> Tensor:
        """The number of the draw, and the values."""
        indices, lengths = self._next(row)
        draw = torch.tensor([self.draws], dtype=torch.int64).view(torch.uint8)
        return torch.cat([draw, self._inner.encode(self._taken(row, indices, lengths))])

    def add(self, payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add the values at the places of their draw."""
        if payload.numel() < COUNT_BYTES:
            expect(payload, COUNT_BYTES)
        indices, _ = self.places(int(numbers(payload[:COUNT_BYTES], torch.int64)), out.numel())
        values = torch.zeros(len(indices), dtype=out.dtype)
        self._inner.add(payload[COUNT_BYTES:], values, weight)
        out.numpy()[indices] += values.numpy()

    def sum(self, row: Tensor, total: Tensor, link: GroupLink) -> None:
        """Only the values are summed."""
        indices, lengths = self._next(row)
        values = self._taken(row, indices, lengths)
        sums = values if row is total else torch.empty_like(values)
        self._inner.sum(values, sums, link)
        if row is not total:
            row.numpy()[indices] = values.numpy()
        total.zero_()
        total.numpy()[indices] = sums.numpy()

    def _next(self, row: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        self.draws += 1
        return self.places(self.draws, row.numel())

    def _taken(self, row: Tensor, indices: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
        values = row.detach().numpy()[indices]
        if self._unbiased:
            values *= lengths.astype(values.dtype)
        return row_of(values)

    def state_dict(self) -> dict[str, Any]:
        """Number of draws, and the inner coder's state."""
        return {"draws": self.draws, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        self.draws = int(state["draws"])
        self._inner.load_state_dict(state["inner"])
