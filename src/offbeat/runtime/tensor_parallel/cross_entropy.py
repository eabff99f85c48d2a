"""Cross-entropy of logits that are split by vocabulary, without gathering them.

Ways exchange three numbers per example at most: the largest logit, the sum of exponentials, and the target's logit.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from offbeat.runtime.tensor_parallel.cuts import range_of
from offbeat.runtime.tensor_parallel.ways import TensorWays

Reduction = Literal["none", "mean", "sum"]


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, counts: Tensor, size: int, smoothing: float, ways: TensorWays
    ) -> Any:
        low, high = range_of(size, ways.rank, ways.size)
        own = counts & (target >= low) & (target < high)
        index = (target - low).masked_fill(~own, 0).unsqueeze(-1)
        largest = ways.largest(logits.amax(-1), "the largest logits")
        shifted = logits - largest.unsqueeze(-1)
        sums = torch.zeros(3 if smoothing else 2, *target.shape, dtype=logits.dtype, device=logits.device)
        sums[1] = shifted.gather(-1, index).squeeze(-1).masked_fill_(~own, 0)
        if smoothing:
            torch.sum(shifted, -1, out=sums[2])
        exponentials = shifted.exp_()
        torch.sum(exponentials, -1, out=sums[0])
        ways.sum(sums, "the sums of a loss")
        total = sums[0].log()
        losses = total - (1 - smoothing) * sums[1]
        if smoothing:
            losses -= smoothing / size * sums[2]
        ctx.save_for_backward(exponentials, sums[0], index, own, counts)
        ctx.smoothing, ctx.size = smoothing, size
        return losses.masked_fill_(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        exponentials, total, index, own, counts = ctx.saved_tensors
        gradient = gradient.masked_fill(~counts, 0)
        result = exponentials * (gradient / total).unsqueeze(-1)
        right = torch.where(own, -(1 - ctx.smoothing) * gradient, 0).unsqueeze(-1)
        result.scatter_add_(-1, index, right)
        if ctx.smoothing:
            result -= (ctx.smoothing / ctx.size * gradient).unsqueeze(-1)
        return result, None, None, None, None, None


def vocabulary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    size: int,
    ways: TensorWays,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of this way's part of the logits (last dimension), of `size` in all."""
    counts = target != ignore_index
    if bool((counts & ((target < 0) | (target >= size))).any()):
        raise IndexError(f"a target is outside of the {size} classes: {target[counts].aminmax()}")
    held = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    losses: Any = _Losses.apply(held, target, counts, size, label_smoothing, ways)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()
