"""Models and updates as payloads: plain bytes of vectors, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import RunError
from offbeat.protocols.machine import Payload


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
