"""A look at the first loss of a loop, which exchanges take for a mean over the examples of a batch.

The gradient of one process is the mean of the workers' gradients, weighted by their examples, only if the loss is a
mean over examples. One that sums, or divides by something else than the number of examples, gives another gradient on
several workers. The loss itself is never handed to us, but while its backward pass runs it is found on the stack, and
its graph says how it was reduced.
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
"""What torch calls reduction="sum" in a graph."""
_NOT_SET = -100
"""What torch ignores if nobody says what to ignore."""
_NODES = 64
"""How far from its end a graph is looked at: losses are near it."""
_WEIGHTED = ("NllLossBackward0", "NllLoss2DBackward0")
_SUMS = ("SumBackward0", "SumBackward1")
_ADDED = (*_SUMS, "AddBackward0", "SubBackward0", "NegBackward0", "SqueezeBackward0", "ViewBackward0")
"""What may stand between a loss and a sum over examples that nobody divides."""
_SCALED = ("DivBackward0", "MulBackward0", "MulBackward1", "MeanBackward0")


def not_a_mean(loss: Tensor, examples: int = 0) -> str:
    """What shows that a loss is not a mean over examples, and what to write instead; empty if nothing does.

    `examples` is how many the batch has here; 0 if nobody knows, and then sums by hand are not recognized.
    """
    waiting: deque[tuple[Any, bool, bool]] = deque([(loss.grad_fn, False, True)])
    seen: set[Any] = set()
    while waiting and len(seen) < _NODES:
        node, scaled, added = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if found := _reduced(node, scaled) or (_summed(node, examples) if added else ""):
            return found
        scaled, added = scaled or node.name() in _SCALED, added and node.name() in _ADDED
        waiting += [(inner, scaled, added) for inner, _ in node.next_functions]
    return ""


def _reduced(node: Any, scaled: bool) -> str:
    name = node.name()
    if getattr(node, "_saved_reduction", None) == _SUM:
        # Whoever divides the sum has thought of it.
        return "" if scaled else 'it is a sum (reduction="sum"). Divide it by the examples it is over, len(x)'
    if name not in _WEIGHTED:
        return ""
    if _has_weights(node):
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
    """Whether it is the sum of a tensor whose first dimension is the examples of the batch."""
    if examples < 2 or node.name() not in _SUMS:
        return ""
    sizes = node._saved_self_sym_sizes
    # Negative dimensions are saved as numbers without a sign.
    over = [d + len(sizes) - 2**64 if d >= 2**63 else d for d in getattr(node, "_saved_dim", None) or (0,)]
    if sizes[:1] != (examples,) or 0 not in over or _is_of_something_else(node, examples):
        return ""
    return "it is a sum over examples (.sum()). Take the mean, or divide it by the examples it is over, len(x)"


def _is_of_something_else(node: Any, examples: int) -> bool:
    """Whether it may be a sum of several losses, or over one parameter, of as many rows as the batch has examples."""
    while node is not None:
        if node.name() == "StackBackward0":
            return True
        if (leaf := getattr(node, "variable", None)) is not None:
            return leaf.dim() > 0 and len(leaf) == examples
        inner = {following for following, _ in node.next_functions if following is not None}
        node = inner.pop() if len(inner) == 1 else None
    return False


def _has_weights(node: Any) -> bool:
    try:
        return node._saved_weight is not None
    except RuntimeError:
        return True  # They were there: backward has let go of them.


def running_backward() -> tuple[Sequence[Tensor], tuple[str, int]]:
    """What the backward pass that calls this is of, and where it was asked for; nothing if another thread has."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
        frame = frame.f_back
    if frame is None:
        return (), ("", 0)
    found: Any = frame.f_locals.get("tensors", ())
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    losses = (found,) if isinstance(found, Tensor) else cast("Sequence[Tensor]", found)
    return losses, (frame.f_code.co_filename, frame.f_lineno)


class FirstLoss:
    """Looks at the first loss that reaches a model's parameters, and warns once if it is not a mean over examples."""

    def __init__(self, workers: int, examples: Callable[[], int] = int) -> None:
        self._workers, self._examples = workers, examples
        self._handles: dict[int, RemovableHandle] = {}
        self._done = False

    def watch(self, model: nn.Module) -> None:
        """Look when the first gradient of this model is there."""
        for parameter in model.parameters():
            if parameter.requires_grad and not self._done and id(parameter) not in self._handles:
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._look)

    def _look(self, parameter: Tensor) -> None:
        if self._done:
            return
        self._done = True
        # Its own hook stays until the end: torch is going through that parameter's hooks.
        kept = self._handles.pop(id(parameter))
        self.close()
        self._handles[id(parameter)] = kept
        losses, place = running_backward()
        if found := next(filter(None, (not_a_mean(loss, self._examples()) for loss in losses)), ""):
            warnings.warn_explicit(
                f"the loss is not a mean over the examples of a batch: {found}. As it is, {self._workers} workers do "
                f"not learn what one process would (docs/own-loops.md, Losses).",
                UserWarning,
                *place,
            )

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
