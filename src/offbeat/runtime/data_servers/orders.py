"""What an order for a batch says: which examples, or which slice of a stream; as MessagePack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from offbeat.errors import DataError
from offbeat.protocols.machine import Payload

Index = int | str


class Chosen(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Examples of a map-style dataset."""

    loader: int  # Number of the loader in the run.
    seed: int  # Of whatever the dataset draws for these examples.
    indices: list[Index]


class Stretch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker's slice of a batch of a stream, which is read from its beginning."""

    loader: int
    seed: int  # Of whatever collating draws.
    begin: bytes  # Random state in which the stream is opened; equal for all batches of a pass.
    rank: int
    size: int


Wish = Chosen | Stretch
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Chosen | Stretch] = msgspec.msgpack.Decoder(Chosen | Stretch)


def encoded(wish: Wish) -> Payload:
    """The payload of an order."""
    data = _ENCODER.encode(wish)
    return Payload(len(data), data)


def decoded(payload: Payload) -> Wish:
    """The examples of an order."""
    return _DECODER.decode(payload.handle)


def plain_indices(indices: Sequence[Any]) -> list[Index]:
    """A sampler's indices as numbers and text."""
    return [index if type(index) is int or type(index) is str else _plain(index) for index in indices]


def _plain(index: Any) -> Index:
    if isinstance(index, int | np.integer) or (isinstance(index, Tensor) and index.numel() == 1):
        return int(index)
    raise DataError(
        f"the loader's sampler yields {index!r}, a {type(index).__name__}. Data servers are told which examples a "
        f"batch has by whole numbers or text. Let the sampler yield those, or omit --data-servers."
    )
