"""Gradients that are summed in place, through shared memory, when backward is over.

With a core for every worker and none to spare, an exchange that overlaps backward only takes time from it, and filling
buckets costs as much as the exchange itself. So nothing is done while backward runs. Then the workers exchange headers
(see `runtime.gradients.header`), and every large gradient goes through shared memory piece by piece, is weighted on its
way in, and comes back in place. Small ones are packed into one flat buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from offbeat.errors import RunError
from offbeat.protocols.collectives import Collective
from offbeat.protocols.exchanges import Exchanged, GradientShape, sums_in_memory
from offbeat.runtime.gradients.buckets import BackwardExchange, hook
from offbeat.runtime.gradients.header import Header
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.stopwatch import Stopwatch


class SmallGradients:
    """Small gradients of one dtype in one flat buffer (`flat`), and its parts in their shapes (`views`)."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        """Room for the gradients of these parameters."""
        self.parameters = list(parameters)
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
        pieces = self.flat.split([p.numel() for p in parameters])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]

    def fill(self, weight: float) -> None:
        """Copy the gradients into the buffer, weighted; zeros where there are none."""
        gradients = [p.grad for p in self.parameters]
        if any(gradient is None or gradient is view for gradient, view in zip(gradients, self.views, strict=True)):
            for gradient, view in zip(gradients, self.views, strict=True):
                if gradient is None:
                    view.zero_()
                elif gradient is not view:
                    view.copy_(gradient)
        else:
            torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None], out=self.flat)
        self.flat.mul_(weight)

    def hand_out(self) -> None:
        """Make the parts of the buffer the parameters' gradients."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view


class GradientSums(BackwardExchange):
    """The gradients of one model, replaced after every backward pass by their weighted mean over the workers."""

    flags: ClassVar[int] = 0
    """Length of `_flags()`."""

    def __init__(
        self, parameters: Iterable[Parameter], group: DirectGroup, stopwatch: Stopwatch, own_blocks: bool = False
    ) -> None:
        super().__init__(parameters, group, stopwatch)
        self._group, self._own_blocks = group, own_blocks
        self._header = Header(group, stopwatch, len(self.parameters) + self.flags)
        self._row = torch.zeros(self._header.length, dtype=torch.float64)
        nbytes, by = self._row.nbytes, group.algorithm(Collective.ALL_REDUCE, self._row.nbytes)
        self._header_exchange = Exchanged(what="all_reduce", by=by, nbytes=nbytes, itemsize=self._row.itemsize)
        self.beforehand: list[Callable[[], None]] = []
        """Called when backward is over, before gradients are exchanged."""
        self._planned: dict[bytes, tuple[list[SmallGradients], list[list[Parameter]], tuple[Exchanged, ...]]] = {}
        self._handles = [hook(p, self.begin) for p in self.parameters]

    def state(self) -> list[Any]:
        """Empty: passes are independent."""
        return []

    def load(self, state: Sequence[Any]) -> None:
        """Refuse the state of buckets."""
        if state:
            raise RunError("this checkpoint was written where gradients went through buckets; resume it there")

    def begin(self, _: Tensor) -> None:
        """Backward has begun: exchange gradients when it ends. Called by hooks; the first call of a pass counts."""
        if not self.running and not self.suspended:
            self.running = True
            Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore[reportPrivateUsage]

    def _finish(self) -> None:
        self.running = False
        for first in self.beforehand:
            first()
        if self.parameters:
            entered = time.perf_counter()
            before = self._stopwatch.switch("communicate")
            numbers = self._row.numpy()
            with torch.no_grad():
                used = [float(p.grad is not None) for p in self.parameters]
                self._header.write(numbers, np.array([*used, *self._flags()], dtype=np.float64))
                self._group.sum(self._row, "the sum of example counts")
                self._header.check(numbers)
                self._exchange(numbers)
            self._header.account(numbers, entered)
            self._stopwatch.switch(before)
        for then in self.afterwards:
            then()

    def _flags(self) -> Sequence[float]:
        """Further numbers in the header, after the use of parameters; they are summed."""
        return ()

    def _exchange(self, numbers: Any) -> None:
        used = self._header.used(numbers) > 0
        weight = self._header.examples / max(float(numbers[0]), 1e-30)
        packs, in_place, self.exchanges = self._planned.get(used.tobytes()) or self._plan(used)
        for pack in packs:
            pack.fill(weight)
            self._group.sum(pack.flat, "the sum of small gradients")
            pack.hand_out()
        for parameters in in_place:
            gradients = [gradient_of(p) for p in parameters]
            held = [gradient.contiguous() for gradient in gradients]  # Copies only those that are not.
            real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in held]
            self._group.sum_in_place(real, weight, self._own_blocks, "the sum of gradients")
            for gradient, copy in zip(gradients, held, strict=True):
                if copy is not gradient:
                    gradient.copy_(copy)

    def _plan(self, used: NDArray[Any]) -> tuple[list[SmallGradients], list[list[Parameter]], tuple[Exchanged, ...]]:
        members, group = [self.parameters[i] for i in np.flatnonzero(used)], self._group
        plan = sums_in_memory(
            [GradientShape(p.dtype, p.numel(), p.element_size()) for p in members],
            lambda nbytes: group.algorithm(Collective.ALL_REDUCE, nbytes),
            self._own_blocks,
        )
        packs = [SmallGradients([members[i] for i in numbers]) for numbers in plan.packed]
        in_place = [[members[i] for i in numbers] for numbers in plan.in_place]
        planned = packs, in_place, (self._header_exchange, *plan.exchanges)
        self._planned = {used.tobytes(): planned}  # Only the last: which parameters are used rarely changes.
        return planned


def gradient_of(parameter: Parameter) -> Tensor:
    """A parameter's gradient, detached; zeros if only other workers used it."""
    gradient = parameter.grad
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    if gradient.is_sparse:
        raise RunError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, but belongs to no module with "
            f"sparse=True, such as nn.Embedding(sparse=True). Use such a module, or dense gradients."
        )
    return gradient.detach()
