"""Backward through a part of a model, at once or in two: gradients of its inputs first, those of its weights later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of all leaves."""
    if roots:
        torch.autograd.backward(list(roots), list(gradients))


def input_gradients(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    weights: Sequence[Parameter],
) -> Callable[[], None]:
    """Add the gradients of a part's inputs; call the result to add those of its weights.

    What lies between the inputs and the outputs is computed once: the second call begins at the places where weights
    join that path (Qi et al. 2024, section 2.1; the search for these places is torch's).
    """
    if not roots or not inputs:
        return lambda: backward(roots, gradients)  # Nobody waits for anything of it.
    from torch.distributed.pipelining import _backward as torchs  # Late: it imports much.

    trained = [weight for weight in weights if weight.requires_grad]
    of_outputs: Any = None if gradients[0] is None else list(gradients)
    _, groups = torchs.stage_backward_input(list(roots), of_outputs, list(inputs), iter(trained))

    def rest() -> None:
        torchs.stage_backward_weight(iter(trained), groups)

    return rest
