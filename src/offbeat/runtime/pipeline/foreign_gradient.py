"""The gradients that other stages hold, as one gradient here: clipping by the global norm need not know of stages.

After a step, one parameter that this stage does not have gets a gradient that stands for those of all other stages. Its
norm is theirs together, asked of them when it is needed: a collective call, as clipping is in any loop. Changes in
place, such as those of clipping, are left to the stages that hold the gradients. Optimizers never see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import UsageError
from offbeat.runtime.pipeline.state import SplitState

_NORMS = ("linalg_vector_norm", "norm")


class ForeignGradient(Tensor):
    """A gradient without memory that stands for those of the other stages."""

    norm_of: Callable[[float], float]

    @staticmethod
    def __new__(cls: type[ForeignGradient], parameter: Tensor, norm_of: Callable[[float], float]) -> ForeignGradient:
        """A tensor of the parameter's shape."""
        made = Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        made.norm_of = norm_of
        return made

    def __repr__(self, **_: Any) -> str:
        return f"ForeignGradient(shape={tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage, reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Norms are those of the other stages; changes in place are theirs to make."""
        del types
        keywords, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        first = args[0] if args else None
        if name == "_foreach_norm":
            return [torch.linalg.vector_norm(tensor, *args[1:], **keywords) for tensor in args[0]]
        if isinstance(first, list) and func._schema.is_mutable:
            method = name.removeprefix("_foreach_")
            for number, tensor in enumerate(first):
                getattr(tensor, method)(*(arg[number] if isinstance(arg, list) else arg for arg in args[1:]))
            return None
        if isinstance(first, cls):
            if name in ("detach", "alias"):
                return cls(first, first.norm_of)
            if name in _NORMS:
                order = args[1] if len(args) > 1 else keywords.get("ord", keywords.get("p", 2.0))
                return torch.tensor(first.norm_of(float(2.0 if order is None else order)), dtype=first.dtype)
            if func._schema.is_mutable:
                return first
        raise UsageError(
            f"{name} needs gradients of other stages, which are not on this worker: of those, only the norm is known "
            f"here. Use parameters whose gradients are here, or a strategy without a split."
        )


class ForeignGradients:
    """Gives one parameter of other stages such a gradient after every step, and hides it from optimizers."""

    def __init__(self, state: SplitState, optimizers: list[Optimizer]) -> None:
        self._state = state
        self._parameter = next((p for p in state.foreign if p.requires_grad), None)
        self._handles: list[RemovableHandle] = [o.register_step_pre_hook(self._hide) for o in optimizers]

    def give(self) -> None:
        """A step is done: stand in for the gradients of other stages."""
        if self._parameter is not None and self._parameter.grad is None:
            self._parameter.grad = ForeignGradient(self._parameter, self._state.norm_elsewhere)

    def _hide(self, *_: Any) -> None:
        if self._parameter is not None:
            self._parameter.grad = None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
