"""The pairs of conjugate operations by which split layers meet (Shoeybi et al., Megatron-LM, 2019, section 3).

Where a replicated value enters a split layer, forward does nothing and backward sums; where partial results leave it,
forward sums and backward does nothing.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import TensorWeakRef

from offbeat.runtime.tensor_parallel.cuts import Cut
from offbeat.runtime.tensor_parallel.ways import TensorWays


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, ways: TensorWays) -> Tensor:
        ctx.ways = ways
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # In place: only products with weights have used the value, so nobody else holds this gradient.
        held = gradient.contiguous()
        return ctx.ways.sum(held, "the sum of an input's gradient"), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, bias: Tensor | None, ways: TensorWays) -> Tensor:
        total = partial.contiguous()
        if total is not partial or partial._is_view():
            total = partial.clone(memory_format=torch.contiguous_format)
        else:
            ctx.mark_dirty(partial)
        ways.sum(total, "the sum of a layer's output")
        ctx.bias = None if bias is None else bias.dtype
        return total if bias is None else total.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.bias is None or not ctx.needs_input_grad[1]:
            return gradient, None, None
        return gradient, gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: Cut, ways: TensorWays) -> Tensor:
        ctx.cut, ctx.ways = cut, ways
        return ways.whole(part, cut, "the gathering of a split value")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ways.part(gradient, ctx.cut), None, None


def enter(value: Tensor, ways: TensorWays) -> Tensor:
    """A replicated value as the input of split layers: its gradient is summed over the ways."""
    return _Enter.apply(value, ways)  # pyright: ignore[reportReturnType]


def leave(partial: Tensor, ways: TensorWays, bias: Tensor | None = None) -> Tensor:
    """Partial results summed over the ways, plus a bias that is added once."""
    return _Leave.apply(partial, bias, ways)  # pyright: ignore[reportReturnType]


def gather(part: Tensor, cut: Cut, ways: TensorWays) -> Tensor:
    """The whole value of which every way has a part; everything after it is replicated."""
    return _Gather.apply(part, cut, ways)  # pyright: ignore[reportReturnType]


class Entrance:
    """Where one value enters several split layers, such as query, key and value: its gradient is summed only once."""

    def __init__(self, ways: TensorWays) -> None:
        self._ways = ways
        self._last: tuple[TensorWeakRef, int, TensorWeakRef] | None = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return type(self)(self._ways)

    def __call__(self, value: Tensor) -> Tensor:
        """The value as an input of split layers."""
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        if self._last is not None:
            source, version, entered = self._last
            known = entered()
            if known is not None and source() is value and value._version == version:
                return known
        entered = enter(value, self._ways)
        self._last = TensorWeakRef(value), value._version, TensorWeakRef(entered)
        return entered
