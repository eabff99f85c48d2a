"""Gradients of split parameters: their norms are those of the whole parameter, so that clipping by norm is right.

All ways clip together, as they do everything in a step: a norm is an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from offbeat.runtime.gradients.buckets import hook
from offbeat.runtime.tensor_parallel.ways import TensorWays


class WayGradient(Tensor):
    """The part of a gradient that a way has: an ordinary tensor, except for its norm."""

    ways: TensorWays

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Norms over all ways; everything else as for any tensor."""
        del types
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            if func in _NORMS and isinstance(args[0], WayGradient):
                return _whole_norm(func, args[0], args[1:], named)
            if func is torch._foreach_norm:  # pyright: ignore[reportPrivateUsage]
                norms = zip(args[0], func(*args, **named), strict=True)
                order = float(args[1] if len(args) > 1 else named.get("ord", 2.0))
                return [_joined(g.ways, n, order) if isinstance(g, WayGradient) else n for g, n in norms]
            result = func(*args, **named)
            if func is _UNSCALE:  # Every way must skip the same steps.
                found = next(gradient for gradient in args[0] if isinstance(gradient, WayGradient))
                found.ways.largest(args[1], "the search for infinite gradients")
            return result


_NORMS = {torch.linalg.vector_norm, torch.norm, torch.linalg.norm, Tensor.norm, torch.functional.norm}
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def _whole_norm(
    func: Callable[..., Any], gradient: WayGradient, args: tuple[Any, ...], named: dict[str, Any]
) -> Tensor:
    order = args[0] if args else named.get("ord", named.get("p", 2.0))
    order = 2.0 if order is None or order == "fro" else float(order)
    rest = (args[1:], {name: value for name, value in named.items() if name not in ("ord", "p", "dtype") and value})
    norm = func(gradient, *args, **named)
    # Norms along some dimensions only are nobody's global norm.
    return norm if rest[0] or rest[1] else _joined(gradient.ways, norm, order)


def _joined(ways: TensorWays, norm: Tensor, order: float) -> Tensor:
    """The norm of the whole, from the norm of every way's part."""
    if order == float("inf"):
        return ways.largest(norm.clone(), "the norm of a gradient")
    return ways.sum(norm.double() ** order, "the norm of a gradient").pow_(1 / order).to(norm.dtype)


def watch_norms(parameters: Sequence[Parameter], is_split: Callable[[], bool], ways: TensorWays) -> None:
    """After each backward pass, let the gradients of these split parameters have the norms of the whole ones."""
    engine = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
    running = [False]

    def begin(_: Tensor) -> None:
        if not running[0] and is_split():
            running[0] = True
            # Exchanges between replicas replace gradients when backward ends: this is queued after them.
            engine.queue_callback(lambda: engine.queue_callback(mark))

    def mark() -> None:
        running[0] = False
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and type(gradient) is Tensor:
                marked = gradient.as_subclass(WayGradient)
                marked.ways = ways
                parameter.grad = marked

    for parameter in parameters:
        hook(parameter, begin)
