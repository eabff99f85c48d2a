"""Gradients that are summed while backward runs, and of which each worker keeps only its slices.

As soon as all gradients of a unit (neighbouring parameters, see `runtime.gradients.slices`) are there, they are summed
and scattered, and their memory is released. Units are summed in a fixed order, the same on every worker: after the
first pass, the order in which they became ready on worker 0. The header follows when backward is over.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.2.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from offbeat.errors import RunError
from offbeat.protocols.collectives import Collective
from offbeat.protocols.exchanges import GradientShape, sums_in_memory
from offbeat.runtime.gradients.buckets import BackwardExchange, hook
from offbeat.runtime.gradients.header import Header
from offbeat.runtime.gradients.in_place import SmallGradients, gradient_of
from offbeat.runtime.gradients.slices import GradientSlices, Unit
from offbeat.runtime.groups.blocks import Blocks
from offbeat.runtime.groups.group import DirectGroup, Pending
from offbeat.runtime.run.stopwatch import Stopwatch

_IN_FLIGHT = 2
"""Units whose sums are in flight at once, between hosts: their whole gradients are still in memory."""


class _Way(Protocol):
    """How the gradients of a unit are summed and sliced."""

    def start(self, unit: Unit, weight: float) -> None:
        """Sum the gradients of a unit's trainable members, and release them."""
        ...

    def finish(self) -> dict[int, Tensor]:
        """All slices, by the number of the parameter."""
        ...


class SlicedSums(BackwardExchange):
    """The gradients of one model, each replaced by this worker's slice of their weighted mean over the workers."""

    def __init__(self, slices: GradientSlices, units: Sequence[Unit], group: DirectGroup, stopwatch: Stopwatch) -> None:
        super().__init__(slices.parameters, group, stopwatch)
        self._group, self._slices, self._units = group, slices, units
        self.order: Callable[[], int] = lambda: 0
        """A checksum of what else the workers have exchanged so far; it must be the same on all of them."""
        self._header = Header(group, stopwatch, len(self.parameters) + group.size)
        self._row = torch.zeros(self._header.length, dtype=torch.float64)
        self._in_memory = group.shares_memory
        way = _InMemory if self._in_memory else _ByMessages
        self._way: _Way = way(self.parameters, slices, group)
        self._home = {id(self.parameters[i]): (n, i) for n, unit in enumerate(units) for i in unit.members}
        self._order = list(reversed(range(len(units))))
        self._settled = False
        self._seen: list[int] = []
        self._missing: list[int] = []
        self._reached = [False] * len(self.parameters)
        self._used = np.zeros(len(self.parameters))
        self._next, self._started, self._scale = 0, 0.0, 1.0
        self._handles = [hook(p, self._ready) for p in self.parameters]

    def state(self) -> list[Any]:
        """Empty: the order of units changes no bits."""
        return []

    def load(self, state: Sequence[Any]) -> None:
        """Nothing to restore."""
        del state

    def begin(self, _: Tensor) -> None:
        """Backward has begun: hand gradients back when it ends. Called by hooks; the first call of a pass counts."""
        if self.running or self.suspended:
            return
        self.running = True
        Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore[reportPrivateUsage]
        self._scale = self._header.examples / (self._header.total or 1.0)
        self._missing = [sum(self.parameters[i].requires_grad for i in unit.members) for unit in self._units]
        self._reached = [False] * len(self.parameters)
        self._used[:] = 0.0
        self._next, self._started = 0, 0.0
        self._group.sent.record()

    def _ready(self, parameter: Tensor) -> None:
        """Backward has finished this parameter's gradient."""
        if self.suspended:
            return
        self.begin(parameter)
        number, index = self._home[id(parameter)]
        if self._reached[index]:
            raise RunError(
                f"parameter {index} got its gradient twice in one backward pass, as reentrant activation checkpointing "
                f"does, or an earlier pass was interrupted by an exception. Use torch.utils.checkpoint with "
                f"use_reentrant=False, and do not go on after a backward pass that failed."
            )
        self._reached[index] = True
        self._missing[number] -= 1
        if not self._missing[number] and not self._settled:
            self._seen.append(number)
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            self._start_next()

    def _start_next(self) -> None:
        unit = self._units[self._order[self._next]]
        self._next += 1
        trainable = [i for i in unit.members if self.parameters[i].requires_grad]
        if not trainable:
            return
        for i in trainable:
            self._used[i] = float(self.parameters[i].grad is not None)
        self._started = self._started or time.perf_counter()
        before = self._stopwatch.switch("communicate")
        with torch.no_grad():
            self._way.start(unit, self._scale)
        self._stopwatch.switch(before)

    def _finish(self) -> None:
        """Backward is over: sum what is left, exchange headers, and hand slices out."""
        self.running = False
        if self.parameters:
            entered = time.perf_counter()
            before = self._stopwatch.switch("communicate")
            self._slices.put_aside()
            while self._next < len(self._order):
                self._start_next()
            with torch.no_grad():
                self._conclude(entered)
            self._stopwatch.switch(before)
        for then in self.afterwards:
            then()

    def _conclude(self, entered: float) -> None:
        numbers = self._row.numpy()
        orders = np.zeros(self._group.size)
        orders[self._group.rank] = self.order()
        self._header.write(numbers, np.concatenate([self._used, orders]))
        self._group.sum(self._row, "the sum of example counts")
        self._header.check(numbers)
        users, orders = np.split(self._header.used(numbers), [len(self.parameters)])
        if orders.min() != orders.max():
            raise RunError(
                "the workers have gathered different parameters, or in another order, so they took different ways "
                "through the model, and what they computed is wrong. Under shard=parameters every worker must run "
                "the same modules equally often between two steps: evaluate inside team.averaged(), or use "
                "shard=gradients."
            )
        sums = self._way.finish()
        self.exchanges = self._group.sent.recorded()
        factor = 1.0 if self._header.total else 1.0 / max(float(numbers[0]), 1e-30)
        held = 0
        for i, local in sums.items():
            if users[i] > 0:
                held += local.nbytes
                self._slices.take(i, local if factor == 1.0 else local.mul_(factor))
        self._slices.put_back()
        self._slices.most_bytes = max(self._slices.most_bytes, held)
        if not self._in_memory:
            self._stopwatch.overlapped += max(0.0, entered - (self._started or entered))
        self._header.account(numbers, entered)
        if not self._settled:
            self._settle()

    def _settle(self) -> None:
        """Agree on the order in which units are summed from the next pass on."""
        self._settled = True
        unseen = [number for number in self._order if number not in set(self._seen)]
        order = torch.tensor(self._seen + unseen)
        self._order = [int(number) for number in self._group.share(order, "the order of gradients")]


class _InMemory:
    """Through shared memory: large gradients in place, small ones side by side."""

    def __init__(self, parameters: Sequence[Parameter], slices: GradientSlices, group: DirectGroup) -> None:
        self._parameters, self._slices, self._group = parameters, slices, group
        self._plans: dict[tuple[int, ...], tuple[list[tuple[SmallGradients, list[int]]], list[list[int]]]] = {}
        self._done: dict[int, Tensor] = {}

    def start(self, unit: Unit, weight: float) -> None:
        members = tuple(i for i in unit.members if self._parameters[i].requires_grad)
        packs, in_place = self._plans.get(members) or self._plan(members)
        for pack, numbers in packs:
            pack.fill(weight)
            self._group.sum(pack.flat, "the sum of small gradients")
            for i, view in zip(numbers, pack.views, strict=True):
                self._keep(i, view)
        for numbers in in_place:
            whole = [gradient_of(self._parameters[i]).contiguous() for i in numbers]
            self._group.sum_in_place(whole, weight, True, "the sum of gradients")
            for i, gradient in zip(numbers, whole, strict=True):
                self._keep(i, gradient)

    def _keep(self, index: int, gradient: Tensor) -> None:
        low, high = self._slices.ranges[index]
        self._done[index] = gradient.view(-1)[low:high].clone()
        self._parameters[index].grad = None

    def finish(self) -> dict[int, Tensor]:
        done, self._done = self._done, {}
        return done

    def _plan(self, members: tuple[int, ...]) -> tuple[list[tuple[SmallGradients, list[int]]], list[list[int]]]:
        parameters, group = self._parameters, self._group
        plan = sums_in_memory(
            [GradientShape(parameters[i].dtype, parameters[i].numel(), parameters[i].element_size()) for i in members],
            lambda nbytes: group.algorithm(Collective.ALL_REDUCE, nbytes),
            own_blocks=True,
        )
        packed = [[members[k] for k in numbers] for numbers in plan.packed]
        in_place = [[members[k] for k in numbers] for numbers in plan.in_place]
        packs = [(SmallGradients([parameters[i] for i in numbers]), numbers) for numbers in packed]
        self._plans[members] = packs, in_place
        return packs, in_place


class _ByMessages:
    """By a reduce-scatter of the row of a unit's gradients, while backward goes on."""

    def __init__(self, parameters: Sequence[Parameter], slices: GradientSlices, group: DirectGroup) -> None:
        self._parameters, self._slices = parameters, slices
        self._size, self._blocks = group.size, Blocks(group)
        self._in_flight: deque[tuple[Unit, Tensor, Pending]] = deque()
        self._done: dict[int, Tensor] = {}

    def start(self, unit: Unit, weight: float) -> None:
        first = self._parameters[unit.members[0]]
        row = torch.empty(unit.block * self._size, dtype=first.dtype, device=first.device)
        counts = [self._parameters[i].numel() for i in unit.members]
        pieces = row.split([*counts, row.numel() - sum(counts)])
        for i, piece in zip(unit.members, pieces, strict=False):
            parameter = self._parameters[i]
            if parameter.grad is None:
                piece.zero_()
            else:
                torch.mul(gradient_of(parameter), weight, out=piece.view(parameter.shape))
                parameter.grad = None
        pieces[-1].zero_()
        self._in_flight.append((unit, row, self._blocks.start_scatter(row, "the sum of gradients")))
        if len(self._in_flight) > _IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        unit, row, pending = self._in_flight.popleft()
        pending.wait()
        own = self._blocks.own(row).clone()
        ranges = [self._slices.ranges[i] for i in unit.members]
        at = np.cumsum([0, *(high - low for low, high in ranges)]).tolist()
        for i, (start, stop) in zip(unit.members, pairwise(at), strict=True):
            self._done[i] = own[start:stop]

    def finish(self) -> dict[int, Tensor]:
        while self._in_flight:
            self._land()
        done, self._done = self._done, {}
        return done
