"""A summed gradient of which each worker holds a slice, as a tensor: clipping and logging code need not know.

Norms are those of the whole gradient: the workers' parts are exchanged, for all gradients of the model at once.
Element-wise changes in place, such as those of clipping, change the slice. Any other reading gathers the whole. All
three are collective: every worker must do the same, as in any loop whose workers step together. What would change a
part that this worker does not hold is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from offbeat.errors import UsageError

if TYPE_CHECKING:
    from offbeat.runtime.gradients.slices import GradientSlices

_ELEMENT_WISE = frozenset(
    f"{name}_"
    for name in (
        *("mul", "div", "add", "sub", "neg", "abs", "sign", "sqrt", "pow", "tanh", "addcmul", "addcdiv", "lerp"),
        *("zero", "fill", "copy", "clamp", "clamp_min", "clamp_max", "nan_to_num"),
    )
)
"""Changes in place that treat every number by itself."""
_ELEMENT_WISE_LISTS = frozenset(f"_foreach_{name}" for name in _ELEMENT_WISE)
_NORMS = frozenset(["linalg_vector_norm", "norm"])
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class SlicedGradient(Tensor):
    """A gradient with the shape of its parameter; this worker holds the elements from `low` on, flat, in `local`."""

    local: Tensor
    low: int
    book: GradientSlices

    @staticmethod
    def __new__(
        cls: type[SlicedGradient], local: Tensor, low: int, shape: torch.Size, book: GradientSlices
    ) -> SlicedGradient:
        """A tensor without memory of its own."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        made.local, made.low, made.book = local, low, book
        return made

    def __repr__(self, **_: Any) -> str:
        stop = self.low + self.local.numel()
        return f"SlicedGradient(shape={tuple(self.shape)}, elements {self.low} to {stop} on this worker: {self.local})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage, reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch operation on slices if that gives the same, else on whole gradients, or refuse it."""
        del types
        keywords = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        first = args[0] if args else None
        if name in _ELEMENT_WISE_LISTS or name == "_foreach_norm" or name == _UNSCALE:
            return _in_lists(func, name, args, keywords)
        if isinstance(first, cls):
            if name == "detach":
                return cls(first.local, first.low, first.shape, first.book)
            if name in _NORMS and _of_everything(args[2:], keywords):
                order = args[1] if len(args) > 1 else keywords.get("ord", keywords.get("p", 2.0))
                return first.book.norm(first, float(2.0 if order is None else order), keywords.get("dtype"))
            if name in _ELEMENT_WISE:
                first.book.changed()
                func(first.local, *(first.part(arg) for arg in args[1:]), **tree_map(first.part, keywords))
                return first
        _refuse(func, name, first)
        return func(*tree_map(_whole, args), **tree_map(_whole, keywords))

    def part(self, value: Any) -> Any:
        """The part of an operand that belongs to this slice; numbers as they are."""
        if isinstance(value, SlicedGradient):
            same = value.low == self.low and value.local.numel() == self.local.numel()
            return value.local if same else self.part(value.book.whole(value))
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        flat = value.expand(self.shape).reshape(-1)
        return flat[self.low : self.low + self.local.numel()]


def _in_lists(func: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """An operation on lists of tensors, one by one."""
    tensors = cast("Sequence[Tensor]", args[0])
    if name == "_foreach_norm":
        order = float(args[1] if len(args) > 1 else keywords.get("ord", 2.0))
        return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]
    sliced = [tensor for tensor in tensors if isinstance(tensor, SlicedGradient)]
    if name == _UNSCALE:
        for tensor in sliced:
            tensor.book.changed()
        func([t.local if isinstance(t, SlicedGradient) else t for t in tensors], *args[1:], **keywords)
        # Every worker must skip the same steps.
        sliced[0].book.most(args[1])
        return None
    method = name.removeprefix("_foreach_")
    for number, tensor in enumerate(tensors):
        own = [arg[number] if isinstance(arg, list | tuple) else arg for arg in args[1:]]
        getattr(tensor, method)(*own, **keywords)
    return None


def _of_everything(rest: Sequence[Any], keywords: dict[str, Any]) -> bool:
    """Whether a norm is that of all elements, as one number."""
    dims, kept = (*rest, None, False)[:2] if rest else (keywords.get("dim"), keywords.get("keepdim", False))
    return not dims and not kept


def _refuse(func: Any, name: str, first: Any) -> None:
    """Refuse to change or to view a gradient of which this worker holds a slice only."""
    if isinstance(first, SlicedGradient):
        shape = tuple(first.shape)
        if func._schema.is_mutable:
            raise UsageError(
                f"{name} would change a summed gradient of shape {shape}, of which each worker holds only a slice: "
                f"under this shard=..., only element-wise changes such as mul_ and clamp_ can be made in place. "
                f"Compute a new gradient and assign it (parameter.grad = ...), or use allreduce without shard."
            )
        if any(result.alias_info is not None for result in func._schema.returns):
            raise UsageError(
                f"{name} would be a view of a summed gradient of shape {shape}, of which each worker holds only a "
                f"slice, so changes to the view would be lost. Read a copy: parameter.grad.clone()."
            )


def _whole(value: Any) -> Any:
    return value.book.whole(value) if isinstance(value, SlicedGradient) else value


def partial_norm(local: Tensor, order: float) -> float:
    """One worker's part of a norm: what `joined_norms` joins."""
    if not local.numel():
        return float("inf") if order == float("-inf") else 0.0
    wide = local if local.dtype in (torch.float32, torch.float64) else local.float()
    norm = float(torch.linalg.vector_norm(wide, order))
    return norm if order == 0 or abs(order) == float("inf") else norm**order


def joined_norms(parts: Tensor, order: float) -> Tensor:
    """The norms of whole tensors, from every worker's part of each (a row for each worker)."""
    if abs(order) == float("inf"):
        return parts.amax(0) if order > 0 else parts.amin(0)
    total = parts.sum(0)
    return total if order == 0 else total ** (1 / order)
