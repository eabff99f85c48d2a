"""Which slices of its parameters a worker owns, and the summed gradients of these slices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle, unserializable_hook

from offbeat.errors import RunError
from offbeat.protocols.exchanges import SMALL_GRADIENT
from offbeat.protocols.schedule import Layout
from offbeat.runtime.gradients.sliced_gradient import SlicedGradient, joined_norms, partial_norm
from offbeat.runtime.groups.group import DirectGroup

Range = tuple[int, int]
LEAST_UNIT = 1 << 20
"""Bytes below which parameters are exchanged together with their neighbours."""
UNITS = 8
"""Units into which a model is divided at least, if none becomes too small."""


class Unit(NamedTuple):
    """Neighbouring parameters whose gradients are summed together, and whose values are gathered together."""

    members: tuple[int, ...]  # Indices of its parameters.
    owned: tuple[tuple[Range, ...], ...]  # For each rank, its range of each member.
    block: int  # Elements of each rank's block of the row of all members; 0 where memory is shared.


def units_of(parameters: Sequence[Parameter], size: int, most: int, shared: bool) -> list[Unit]:
    """Divide parameters into units of up to `most` bytes, if one parameter alone is not larger.

    In shared memory each rank owns a block of every large parameter, and all or nothing of a small one. Elsewhere it
    owns a block of the row of all members, so that one exchange moves them all.
    """
    total = sum(p.nbytes for p in parameters)
    capacity = max(LEAST_UNIT, min(most, total // UNITS))
    groups: list[list[int]] = []
    kind: object = None
    nbytes = 0
    for i, parameter in enumerate(parameters):
        own = (parameter.dtype, parameter.device, parameter.requires_grad)
        if own != kind or nbytes + parameter.nbytes > capacity:
            groups.append([])
            kind, nbytes = own, 0
        groups[-1].append(i)
        nbytes += parameter.nbytes
    if not shared:
        return [_in_a_row(members, [parameters[i].numel() for i in members], size) for members in groups]
    owned = _slices([p.numel() for p in parameters], size)
    return [Unit(tuple(members), tuple(tuple(of[i] for i in members) for of in owned), 0) for members in groups]


def _slices(counts: Sequence[int], size: int) -> list[list[Range]]:
    """For each rank, which range of each parameter it owns: a block of a large one, all or nothing of a small one."""
    owned: list[list[Range]] = [[] for _ in range(size)]
    load = np.zeros(size)
    for count in counts:
        if count > SMALL_GRADIENT:
            bounds = Layout(count).blocks(size).tolist()
        else:
            owner = int(load.argmin())
            load[owner] += count
            bounds = [0] * (owner + 1) + [count] * (size - owner)
        for rank in range(size):
            owned[rank].append((bounds[rank], bounds[rank + 1]))
    return owned


def _in_a_row(members: Sequence[int], counts: Sequence[int], size: int) -> Unit:
    """The members side by side in a row, which is padded so that all blocks are equal."""
    block = -(-sum(counts) // size)
    starts = np.cumsum([0, *counts]).tolist()

    def cut(low: int, high: int, start: int, count: int) -> Range:
        return min(max(low - start, 0), count), min(max(high - start, 0), count)

    owned = tuple(
        tuple(cut(rank * block, (rank + 1) * block, *place) for place in zip(starts, counts, strict=False))
        for rank in range(size)
    )
    return Unit(tuple(members), owned, block)


class GradientSlices:
    """The summed gradients of one model's parameters, each as the slice that this worker owns.

    A backward pass must find ordinary gradients to add to. So what an earlier pass left is put aside when a pass
    begins, and added when its sum is there.
    """

    def __init__(self, parameters: Sequence[Parameter], units: Sequence[Unit], group: DirectGroup) -> None:
        self.parameters = list(parameters)
        self._group = group
        ranges = {i: own for unit in units for i, own in zip(unit.members, unit.owned[group.rank], strict=True)}
        self.ranges = [ranges[i] for i in range(len(self.parameters))]
        """This worker's range of each parameter."""
        self.most_bytes = 0
        """The most bytes of slices that were held at once."""
        self._aside: dict[int, Tensor] = {}
        self._norms: dict[tuple[float, int], Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for i, parameter in enumerate(self.parameters):
            trainable = parameter.requires_grad
            parameter.requires_grad_(True)  # Torch refuses hooks on frozen parameters, but keeps existing ones.
            self._handles.append(parameter.register_hook(unserializable_hook(partial(self._put_aside, i))))
            parameter.requires_grad_(trainable)

    def _put_aside(self, index: int, _: Tensor | None = None) -> None:
        """Backward is about to add to a gradient."""
        gradient = self.parameters[index].grad
        if gradient is None:
            self._aside.pop(index, None)  # The loop has cleared it.
        elif isinstance(gradient, SlicedGradient):
            self._aside[index] = gradient.local.clone()
            self.parameters[index].grad = None

    def put_aside(self) -> None:
        """Backward is over: put aside what it has not reached, too."""
        for i, parameter in enumerate(self.parameters):
            if isinstance(parameter.grad, SlicedGradient):
                self._put_aside(i)

    def put_back(self) -> None:
        """All sums are there: show what no worker has added to."""
        for i in [i for i in self._aside if self.parameters[i].grad is None]:
            self._show(i, self._aside.pop(i))

    def take(self, index: int, local: Tensor) -> None:
        """The sum of a parameter's gradient is there, as this worker's slice of it."""
        earlier = self._aside.pop(index, None)
        self._show(index, local if earlier is None else local.add_(earlier))

    def _show(self, index: int, local: Tensor) -> None:
        parameter = self.parameters[index]
        self.changed()
        parameter.grad = SlicedGradient(local.detach(), self.ranges[index][0], parameter.shape, self)

    def slice_whole(self) -> None:
        """Gradients are summed in place, at least this worker's slices of them: show these only."""
        for i, parameter in enumerate(self.parameters):
            gradient, (low, high) = parameter.grad, self.ranges[i]
            if gradient is not None and not isinstance(gradient, SlicedGradient):
                self.take(i, gradient.detach().reshape(-1)[low:high])
        self.put_back()

    def of(self, index: int) -> Tensor | None:
        """The slice here of a parameter's gradient; None if there is no gradient, or the slice is empty."""
        gradient, (low, high) = self.parameters[index].grad, self.ranges[index]
        if gradient is None or low == high:
            return None
        if isinstance(gradient, SlicedGradient):
            return gradient.local
        if gradient.is_sparse:
            raise RunError(
                f"the gradient of a parameter of shape {tuple(gradient.shape)} is sparse, and only slices of dense "
                f"ones can be applied. Use a module with sparse=True, or dense gradients."
            )
        return gradient.detach().reshape(-1)[low:high]  # The loop has computed it.

    # -- the whole, from all workers' slices ------------------------------------------------------------------------

    def changed(self) -> None:
        """A gradient changes: norms must be computed again."""
        if self._norms:
            self._norms.clear()

    def norm(self, gradient: SlicedGradient, order: float, dtype: torch.dtype | None) -> Tensor:
        """A norm of a whole gradient. Collective; the norms of the others are exchanged with it."""
        key = order, id(gradient.local)
        if key not in self._norms:
            current = [p.grad.local for p in self.parameters if isinstance(p.grad, SlicedGradient)]
            if all(local is not gradient.local for local in current):
                current = [gradient.local]
            parts = [partial_norm(local, order) for local in current]
            norms = joined_norms(self._group.gather(parts, "the norms of sliced gradients"), order)
            self._norms |= {(order, id(local)): norm for local, norm in zip(current, norms, strict=True)}
        return self._norms[key].to(dtype or gradient.dtype)

    def whole(self, gradient: SlicedGradient) -> Tensor:
        """A whole gradient. Collective."""
        flat = torch.zeros(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
        flat[gradient.low : gradient.low + gradient.local.numel()] = gradient.local
        return self._group.sum(flat, "the gathering of a sliced gradient").view(gradient.shape)

    def most(self, number: Tensor) -> None:
        """Replace a number by the largest of all workers'. Collective."""
        number.fill_(float(self._group.gather([float(number)], "a check of sliced gradients").max()))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._aside.clear()
