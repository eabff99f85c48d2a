"""Models and updates as payloads: plain bytes of vectors, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import RunError
from offbeat.protocols.machine import Payload
from offbeat.runtime.federated.aggregation import UpdateFilter, UpdateLayout
from offbeat.strategies.federated.compressed_updates import CompressFilter


def packed(vectors: Sequence[Tensor | None]) -> Payload:
    """Vectors as a payload, in memory of its own; missing ones are left out."""
    row = torch.cat([vector.detach().cpu().contiguous().view(torch.uint8) for vector in vectors if vector is not None])
    return Payload(row.numel(), row.numpy())


def unpacked(payload: Payload, count: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """The vectors of a payload, as copies; refused if it is not exactly so many of this size."""
    expected = count * size * dtype.itemsize
    if payload.nbytes != expected or payload.handle is None:
        raise RunError(f"{payload.nbytes:,} bytes have come, and {count} vectors of {size:,} have {expected:,}.")
    raw: NDArray[np.uint8] = np.array(payload.handle, np.uint8)
    return list(torch.from_numpy(raw).view(dtype).split(size))


@dataclass(frozen=True)
class UpdateFormat:
    """How updates travel: compressed parameters or plain ones, then floating-point buffers, then a further vector."""

    layout: UpdateLayout
    compression: CompressFilter | None

    @classmethod
    def of(cls, layout: UpdateLayout, filters: Sequence[UpdateFilter]) -> UpdateFormat:
        """The format after these filters, of which only the last one compresses."""
        last = filters[-1] if filters else None
        return cls(layout, last if isinstance(last, CompressFilter) else None)

    @property
    def nbytes(self) -> int:
        """Bytes of an update."""
        params = self.layout.trainable * self.layout.dtype.itemsize
        return self._rest + (params if self.compression is None else self.compression.payload_bytes)

    def unpack(self, payload: Payload, client: int, number: int) -> list[Tensor]:
        """The vectors of an update that came; refused if they cannot be what is due."""
        layout, compression = self.layout, self.compression
        if compression is None:
            return unpacked(payload, 2 if layout.extra else 1, layout.size, layout.dtype)
        head = compression.payload_bytes
        if payload.handle is None or payload.nbytes != self.nbytes:
            raise RunError(f"{payload.nbytes:,} bytes have come, and an update has {self.nbytes:,}.")
        raw = torch.from_numpy(np.array(payload.handle, np.uint8))
        # Copied, so that its numbers are aligned.
        rest = raw[head:].clone().view(layout.dtype)
        buffers = layout.size - layout.trainable
        update = torch.cat([torch.zeros(layout.trainable, dtype=layout.dtype), rest[:buffers]])
        compression.decode(raw[:head].clone(), client, number, update)
        return [update, rest[buffers:]] if layout.extra else [update]

    @property
    def _rest(self) -> int:
        """Bytes behind the parameters."""
        layout = self.layout
        return (layout.size - layout.trainable + layout.size * layout.extra) * layout.dtype.itemsize
