"""A check that the first loss of a loop is a mean over the examples of a batch, as exchanges assume.

Only then is the gradient of one process the mean of the workers' gradients, weighted by their examples. The loss itself
is never passed to us, but while its backward pass runs it is on the stack, and its graph shows how it was reduced.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_SUM = 2
"""Code of reduction="sum" in a graph."""
_NOT_SET = -100
"""Torch's default ignore_index."""
_NODES = 64
"""Nodes of a graph that are checked, from its end: losses are near it."""
_WEIGHTED = ("NllLossBackward0", "NllLoss2DBackward0")
_SUMS = ("SumBackward0", "SumBackward1")
_ADDED = (*_SUMS, "AddBackward0", "SubBackward0", "NegBackward0", "SqueezeBackward0", "ViewBackward0")
"""Nodes between a loss and an undivided sum over examples."""
_SCALED = ("DivBackward0", "MulBackward0", "MulBackward1", "MeanBackward0")


def not_a_mean(loss: Tensor, examples: int = 0) -> str:
    """Why a loss is not a mean over examples, and what to write instead; empty if nothing shows it.

    `examples` is the size of the batch here; 0 if it is unknown, and then sums by hand are not recognized.
    """
    waiting: deque[tuple[Any, bool, bool]] = deque([(loss.grad_fn, False, True)])
    seen: set[Any] = set()
    while waiting and len(seen) < _NODES:
        node, scaled, added = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if reason := _reduced(node, scaled) or (_summed(node, examples) if added else ""):
            return reason
        scaled, added = scaled or node.name() in _SCALED, added and node.name() in _ADDED
        waiting += [(inner, scaled, added) for inner, _ in node.next_functions]
    return ""


def _reduced(node: Any, scaled: bool) -> str:
    name = node.name()
    if getattr(node, "_saved_reduction", None) == _SUM:
        # A sum that is divided is intended.
        return "" if scaled else 'it is a sum (reduction="sum"). Divide it by the examples it is over, len(x)'
    if name not in _WEIGHTED:
        return ""
    try:
        weighted = node._saved_weight is not None
    except RuntimeError:
        weighted = True  # Backward has freed them.
    if weighted:
        return (
            "it divides by the class weights of its own slice. Take the mean over examples instead: "
            '(weight[y] * cross_entropy(output, y, reduction="none")).mean()'
        )
    ignored = int(node._saved_ignore_index)
    ignored -= 2**64 if ignored >= 2**63 else 0
    if ignored == _NOT_SET:
        return ""
    return (
        f"it divides by how many targets of its own slice are not ignored (ignore_index={ignored}). Sum them "
        f'(reduction="sum"), and divide by a number that does not depend on the slice\'s content, such as y.numel()'
    )


def _summed(node: Any, examples: int) -> str:
    """The same for a sum of a tensor whose first dimension is the examples of the batch."""
    if examples < 2 or node.name() not in _SUMS:
        return ""
    sizes = node._saved_self_sym_sizes
    # Negative dimensions are saved as unsigned numbers.
    over = [d + len(sizes) - 2**64 if d >= 2**63 else d for d in getattr(node, "_saved_dim", None) or (0,)]
    if sizes[:1] != (examples,) or 0 not in over or _is_of_something_else(node, examples):
        return ""
    return "it is a sum over examples (.sum()). Take the mean, or divide it by the examples it is over, len(x)"


def _is_of_something_else(node: Any, examples: int) -> bool:
    """Whether it may sum several losses, or one parameter with as many rows as the batch has examples."""
    while node is not None:
        if node.name() == "StackBackward0":
            return True
        if (leaf := getattr(node, "variable", None)) is not None:
            return leaf.dim() > 0 and len(leaf) == examples
        inner = {following for following, _ in node.next_functions if following is not None}
        node = inner.pop() if len(inner) == 1 else None
    return False


def running_backward() -> tuple[Sequence[Tensor], tuple[str, int]]:
    """The tensors of the running backward pass, and where it was called; nothing if in another thread."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
        frame = frame.f_back
    if frame is None:
        return (), ("", 0)
    tensors: Any = frame.f_locals.get("tensors", ())
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    losses = (tensors,) if isinstance(tensors, Tensor) else cast("Sequence[Tensor]", tensors)
    return losses, (frame.f_code.co_filename, frame.f_lineno)


class FirstLoss:
    """Checks the first loss that reaches a model's parameters, and warns once if it is not a mean over examples."""

    def __init__(self, workers: int, examples: Callable[[], int] = int) -> None:
        self._workers, self._examples = workers, examples
        self._handles: dict[int, RemovableHandle] = {}
        self._done = False

    def watch(self, model: nn.Module) -> None:
        """Check when the first gradient of this model is ready."""
        for parameter in model.parameters():
            if parameter.requires_grad and not self._done and id(parameter) not in self._handles:
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._check)

    def _check(self, parameter: Tensor) -> None:
        if self._done:
            return
        self._done = True
        # Its own hook stays until the end: torch is iterating over that parameter's hooks.
        kept = self._handles.pop(id(parameter))
        self.close()
        self._handles[id(parameter)] = kept
        losses, place = running_backward()
        if reason := next(filter(None, (not_a_mean(loss, self._examples()) for loss in losses)), ""):
            warnings.warn_explicit(
                f"the loss is not a mean over the examples of a batch: {reason}. As it is, {self._workers} workers do "
                f"not learn what one process would (docs/own-loops.md, Losses).",
                UserWarning,
                *place,
            )

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
