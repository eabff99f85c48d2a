"""Numbers at random places that all workers draw alike: values alone travel, and are summed on the way.

The row is cut into as many stretches as numbers are kept, and one number of each is drawn; so places are spread evenly,
and drawing costs nothing beside the rest. (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018.)
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
from offbeat.runtime.compression.coder import Coder, PayloadExchange, PlainCoder, expect, numbers, row_of


class Drawn(Coder):
    """One number out of each stretch of the row.

    `unbiased`: each stands for its whole stretch, so that the mean over many draws is the row itself.
    """

    def __init__(self, fraction: float, seed: int, inner: Coder | None = None, unbiased: bool = False) -> None:
        self._fraction, self._seed, self._unbiased = fraction, seed, unbiased
        self._inner = PlainCoder() if inner is None else inner
        self.draws = 0
        """Rows that places were drawn for."""

    def places(self, draw: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The indices of a draw, and how long the stretch around each is."""
        kept = kept_of(count, self._fraction)
        bounds = np.arange(kept + 1) * count // kept
        lengths = np.diff(bounds)
        chance = np.random.default_rng(mixed(self._seed, draw)).random(kept)
        return bounds[:-1] + (chance * lengths).astype(np.int64), lengths

    def encode(self, row: Tensor) -> Tensor:
        """Which draw it is, and the values."""
        indices, lengths = self._next(row)
        draw = torch.tensor([self.draws], dtype=torch.int64).view(torch.uint8)
        return torch.cat([draw, self._inner.encode(self._taken(row, indices, lengths))])

    def add(self, letter: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add the values at the places of their draw."""
        if letter.numel() < COUNT_BYTES:
            expect(letter, COUNT_BYTES)
        indices, _ = self.places(int(numbers(letter[:COUNT_BYTES], torch.int64)), out.numel())
        values = torch.zeros(len(indices), dtype=out.dtype)
        self._inner.add(letter[COUNT_BYTES:], values, weight)
        out.numpy()[indices] += values.numpy()

    def sum(self, row: Tensor, total: Tensor, link: PayloadExchange) -> None:
        """The values alone are summed."""
        indices, lengths = self._next(row)
        values = self._taken(row, indices, lengths)
        if row is not total:
            sums = torch.empty_like(values)
            self._inner.sum(values, sums, link)
            row.numpy()[indices] = values.numpy()
        else:
            sums = values
            self._inner.sum(values, values, link)
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
        """How often was drawn."""
        return {"draws": self.draws, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self.draws = int(state["draws"])
        self._inner.load_state_dict(state["inner"])
