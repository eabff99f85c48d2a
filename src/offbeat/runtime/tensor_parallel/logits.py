"""Logits that are split by vocabulary, as a tensor of their whole shape.

A loss that is `cross_entropy` never gathers them. Anything else that is computed from them gathers them first, so
that it is right; then every way must compute it, because gathering is an exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from offbeat.runtime.tensor_parallel.cross_entropy import vocabulary_cross_entropy
from offbeat.runtime.tensor_parallel.cuts import Cut
from offbeat.runtime.tensor_parallel.functions import gather
from offbeat.runtime.tensor_parallel.ways import TensorWays


class VocabularyLogits(Tensor):
    """Logits of which every way holds a part of the last dimension."""

    local: Tensor
    """This way's part."""
    ways: TensorWays
    """Who holds the others."""

    @staticmethod
    def __new__(cls: type[VocabularyLogits], local: Tensor, size: int, ways: TensorWays) -> VocabularyLogits:
        """Logits of `size` classes, of which this way has `local`."""
        # Each access to its data goes through the methods below.
        made: VocabularyLogits = Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            cls, (*local.shape[:-1], size), dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        made.local, made.ways = local, ways
        made._gathered = None
        return made

    _gathered: Tensor | None

    def gathered(self) -> Tensor:
        """All logits, on every way."""
        if self._gathered is None:
            self._gathered = gather(self.local, Cut(self.local.dim() - 1, self.shape[-1]), self.ways)
        return self._gathered

    def like(self, local: Tensor) -> VocabularyLogits:
        """Other logits of the same classes."""
        return VocabularyLogits(local, self.shape[-1], self.ways)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Split where the classes stay together; otherwise on gathered logits."""
        del types
        named = dict(kwargs or {})
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                return func(*args, **named)
        split = _SPLIT.get(func)
        if split is not None and isinstance(args[0] if args else None, VocabularyLogits):
            result = split(*args, **named)
            if result is not NotImplemented:
                return result
        args, named = tree_map(_gathered, (tuple(args), named))
        return func(*args, **named)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What torch's own code computes from them, on gathered logits."""
        del types
        args, named = tree_map(_gathered, (tuple(args), dict(kwargs or {})))
        return func(*args, **named)


def _gathered(value: object) -> object:
    return value.gathered() if isinstance(value, VocabularyLogits) else value


def _cross_entropy(
    input: VocabularyLogits,  # noqa: A002 - torch's name
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    unusual = weight is not None or size_average is not None or reduce is not None or target.is_floating_point()
    if unusual or input.dim() > 2 or target.dim() != input.dim() - 1:
        return NotImplemented
    ways, size = input.ways, input.shape[-1]
    return vocabulary_cross_entropy(input.local, target, size, ways, ignore_index, reduction, label_smoothing)


def _view(self: VocabularyLogits, *shape: Any, **named: Any) -> Any:
    sizes: Any = named.get("shape", shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    known = math.prod(size for size in sizes if size != -1)
    whole = [self.numel() // max(known, 1) if size == -1 else size for size in sizes]
    if whole[-1] != self.shape[-1]:
        return NotImplemented
    return self.like(self.local.reshape(*whole[:-1], self.local.shape[-1]))


def _flatten(self: VocabularyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = self.dim()
    if end_dim % dims == dims - 1:
        return NotImplemented if start_dim % dims != dims - 1 else self
    return self.like(self.local.flatten(start_dim, end_dim))


def _item(self: VocabularyLogits, index: Any) -> Any:
    if isinstance(index, Tensor):
        fits = index.dim() < self.dim() if index.dtype == torch.bool else self.dim() > 1
        return self.like(self.local[index]) if fits else NotImplemented
    places = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
    if not all(place is Ellipsis or isinstance(place, (int, slice)) for place in places):
        return NotImplemented
    reaches_last = Ellipsis in places or len(places) == self.dim()
    if reaches_last and places[-1] is not Ellipsis and places[-1] != slice(None):
        return NotImplemented
    return self.like(self.local[index])


def _same(name: str) -> Callable[..., Any]:
    def call(self: VocabularyLogits, *args: Any, **named: Any) -> Any:
        return self.like(getattr(self.local, name)(*args, **named))

    return call


def _facts() -> frozenset[Any]:
    properties = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad")
    methods = ("size", "dim", "numel", "nelement", "ndimension", "is_floating_point", "is_complex", "element_size")
    flags = ("is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_cpu", "is_cuda", "is_meta", "itemsize")
    getters = [getattr(Tensor, name).__get__ for name in (*properties, *flags)]
    return frozenset([*getters, *(getattr(Tensor, name) for name in methods), Tensor.__len__])


_FACTS = _facts()
"""What is known of the whole logits without their values."""
_SPLIT: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _cross_entropy,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _view),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
    Tensor.__getitem__: _item,
    **{
        getattr(Tensor, name): _same(name)
        for name in ("contiguous", "clone", "detach", "float", "double", "half", "bfloat16", "to", "requires_grad_")
    },
}
"""What can be computed on every way's part."""
