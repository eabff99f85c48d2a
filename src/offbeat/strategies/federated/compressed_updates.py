"""Updates that a client compresses before it sends them, with error feedback in the client's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import UsageError
from offbeat.protocols.compression import kept_of
from offbeat.protocols.partition import mixed
from offbeat.runtime.compression import Feedback
from offbeat.runtime.compression.randomk import RandomKCoder
from offbeat.runtime.federated.aggregation import UpdateFilter, UpdateLayout
from offbeat.runtime.federated.client_state import OWED, ClientState
from offbeat.runtime.federated.exact_sum import ExactSum
from offbeat.runtime.federated.secure_mean import KeptNumbers
from offbeat.strategies.compressors import Compressing, RandomK, compressor

_STREAM: Final = 0xC0431  # Which of a seed's streams of random numbers this is.
_DRAW: Final = 1  # Every round has a coder of its own, which draws once.


class CompressFilter(UpdateFilter):
    """Encodes the parameters of an update, and decodes them as the server does; buffers stay as they are.

    Random numbers follow from seed, round and client. What all clients of a round must draw alike, such as the places
    of `randomk`, follows from seed and round.
    """

    def __init__(self, compressions: Sequence[Compressing], layout: UpdateLayout, seed: int) -> None:
        self._compressions, self._layout, self._seed = tuple(compressions), layout, seed
        self._dtype = layout.dtype if layout.dtype in (torch.float32, torch.float64) else torch.float32
        self.keeps_state = compressions[0].owes
        self._payload_bytes = self._coder(0, 0).encode(torch.zeros(layout.trainable, dtype=self._dtype)).numel()

    def apply(self, update: Tensor, client: int, number: int, state: ClientState | None) -> Tensor:
        """The update as the server decodes it."""
        if ExactSum.fits(update):  # What cannot be summed is refused by the server, and must not spoil the feedback.
            self.decode(self.encode(update, client, number, state), client, number, update)
        return update

    def encode(self, update: Tensor, client: int, number: int, state: ClientState | None) -> Tensor:
        """The bytes that stand for the parameters; what they leave out is kept in the state."""
        coder, row = self._coder(client, number), update[: self._layout.trainable].to(self._dtype)
        if not coder.on:
            return coder.encode(row)
        if state is None:
            raise UsageError(_placeless(self._compressions[0], client))
        if OWED in state.tensors:
            coder.owed = state.tensors[OWED].clone()
        payload = coder.encode(row)
        state.tensors[OWED] = coder.owing(row)
        return payload

    def decode(self, payload: Tensor, client: int, number: int, update: Tensor) -> None:
        """Replace the parameters of an update by those that a payload stands for."""
        values = torch.empty(self._layout.trainable, dtype=self._dtype)
        self._coder(client, number).coder.put(payload, values)
        update[: self._layout.trainable].copy_(values)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the parameters."""
        return self._payload_bytes

    def update_bytes(self, size: int, nbytes: int) -> int:
        """The payload, and buffers."""
        del size
        return self._payload_bytes + nbytes - self._layout.trainable * self._layout.dtype.itemsize

    @property
    def kept(self) -> KeptNumbers | None:
        """The numbers that all clients of a round send alike, by `randomk`, and buffers; None: each has its own."""
        only, buffers = self._compressions[0], np.arange(self._layout.trainable, self._layout.size)
        if not isinstance(only, RandomK) or len(self._compressions) > 1:
            return None

        def places(number: int) -> NDArray[np.int64]:
            coder = cast("RandomKCoder", self._coder(0, number).coder)
            return np.concatenate([coder.places(_DRAW, self._layout.trainable)[0], buffers])

        return KeptNumbers(kept_of(self._layout.trainable, only.fraction) + len(buffers), places)

    def _coder(self, client: int, number: int) -> Feedback:
        return compressor(
            self._compressions, [(self._layout.trainable,)], mixed(self._seed, _STREAM, number), rank=client
        )


class RepayFilter(UpdateFilter):
    """Adds to an update what its client owes; what it owes after this round is known when the update is encoded."""

    keeps_state = True

    def __init__(self, compression: Compressing, layout: UpdateLayout) -> None:
        self._compression, self._layout = compression, layout

    def apply(self, update: Tensor, client: int, number: int, state: ClientState | None) -> Tensor:
        """The update, and what is owed."""
        del number
        if state is None:
            raise UsageError(_placeless(self._compression, client))
        if ExactSum.fits(update) and OWED in state.tensors:
            update[: self._layout.trainable] += state.tensors.pop(OWED)
        return update


def _placeless(compression: Compressing, client: int) -> str:
    return (
        f"{compression} needs a place where client {client} keeps what it has not sent yet. Give the run a folder, or "
        f"say feedback=False."
    )
