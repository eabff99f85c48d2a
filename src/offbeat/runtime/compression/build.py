"""From the description of a compressor to its coder."""

from __future__ import annotations

import torch

from offbeat.protocols.compression import (
    BFloatFormat,
    HalfFormat,
    LowRankFormat,
    QuantizeFormat,
    RandomKFormat,
    RowFormat,
    Shapes,
    SignFormat,
    ThresholdFormat,
    TopKFormat,
)
from offbeat.runtime.compression.coder import Coder
from offbeat.runtime.compression.half import Narrow
from offbeat.runtime.compression.lowrank import Thin
from offbeat.runtime.compression.quantize import Quantized
from offbeat.runtime.compression.randomk import Drawn
from offbeat.runtime.compression.sign import Signs
from offbeat.runtime.compression.sparse import Beyond, Largest


def build(
    form: RowFormat,
    shapes: Shapes = (),
    *,
    seed: int = 0,
    own_seed: int = 0,
    inner: Coder | None = None,
    unbiased: bool = False,
) -> Coder:
    """The coder of a format, for a row of tensors of these shapes (only low ranks need to know them).

    `seed` is the same on all workers, `own_seed` different, so that their roundings err apart. `inner` encodes the
    values that a sparse one keeps; `unbiased` has random ones stand for those that were left out.
    """
    match form:
        case BFloatFormat():
            return Narrow(torch.bfloat16)
        case HalfFormat():
            return Narrow(torch.float16)
        case QuantizeFormat():
            return Quantized(form, own_seed)
        case SignFormat():
            return Signs()
        case TopKFormat(fraction):
            return Largest(fraction, inner)
        case ThresholdFormat(above):
            return Beyond(above, inner)
        case RandomKFormat(fraction):
            return Drawn(fraction, seed, inner, unbiased)
        case LowRankFormat(rank):
            return Thin(shapes, rank, seed)
        case _:
            raise NotImplementedError(f"no coder writes {form!r}")
