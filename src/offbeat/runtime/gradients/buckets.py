"""Gradients in flat buckets that are summed over the workers while backward still goes on.

A hook on each parameter copies its finished gradient into the bucket's flat buffer; a full bucket's exchange starts
at once. Buckets start in a fixed order, the same on every worker, so that exchanges match up without a message.
After the first pass the buckets are cut anew in the order in which gradients really became ready.

The last bucket carries the header (see `runtime.gradients.header`). By it a parameter that no worker used keeps its
gradient untouched, as it would in one process.

Parameters that are frozen at first are watched too: when they are unfrozen, the buckets are cut anew with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from offbeat.errors import RunError
from offbeat.protocols.exchanges import Exchanged
from offbeat.runtime.gradients.header import Header
from offbeat.runtime.groups.group import Group, Pending
from offbeat.runtime.run.stopwatch import Stopwatch

FIRST_BYTES = 1 << 20
"""The first bucket is small, so that the exchange starts soon after backward does."""
_SMALL = 1 << 14
"""Elements below which the overhead of an operation on one gradient outweighs another pass over the bucket."""


class _Bucket:
    """One flat buffer and the parameters that live in it."""

    def __init__(self, members: Sequence[int], parameters: Sequence[Parameter], extra: int) -> None:
        first = parameters[members[0]]
        self.members = tuple(members)
        size = sum(parameters[i].numel() for i in members)
        self.flat = torch.zeros(size + extra, dtype=first.dtype, device=first.device)
        self.gradients = self.flat[:size]
        """The buffer without the header that may ride at its end."""
        pieces = self.gradients.split([parameters[i].numel() for i in members])
        self.views = [piece.view(parameters[i].shape) for piece, i in zip(pieces, members, strict=True)]
        self.missing = len(members)
        self.pending: Pending | None = None
        self.small = size < _SMALL * len(members)
        """Whether its gradients are scaled all at once when it is full, instead of one by one as they are copied."""


class GradientBuckets:
    """The gradients of one model, replaced after every backward pass by their weighted mean over the workers."""

    def __init__(self, parameters: Iterable[Parameter], group: Group, stopwatch: Stopwatch, capacity: int) -> None:
        self._given = [p for p in parameters if p.is_floating_point() or p.is_complex()]
        self.parameters = [p for p in self._given if p.requires_grad]
        """Those whose gradients are exchanged: the trainable ones, then those that were unfrozen later."""
        self.suspended = False
        self.order: list[int] | None = None
        """The order in which gradients become ready, as worker 0 saw it in the first pass."""
        self.exchanges: tuple[Exchanged, ...] = ()
        """What the workers exchanged in the last pass."""
        self.afterwards: list[Callable[[], None]] = []
        """Called when the gradients of a backward pass have been handed back."""
        self._group, self._stopwatch, self._capacity = group, stopwatch, capacity
        self._scale = 1.0 / group.size
        self._seen: list[int] = []
        self.running = False
        """Whether a backward pass has begun and is not over."""
        self._header = Header(group, stopwatch, 0)
        self._handles = [hook(p, self._ready) for p in self._given]
        self._enlist([])

    def weigh(self, examples: float, total: float | None) -> None:
        """The coming passes stand for `examples` examples here and `total` over all workers (None: not known)."""
        self._header.weigh(examples, total)
        self._scale = self._header.examples / (self._header.total or 1.0)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def adopt_order(self, order: Sequence[int]) -> None:
        """Cut the buckets in this order of readiness."""
        if sorted(order) != list(range(len(self.parameters))):
            raise RunError(
                f"an order of {len(order)} gradients does not fit a model of {len(self.parameters)} parameters"
            )
        self.order = list(order)
        self._build(self.order)

    def state(self) -> list[Any]:
        """Which parameters are exchanged, and in which order."""
        return [self.enlisted, self.order]

    def load(self, state: Sequence[Any]) -> None:
        """The same buckets as before."""
        if not state:
            raise RunError("this checkpoint was written where gradients went through shared memory; resume it there")
        enlisted, order = state
        self.enlist(enlisted)
        if order is not None:
            self.adopt_order(order)

    @property
    def enlisted(self) -> list[int]:
        """Which of the parameters given at the start are exchanged, in the order of `parameters`."""
        places = {id(p): i for i, p in enumerate(self._given)}
        return [places[id(p)] for p in self.parameters]

    def enlist(self, places: Sequence[int]) -> None:
        """Exchange exactly these of the parameters given at the start, as a run that goes on did before."""
        self.parameters = [self._given[i] for i in places]
        self._enlist([])

    def _enlist(self, unfrozen: Sequence[Parameter]) -> None:
        self.parameters += unfrozen
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._frozen = [p for p in self._given if id(p) not in self._index]
        self.order = None
        self._seen = []
        self._build(range(len(self.parameters) - 1, -1, -1))

    def _build(self, order: Iterable[int]) -> None:
        groups: list[list[int]] = []
        size, limit = 0, FIRST_BYTES
        for i in order:
            parameter = self.parameters[i]
            fits = bool(groups) and size < limit and _alike(parameter, self.parameters[groups[-1][0]])
            if not fits:
                if len(groups) == 1:
                    limit = self._capacity
                groups.append([])
                size = 0
            groups[-1].append(i)
            size += parameter.numel() * parameter.element_size()
        told = self._header
        self._header = Header(self._group, self._stopwatch, len(self.parameters))
        self._header.examples, self._header.total, self._header.batch = told.examples, told.total, told.batch
        count = self._header.length
        last = self.parameters[groups[-1][0]] if groups else None
        rides = last is not None and last.dtype in (torch.float32, torch.float64) and last.device.type == "cpu"
        self._buckets = [
            _Bucket(members, self.parameters, count if rides and n == len(groups) - 1 else 0)
            for n, members in enumerate(groups)
        ]
        self._row = self._buckets[-1].flat[-count:] if rides else torch.zeros(count, dtype=torch.float64)
        self._rides = rides
        self._numbers: NDArray[Any] = self._row.numpy()
        self._header_pending: Pending | None = None
        self._home = {i: (n, k) for n, bucket in enumerate(self._buckets) for k, i in enumerate(bucket.members)}
        self._state = [False] * len(self.parameters)
        self._used = np.ones(len(self.parameters))
        self._next = 0
        self._first_launch = 0.0

    def begin(self, _: Tensor) -> None:
        """Backward has begun: when it ends, gradients are handed back. Called by hooks; once for each pass counts."""
        if self.running or self.suspended:
            return
        self.running = True
        Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore[reportPrivateUsage]
        unfrozen = [p for p in self._frozen if p.requires_grad] if self._frozen else None
        if unfrozen:
            self._enlist(unfrozen)

    def _ready(self, parameter: Tensor) -> None:
        """Backward has finished this parameter's gradient."""
        if self.suspended:
            return
        self.begin(parameter)
        index = self._index.get(id(parameter))
        if index is None:
            raise RunError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient although it was frozen when backward "
                f"began. Freeze and unfreeze parameters between steps, not between forward and backward."
            )
        if self._state[index]:
            raise RunError(
                f"parameter {index} got its gradient twice in one backward pass, as reentrant activation checkpointing "
                f"does, or an earlier pass was broken off by an exception. Use torch.utils.checkpoint with "
                f"use_reentrant=False, and do not go on after a backward pass that failed."
            )
        if self.order is None:
            self._seen.append(index)
        number, k = self._home[index]
        self._take(self._buckets[number], k, index, parameter)
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch()

    def _take(self, bucket: _Bucket, k: int, index: int, parameter: Tensor) -> None:
        view, gradient = bucket.views[k], parameter.grad
        if torch.is_grad_enabled():  # Only in a backward pass with create_graph; entering no_grad is not free.
            with torch.no_grad():
                return self._take(bucket, k, index, parameter)
        if gradient is view:
            if not bucket.small:
                view.mul_(self._scale)
        elif gradient is not None:
            if gradient.is_sparse:
                raise RunError(
                    f"parameter {index} has a sparse gradient, but belongs to no module with sparse=True, such as "
                    f"nn.Embedding(sparse=True). Use such a module, or dense gradients."
                )
            if bucket.small:
                view.copy_(gradient)
            else:
                torch.mul(gradient, self._scale, out=view)
            parameter.grad = view
        self._state[index] = True
        bucket.missing -= 1
        return None

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        last = self._next == len(self._buckets)
        if bucket.small:
            bucket.flat.mul_(self._scale)
        if last:
            self._header.write(self._numbers, self._used)
        if self._next == 1:
            self._group.sent.record()
            self._first_launch = time.perf_counter()
        what = f"the sum of gradients, bucket {self._next} of {len(self._buckets)}"
        bucket.pending = self._group.start_sum(bucket.flat, what)
        if last and not self._rides:
            self._header_pending = self._group.start_sum(self._row, "the sum of example counts")

    def _finish(self) -> None:
        """Backward is over: what is missing was not used in it. Start the rest, wait for all, hand gradients back."""
        self.running = False
        if self._buckets:
            self._complete()
        for then in self.afterwards:
            then()

    def _complete(self) -> None:
        entered = time.perf_counter()
        if self._next < len(self._buckets):
            self._fill_missing()
            while self._next < len(self._buckets):
                self._launch()
        before = self._stopwatch.switch("communicate")
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
        if self._header_pending is not None:
            self._header_pending.wait()
        self.exchanges = self._group.sent.recorded()
        self._settle()
        self._stopwatch.overlapped += max(0.0, entered - self._first_launch)
        self._header.account(self._numbers, entered)
        self._stopwatch.switch(before)
        self._reset()

    def _fill_missing(self) -> None:
        for bucket in self._buckets[self._next :]:
            for k, i in enumerate(bucket.members):
                if self._state[i]:
                    continue
                parameter = self.parameters[i]
                if parameter.grad is None:
                    bucket.views[k].zero_()
                    self._used[i] = 0.0
                    bucket.missing -= 1
                else:  # An earlier pass left a gradient here: it counts, as it would in one process.
                    self._take(bucket, k, i, parameter)

    def _settle(self) -> None:
        self._header.check(self._numbers)
        if not self._header.total:
            factor = 1.0 / max(float(self._numbers[0]), 1.0)
            for bucket in self._buckets:
                bucket.gradients.mul_(factor)
        self._used[:] = self._header.used(self._numbers)
        if self._used.min() < 0.5 or not all(self._state):
            for i in np.flatnonzero(self._used > 0.5):
                number, k = self._home[int(i)]
                self.parameters[i].grad = self._buckets[number].views[k]

    def _reset(self) -> None:
        self._used[:] = 1.0
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)
            bucket.pending = None
        self._header_pending = None
        self._state = [False] * len(self.parameters)
        if self.order is None:
            unseen = sorted(set(range(len(self.parameters))) - set(self._seen), reverse=True)
            order = torch.tensor(self._seen + unseen)
            self.adopt_order([int(i) for i in self._group.share(order, "the order of gradients")])


def _alike(a: Parameter, b: Parameter) -> bool:
    return a.dtype == b.dtype and a.device == b.device


def hook(parameter: Parameter, called: Callable[[Tensor], None]) -> RemovableHandle:
    """Have `called` whenever backward has finished this parameter's gradient, now or after it is unfrozen."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)  # Torch takes no hooks for what is frozen, but keeps them through it.
    handle = parameter.register_post_accumulate_grad_hook(called)
    parameter.requires_grad_(trainable)
    return handle
