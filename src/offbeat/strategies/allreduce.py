"""Every worker sums its gradients with all others, each step, bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from offbeat.runtime.buckets import GradientBuckets
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
        self._buckets: list[GradientBuckets] = []
        self._sparse: list[RemovableHandle] = []
        self._held = False
        self._examples, self._total = 1.0, float(group.size)

    def install(self, model: nn.Module) -> None:
        """Buckets for dense gradients; sparse ones are summed one by one, as sparse ones."""
        sparse = _sparse_parameters(model)
        trainable = [p for p in model.parameters() if p.requires_grad]
        for parameter in trainable:
            if id(parameter) in sparse:
                self._sparse.append(parameter.register_post_accumulate_grad_hook(partial(self._sum_sparse)))
        dense = [p for p in trainable if id(p) not in sparse]
        if dense:
            self._buckets.append(GradientBuckets(dense, self.group, self.stopwatch, self._capacity))

    def weigh(self, examples: int, total: int | None) -> None:
        """Gradients count by the examples behind them."""
        self._examples, self._total = float(examples), float(total or 0)
        for buckets in self._buckets:
            buckets.weigh(examples, total)

    def suspend(self, held: bool) -> None:
        """While held, hooks let gradients pass."""
        self._held = held
        for buckets in self._buckets:
            buckets.suspended = held

    def _sum_sparse(self, parameter: torch.Tensor) -> None:
        if self._held or parameter.grad is None:
            return
        total = self._total
        with self.stopwatch.spent_on("communicate"), torch.no_grad():
            if not total:
                total = float(
                    self.group.sum(torch.tensor([self._examples], dtype=torch.float64), "the count of examples")
                )
            weighted = parameter.grad * (self._examples / max(total, 1.0))
            parameter.grad = self.group.sum_sparse(weighted, "the sum of a sparse gradient")

    def state_dict(self) -> dict[str, Any]:
        """The buckets' order, because it fixes the order of additions and so the last bits."""
        return {"orders": [buckets.order for buckets in self._buckets]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The same buckets as before."""
        for buckets, order in zip(self._buckets, state["orders"], strict=True):
            if order is not None:
                buckets.adopt_order(order)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._sparse:
            handle.remove()
        for buckets in self._buckets:
            buckets.close()


def _sparse_parameters(model: nn.Module) -> set[int]:
    """Weights whose gradients are sparse tensors: those of embeddings made with sparse=True."""
    found: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) is True and isinstance(weight, Parameter):
            found.add(id(weight))
    return found
