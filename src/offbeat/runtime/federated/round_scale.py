"""The scale by which the clients of a round quantize what they send under secure aggregation: the same for all.

The server cannot see how large an update is. So each client adds one more number, the logarithm of its update's size,
and from the mean of these follows how large the largest number may be in the next round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.protocols.federated.secure.common_scale import CommonScale
from offbeat.runtime.federated.aggregation import UpdateLayout
from offbeat.runtime.federated.client_state import OWED, ClientState

START: Final = 2.0**-4
"""Largest number in the first round. What is larger is not lost but owed; a scale that is too coarse would be noise."""
_LEAST, _MOST = -60.0, 20.0
"""Logarithms, to the base 2, of the smallest and the largest update that a scale follows."""
_WITHIN: Final = 8.0
"""By what logarithms are divided, so that they are within the bound of fine numbers."""


@dataclass
class RoundScale:
    """The scale of a round, and how it follows from the round before."""

    bits: int
    """Of each number."""
    owes: bool
    """Whether clients keep what clipping and rounding lost, and add it to their next update."""
    bound: float = START
    """Largest number of this round."""

    @property
    def room(self) -> float:
        """Times the usual number that the largest one may be: with fewer bits less, as rounding costs more then."""
        return 2.0 * self.bits

    def encoding(self, count: int, buffers: int, clients: int, examples: int, fine_bound: float) -> CommonScale:
        """Of so many numbers, of which the buffers at the end keep their precision, as do a size and a loss."""
        return CommonScale(
            length=count + 2,
            clients=clients,
            bound=self.bound,
            examples=examples,
            bits=self.bits,
            fine=buffers + 2,
            fine_bound=fine_bound,
        )

    def size_of(self, numbers: NDArray[np.float64]) -> float:
        """How large an update is: the logarithm of the root of its mean square; of zeros, what the scale expects."""
        size = math.sqrt(float(numbers @ numbers) / len(numbers)) or self.bound / self.room
        return min(max(math.log2(size), _LEAST), _MOST) / _WITHIN

    def learn(self, size: float) -> None:
        """Settle the next round's scale by the mean size of this round's updates; a power of two."""
        usual = min(max(size * _WITHIN, _LEAST), _MOST)  # Clients that lie may have made it anything.
        self.bound = 2.0 ** round(usual + math.log2(self.room))

    def owe(
        self, state: ClientState, lost: NDArray[np.float64], places: NDArray[np.int64] | slice, layout: UpdateLayout
    ) -> None:
        """Keep what an update has lost by clipping and rounding, at the places that were sent."""
        if not self.owes:
            return
        owed = state.tensors.get(OWED)
        row = torch.zeros(layout.trainable, dtype=layout.dtype) if owed is None else owed.clone()
        where = places if isinstance(places, slice) else torch.from_numpy(places[: len(lost)])
        row[where] += torch.from_numpy(lost).to(row.dtype)
        state.tensors[OWED] = row
