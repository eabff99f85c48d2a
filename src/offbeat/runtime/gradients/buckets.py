"""Gradients in flat buckets that are summed over the workers while backward is still running.

A hook on each parameter copies its finished gradient into the bucket's flat buffer; the exchange of a full bucket
starts at once. Buckets start in a fixed order, the same on every worker, so that exchanges match without a message.
After the first pass the buckets are rebuilt in the order in which gradients became ready.

The last bucket carries the header (see `runtime.gradients.header`), which tells a parameter that no worker used: it
keeps its gradient, as it would in one process.

Parameters that are frozen at first are watched too: when they are unfrozen, the buckets are rebuilt with them.
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
"""Bytes of the first bucket: it is small, so that the exchange starts soon after backward does."""
_SMALL = 1 << 14
"""Elements below which an operation per gradient costs more than another pass over the bucket."""


class _Bucket:
    """One flat buffer and its parameters."""

    def __init__(self, members: Sequence[int], parameters: Sequence[Parameter], extra: int) -> None:
        first = parameters[members[0]]
        self.members = tuple(members)
        size = sum(parameters[i].numel() for i in members)
        self.flat = torch.zeros(size + extra, dtype=first.dtype, device=first.device)
        self.gradients = self.flat[:size]
        """The buffer without the header that may follow."""
        pieces = self.gradients.split([parameters[i].numel() for i in members])
        self.views = [piece.view(parameters[i].shape) for piece, i in zip(pieces, members, strict=True)]
        self.missing = len(members)
        self.pending: Pending | None = None
        self.small = size < _SMALL * len(members)
        """Whether its gradients are scaled together when it is full, instead of one by one as they are copied."""


class BackwardExchange:
    """Base of exchanges that replace the gradients of one model after every backward pass, by hooks on parameters."""

    def __init__(self, parameters: Iterable[Parameter], group: Group, stopwatch: Stopwatch) -> None:
        self.parameters = [p for p in parameters if p.is_floating_point() or p.is_complex()]
        self.suspended = False
        self.exchanges: tuple[Exchanged, ...] = ()
        """The workers' exchanges in the last pass."""
        self.afterwards: list[Callable[[], None]] = []
        """Called when the gradients of a backward pass have been handed back."""
        self.running = False
        self._stopwatch, self._header = stopwatch, Header(group, stopwatch, 0)
        self._handles: list[RemovableHandle] = []

    @property
    def examples(self) -> float:
        """Examples of the coming passes here."""
        return self._header.examples

    def weigh(self, examples: float, total: float | None) -> None:
        """The coming passes are over `examples` examples here and `total` over all workers (None: unknown)."""
        self._header.weigh(examples, total)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()


class GradientBuckets(BackwardExchange):
    """The gradients of one model, replaced after every backward pass by their weighted mean over the workers."""

    def __init__(self, parameters: Iterable[Parameter], group: Group, stopwatch: Stopwatch, capacity: int) -> None:
        super().__init__(parameters, group, stopwatch)
        self._all = self.parameters
        self.parameters = [p for p in self._all if p.requires_grad]  # Those that are unfrozen later are appended.
        self.order: list[int] | None = None
        """The order in which gradients became ready on worker 0 in the first pass."""
        self._group, self._capacity = group, capacity
        self._seen: list[int] = []
        self._handles = [hook(p, self._ready) for p in self._all]
        self._enlist([])

    def adopt_order(self, order: Sequence[int]) -> None:
        """Rebuild the buckets in this order of readiness."""
        if sorted(order) != list(range(len(self.parameters))):
            raise RunError(
                f"an order of {len(order)} gradients does not fit a model of {len(self.parameters)} parameters"
            )
        self.order = list(order)
        self._build(self.order)

    def state(self) -> list[Any]:
        """The exchanged parameters, as indices of all, and their order of readiness."""
        places = {id(p): i for i, p in enumerate(self._all)}
        return [[places[id(p)] for p in self.parameters], self.order]

    def load(self, state: Sequence[Any]) -> None:
        """Restore the buckets."""
        if not state:
            raise RunError("this checkpoint was written where gradients went through shared memory; resume it there")
        places, order = state
        self.parameters = [self._all[i] for i in places]
        self._enlist([])
        if order is not None:
            self.adopt_order(order)

    def _enlist(self, unfrozen: Sequence[Parameter]) -> None:
        self.parameters += unfrozen
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._frozen = [p for p in self._all if id(p) not in self._index]
        self.order = None
        self._seen = []
        self._build(range(len(self.parameters) - 1, -1, -1))

    def _build(self, order: Iterable[int]) -> None:
        groups: list[list[int]] = []
        size, limit = 0, FIRST_BYTES
        for i in order:
            parameter = self.parameters[i]
            first = self.parameters[groups[-1][0]] if groups and size < limit else None
            if first is None or (parameter.dtype, parameter.device) != (first.dtype, first.device):
                if len(groups) == 1:
                    limit = self._capacity
                groups.append([])
                size = 0
            groups[-1].append(i)
            size += parameter.numel() * parameter.element_size()
        old = self._header
        self._header = Header(self._group, self._stopwatch, len(self.parameters))
        self._header.examples, self._header.total, self._header.batch = old.examples, old.total, old.batch
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
        """Backward has begun: hand gradients back when it ends. Called by hooks; the first call of a pass counts."""
        if self.running or self.suspended:
            return
        self.running = True
        self._scale = self._header.examples / (self._header.total or 1.0)
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
                f"does, or an earlier pass was interrupted by an exception. Use torch.utils.checkpoint with "
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
        """Backward is over, without the missing gradients. Start the rest, wait for all, hand gradients back."""
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
                else:  # A gradient of an earlier pass counts, as it would in one process.
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


def hook(parameter: Parameter, called: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `called` whenever backward has finished this parameter's gradient, now or after it is unfrozen."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)  # Torch refuses hooks on frozen parameters, but keeps existing ones.
    handle = parameter.register_post_accumulate_grad_hook(called)
    parameter.requires_grad_(trainable)
    return handle
