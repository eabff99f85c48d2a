"""Gradients that are summed compressed, when backward is over.

Half-precision gradients are stored as float32, complex ones as pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from offbeat.errors import RunError
from offbeat.protocols.compression import Shapes
from offbeat.runtime.compression.account import CompressionAccount
from offbeat.runtime.compression.coder import Feedback, all_finite
from offbeat.runtime.gradients.in_place import GradientSums, gradient_of
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.stopwatch import Stopwatch


class CompressedSums(GradientSums):
    """The gradients of one model, replaced after every backward pass by their weighted mean, compressed.

    If any worker has a gradient that is NaN or infinite, that pass goes uncompressed: all workers see it, and neither
    the error feedback nor the state of a coder is affected.
    """

    flags = 1

    def __init__(
        self,
        parameters: Iterable[Parameter],
        group: DirectGroup,
        stopwatch: Stopwatch,
        compressor: Callable[[Shapes, int], Feedback],
    ) -> None:
        super().__init__(parameters, group, stopwatch)
        kinds = sorted({_kind(p) for p in self.parameters}, key=str)
        chosen = [[i for i, p in enumerate(self.parameters) if _kind(p) == kind] for kind in kinds]
        self._rows = [_Row(self.parameters, members, compressor, n) for n, members in enumerate(chosen)]

    @property
    def accounts(self) -> list[CompressionAccount]:
        """Totals of compressing each row so far."""
        return [row.account for row in self._rows]

    def state(self) -> list[Any]:
        """Error feedback and the coders' state."""
        return [row.feedback.state_dict() for row in self._rows]

    def load(self, state: Sequence[Any]) -> None:
        """Restore such a state."""
        if len(state) != len(self._rows):
            raise RunError("this checkpoint was written by another strategy or model; resume it with that one")
        for row, own in zip(self._rows, state, strict=True):
            row.feedback.load_state_dict(own)

    def _flags(self) -> Sequence[float]:
        gradients = [p.grad.detach() for p in self.parameters if p.grad is not None and not p.grad.is_sparse]
        return (float(not all_finite(gradients)),)

    def _exchange(self, numbers: Any) -> None:
        flags = self._header.used(numbers) > 0
        used, unfit = flags[:-1], bool(flags[-1])
        weight = self._header.examples / max(float(numbers[0]), 1e-30)
        self._group.sent.record()
        for row in self._rows:
            members = used[row.members]
            if not members.any():
                continue
            if unfit:
                row.fill(weight, members, dense=True)
                self._group.sum(row.flat, "the sum of gradients that are not finite")
                row.hand_out(members)
                continue
            with row.account.counted(self._group, row.flat, "the sum of compressed gradients") as link:
                row.fill(weight, members)
                row.feedback.settle(row.flat, link, row.idle(members))
            row.hand_out(members)
        self.exchanges = (self._header_exchange, *self._group.sent.recorded())


class _Row:
    """Gradients of one dtype in one row."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        members: Sequence[int],
        compressor: Callable[[Shapes, int], Feedback],
        number: int,
    ) -> None:
        self.members = np.array(members)
        self.parameters = [parameters[i] for i in members]
        shapes = [tuple(_real(p.detach()).shape) for p in self.parameters]
        sizes = [int(np.prod(shape)) for shape in shapes]
        self._bounds = np.cumsum([0, *sizes]).tolist()
        self.flat = torch.zeros(sum(sizes), dtype=_kind(self.parameters[0]))
        self._views = [piece.view(shape) for piece, shape in zip(self.flat.split(sizes), shapes, strict=True)]
        self.feedback = compressor(shapes, number)
        self.account = CompressionAccount()

    def fill(self, weight: float, used: Any, dense: bool = False) -> None:
        """Add this worker's weighted gradients to its error; without error feedback, or `dense`, write them to the row.

        One pass over memory: four workers on two cores wait for memory more than for anything else.
        """
        owed = self.feedback.owing(self.flat) if self.feedback.on and not dense else None
        for parameter, view, low, here in zip(self.parameters, self._views, self._bounds, used, strict=False):
            if not here or parameter.grad is None:
                view.zero_() if owed is None else None
                continue
            gradient = _real(gradient_of(parameter)).to(view.device)
            if owed is not None:
                owed[low : low + view.numel()].view_as(view).add_(gradient, alpha=weight)
            elif gradient.dtype == view.dtype:
                torch.mul(gradient, weight, out=view)
            else:
                view.copy_(gradient).mul_(weight)

    def idle(self, used: Any) -> list[slice]:
        """The parts of parameters that no worker has used."""
        bounds = zip(self._bounds, self._bounds[1:], strict=False)
        return [slice(low, high) for (low, high), here in zip(bounds, used, strict=True) if not here]

    def hand_out(self, used: Any) -> None:
        """Hand the mean to all parameters that any worker has used."""
        for parameter, view, here in zip(self.parameters, self._views, used, strict=True):
            if here and parameter.grad is not view:
                whole = torch.view_as_complex(view) if parameter.is_complex() else view
                parameter.grad = whole.to(parameter.device, parameter.dtype)


def _kind(parameter: Parameter) -> torch.dtype:
    return torch.float64 if parameter.dtype in (torch.float64, torch.complex128) else torch.float32


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
