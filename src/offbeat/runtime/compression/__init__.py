"""Compressors of rows of numbers, one file each; `build` makes the coder of a format."""

from __future__ import annotations

import torch

from offbeat.protocols import compression as formats
from offbeat.runtime.compression.account import CompressionAccount, together
from offbeat.runtime.compression.coder import Coder, Feedback, GroupLink, PlainCoder
from offbeat.runtime.compression.half import HalfCoder
from offbeat.runtime.compression.lowrank import LowRankCoder
from offbeat.runtime.compression.quantize import QuantizeCoder, SignCoder
from offbeat.runtime.compression.randomk import RandomKCoder
from offbeat.runtime.compression.sparse import ThresholdCoder, TopKCoder

__all__ = ["Coder", "CompressionAccount", "Feedback", "GroupLink", "PlainCoder", "build", "together"]


def build(
    form: formats.RowFormat,
    shapes: formats.Shapes = (),
    *,
    seed: int = 0,
    own_seed: int = 0,
    inner: Coder | None = None,
    unbiased: bool = False,
) -> Coder:
    """The coder of a format; only low ranks need the `shapes` of the row's tensors.

    `seed` is the same on all workers, `own_seed` different on each, so that rounding errors are independent. `inner`
    encodes the values that a sparse coder keeps; if `unbiased`, `randomk` scales them up to stand for those it drops.
    """
    match form:
        case formats.BFloatFormat():
            return HalfCoder(torch.bfloat16)
        case formats.HalfFormat():
            return HalfCoder(torch.float16)
        case formats.QuantizeFormat():
            return QuantizeCoder(form, own_seed)
        case formats.SignFormat():
            return SignCoder()
        case formats.TopKFormat(fraction):
            return TopKCoder(fraction, inner)
        case formats.ThresholdFormat(above):
            return ThresholdCoder(above, inner)
        case formats.RandomKFormat(fraction):
            return RandomKCoder(fraction, seed, inner, unbiased)
        case formats.LowRankFormat(rank):
            return LowRankCoder(shapes, rank, seed)
        case _:
            raise NotImplementedError(f"no coder writes {form!r}")
