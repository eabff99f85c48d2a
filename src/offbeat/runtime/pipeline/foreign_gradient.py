"""The gradients that other stages hold, as gradients here: clipping by the global norm need not know of stages.

After a step, parameters that this stage does not have get gradients that stand for those of other stages. Their norm
together is asked of the other stages when all of it is needed: a collective call, as clipping is in any loop. Changes
in place, such as those of clipping, are left to the stages that hold the gradients. Optimizers never see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.pipeline.state import SplitState

_NORMS = ("linalg_vector_norm", "norm")
_KNOWN = (2.0, float("inf"))
"""Orders of the norms that stages tell each other right after a step where one of them would never ask."""


class JointNorm:
    """The norm of all gradients of other stages, which is asked for one after the other.

    The others are asked when the last gradient's turn has come; until then, each counts as 0. A stage that has all
    parameters never asks, so it would not know that others ask for its norm: then all tell theirs after each step.
    """

    def __init__(self, norm_elsewhere: Callable[[float], float], after_steps: bool) -> None:
        self._norm_elsewhere, self._after_steps = norm_elsewhere, after_steps
        self._known: dict[float, float] = {}
        self._changed = False
        self._asked: set[int] = set()
        self.members: set[int] = set()
        """The gradients, by the number of their parameter."""

    def ask(self, number: int, order: float) -> float:
        """The norm of one of them, of which the last has that of all."""
        self._asked.add(number)
        if self._asked < self.members:
            return 0.0
        self._asked.clear()
        if not self._after_steps:
            return self._norm_elsewhere(order)
        if self._changed or order not in self._known:
            what = "gradients that were changed since the step" if self._changed else f"order {order:g}"
            raise UsageError(
                f"norms of {what} are not known here: one stage has all parameters, so stages exchange norms after "
                f"each step, those of order 2 and inf. Clip by such a norm first, or cut elsewhere (Task.stages)."
            )
        return self._known[order]

    def begin(self) -> None:
        """A step is done. Collective."""
        if self._after_steps:
            self._known, self._changed = {order: self._norm_elsewhere(order) for order in _KNOWN}, False

    def conclude(self) -> None:
        """Gradients change, or are used: refuse a norm of some of them, which would be another one on every stage."""
        self._changed = True
        if self._asked:
            count, self._asked = len(self._asked), set()
            raise UsageError(
                f"a norm was taken of {count} of the {len(self.members)} gradients that other stages hold, but only "
                f"the norm of all of them is known here, so stages would clip differently. Clip all parameters at once "
                f"(clip_grad_norm_(model.parameters(), limit)), clip by value, or use tensor in place of pipeline."
            )


class ForeignGradient(Tensor):
    """A gradient without memory that stands for one of another stage."""

    joint: JointNorm
    number: int

    @staticmethod
    def __new__(cls: type[ForeignGradient], parameter: Tensor, joint: JointNorm, number: int) -> ForeignGradient:
        """A tensor of the parameter's shape."""
        made = Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        made.joint, made.number = joint, number
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
        if name.startswith("_foreach_") and func._schema.is_mutable:
            method = name.removeprefix("_foreach_")
            for number, tensor in enumerate(args[0]):
                getattr(tensor, method)(*(arg[number] if isinstance(arg, list) else arg for arg in args[1:]))
            return None
        if isinstance(first, cls):
            if name in ("detach", "alias"):
                return cls(first, first.joint, first.number)
            if name in _NORMS:
                order = args[1] if len(args) > 1 else keywords.get("ord", keywords.get("p", 2.0))
                return torch.tensor(
                    first.joint.ask(first.number, float(2.0 if order is None else order)), dtype=first.dtype
                )
            if func._schema.is_mutable:
                first.joint.conclude()
                return first
        raise UsageError(
            f"{name} needs gradients of other stages, which are not on this worker: of those, only the norm is known "
            f"here. Use parameters whose gradients are here, or a strategy without a split."
        )


class ForeignGradients:
    """Gives the parameters of other stages such gradients after every step, and hides them from optimizers."""

    def __init__(self, state: SplitState, optimizers: list[Optimizer]) -> None:
        self._joint = JointNorm(state.norm_elsewhere, state.is_somewhere_complete)
        self._pairs = [(p, ForeignGradient(p, self._joint, number)) for number, p in enumerate(state.foreign)]
        self._handles: list[RemovableHandle] = [o.register_step_pre_hook(self._hide) for o in optimizers]

    def give(self) -> None:
        """A step is done: stand in for the gradients of other stages."""
        self._joint.begin()
        self._joint.members = {gradient.number for parameter, gradient in self._pairs if parameter.requires_grad}
        for parameter, gradient in self._pairs:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = gradient

    def _hide(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise StrategyError(
                f"{type(optimizer).__name__} steps with a closure, which would call the model while each worker has a "
                f"stage of it. Use an optimizer that steps on gradients, such as AdamW, or a strategy without a split."
            )
        self._joint.conclude()
        for parameter, _ in self._pairs:
            parameter.grad = None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
