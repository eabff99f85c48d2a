"""Norms of gradients that several workers hold, as sums that can be added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter


def power_sums(parameters: Sequence[Parameter], order: float) -> list[float]:
    """For each gradient here, the sum of its magnitudes to a power; the largest one for the order infinity."""
    # As plain tensors: what stands for the gradients of other workers too would ask them.
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return [_power_sum(parameter, order) for parameter in parameters]


def _power_sum(parameter: Parameter, order: float) -> float:
    gradient = parameter.grad
    if gradient is None or not gradient.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(gradient, order, dtype=torch.float64))
    return norm if order in (0.0, float("inf")) else norm**order
