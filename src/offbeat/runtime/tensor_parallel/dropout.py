"""Dropout on split values: every way draws the mask of the whole value, and uses its part of it.

So different ways drop different features, the generators of all ways stay equal, and the result is that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offbeat.runtime.tensor_parallel.cuts import Cut
from offbeat.runtime.tensor_parallel.ways import TensorWays


def dropout(value: Tensor, rate: float, dim: int, ways: TensorWays) -> Tensor:
    """Dropout on a value that is split evenly along `dim`."""
    if rate == 0 or ways.size == 1:
        return functional.dropout(value, rate)
    shape = list(value.shape)
    shape[dim] *= ways.size
    # In the order in memory in which functional.dropout draws it, so that one process has the same mask.
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    kept = torch.empty_permuted(shape, order, dtype=value.dtype, device=value.device).bernoulli_(1 - rate)
    own = ways.part(kept, Cut(dim, shape[dim]))
    return value * (own if rate == 1 else own.div_(1 - rate))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ways: TensorWays,
    mask: Tensor | None = None,
    rate: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this way's heads (dimension 1), with dropout of the weights; answers the weights, too."""
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = dropout(scores.softmax(-1), rate, 1, ways) if rate else scores.softmax(-1)
    return weights @ value, weights


class HeadsRegion(TorchFunctionMode):
    """Inside, dropout of attention weights is that of this way's heads; other dropout is replicated as it is."""

    def __init__(self, heads: int, ways: TensorWays) -> None:
        super().__init__()
        self._heads, self._ways = heads, ways

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replace dropout on split heads; everything else is called as it is."""
        del types
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002 - torch's name
        if training and input.dim() == 4 and input.shape[1] == self._heads:
            return dropout(input, p, 1, self._ways)
        return functional.dropout(input, p, training, inplace)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0 or query.dim() != 4 or query.shape[1] != self._heads:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (shared.repeat_interleave(query.shape[1] // shared.shape[1], 1) for shared in (key, value))
        return attention(query, key, value, self._ways, attn_mask, dropout_p, is_causal, scale)[0]
