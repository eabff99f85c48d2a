"""Every worker sums its gradients with all others, each step, bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from offbeat.runtime.buckets import GradientBuckets, hook
from offbeat.runtime.group import Group
from offbeat.runtime.stopwatch import Stopwatch
from offbeat.strategies._base import Traits, require
from offbeat.strategies._worker import Exchange, Exchanging

_MIB = 1 << 20


@dataclass(frozen=True)
class AllReduce(Exchanging):
    """Every worker averages its gradients with all others; the default exchange.

    Gradients fill flat buckets as backward produces them, and each full bucket is summed while backward goes on. They
    are weighted by examples, so uneven batches count rightly, and a parameter that nobody used is left alone.
    """

    bucket: float = 25.0
    """MiB of gradients that are reduced at once."""

    traits = Traits(synchronous=True, exact=True, deterministic=True)
    examples = ("allreduce", "allreduce(bucket=50.0)", "allreduce + accumulate(4)")

    def __post_init__(self) -> None:
        """Refuse a bucket that holds nothing."""
        super().__post_init__()
        require(self.bucket > 0, self, "bucket", self.bucket, "a bucket holds more than 0 MiB")

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: buckets on every model."""
        return _AllReducing(group, stopwatch, int(self.bucket * _MIB))


class _AllReducing(Exchange):
    def __init__(self, group: Group, stopwatch: Stopwatch, capacity: int) -> None:
        super().__init__(group, stopwatch)
        self._capacity = capacity
        self._known: set[int] = set()
        self._buckets: list[GradientBuckets] = []
        self._sparse: list[_SparseSums] = []

    def install(self, model: nn.Module) -> None:
        """Buckets for dense gradients; sparse ones are summed one by one after them, as sparse ones."""
        sparse = _sparse_parameters(model)
        # A parameter that two models share is exchanged once.
        new = [p for p in model.parameters() if id(p) not in self._known]
        self._known.update(map(id, new))
        # Models meet in one backward pass in an order that may differ between workers, and a worker that leaves out a
        # backward pass comes to something else instead: each model has a lane, so that nothing is mistaken for another.
        lane = self.group.lane()
        dense = [p for p in new if id(p) not in sparse]
        buckets = GradientBuckets(dense, lane, self.stopwatch, self._capacity)
        self._buckets.append(buckets)
        if sparse:
            alike = [p for p in new if id(p) in sparse]
            self._sparse.append(_SparseSums(alike, lane, self.stopwatch, buckets))

    def weigh(self, examples: int, total: int | None) -> None:
        """Gradients count by the examples behind them."""
        for buckets in self._buckets:
            buckets.weigh(examples, total)
        for sums in self._sparse:
            sums.examples = float(examples)

    def suspend(self, held: bool) -> None:
        """While held, hooks let gradients pass."""
        for buckets in self._buckets:
            buckets.suspended = held

    def state_dict(self) -> dict[str, Any]:
        """The buckets' order, because it fixes the order of additions and so the last bits."""
        return {"orders": [[buckets.enlisted, buckets.order] for buckets in self._buckets]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The same buckets as before."""
        for buckets, (enlisted, order) in zip(self._buckets, state["orders"], strict=True):
            buckets.enlist(enlisted)
            if order is not None:
                buckets.adopt_order(order)

    def close(self) -> None:
        """Take the hooks off."""
        for hooked in (*self._buckets, *self._sparse):
            hooked.close()


class _SparseSums:
    """Sparse gradients of one model, summed when backward is over; who used one decides for all that it was used."""

    def __init__(
        self, parameters: Sequence[Parameter], group: Group, stopwatch: Stopwatch, buckets: GradientBuckets
    ) -> None:
        self.examples = 1.0
        self._parameters, self._group, self._stopwatch = parameters, group, stopwatch
        self._handles = [hook(p, lambda _: buckets.begin()) for p in parameters]
        buckets.afterwards.append(self._sum)

    def _sum(self) -> None:
        with self._stopwatch.spent_on("communicate"), torch.no_grad():
            used = [float(p.grad is not None) for p in self._parameters]
            counts = torch.tensor([self.examples, *used], dtype=torch.float64)
            total, *users = self._group.sum(counts, "the count of examples").tolist()
            for parameter, count in zip(self._parameters, users, strict=True):
                if count:
                    mine = _nothing_like(parameter) if parameter.grad is None else parameter.grad
                    weighted = mine * (self.examples / max(total, 1.0))
                    parameter.grad = self._group.sum_sparse(weighted, "the sum of a sparse gradient")

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _nothing_like(parameter: Tensor) -> Tensor:
    indices = torch.zeros(1, 0, dtype=torch.long, device=parameter.device)
    return torch.sparse_coo_tensor(indices, parameter.detach()[:0], parameter.shape)


def _sparse_parameters(model: nn.Module) -> set[int]:
    """Weights whose gradients are sparse tensors: those of embeddings made with sparse=True."""
    found: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) is True and isinstance(weight, Parameter):
            found.add(id(weight))
    return found
