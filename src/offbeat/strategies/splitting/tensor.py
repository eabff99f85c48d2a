"""Tensor parallelism: the operators of each replica shared by several workers, which meet in sums."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.strategies._base import Axis, Combined, Splitting, Strategy, Traits
from offbeat.strategies.splitting.exchanges import objection, objection_to_sum


@dataclass(frozen=True)
class TensorParallel(Splitting):
    """Linear layers, attention and vocabularies of each replica are shared by several workers, which read one batch.

    Every way computes a part of each layer, and activations are summed inside a host through shared memory. What is
    split is found in the model, or said by `Task.tensor_plan`. A step computes what one process computes, up to
    rounding, also with dropout.
    """

    name = "tensor"
    level = 1
    promises = Traits(synchronous=True, exact=True, deterministic=True, splits_model=True)
    examples = (
        *("tensor(2)", "allreduce + tensor(2)", "allreduce + accumulate(2) + tensor(2)", "local(8) + tensor(2)"),
        *("gossip + tensor(2)", "server(consistency=ssp(2)) + tensor(2)", "allreduce + topk(0.05) + tensor(2)"),
        *("pipeline(2) + tensor(2)", "allreduce + pipeline(2) + tensor(2)"),
    )
    first_alone = True
    _ranges = (("ways", lambda ways: ways >= 2, "a replica on one worker is not split"),)

    ways: int
    """Workers that share the operators of each replica; heads and hidden sizes must be multiples of it."""

    @property
    def spread(self) -> int:
        """The ways."""
        return self.ways

    def refuses(self, other: Strategy) -> str | None:
        """What has not been made to work with parameters of which each worker has a part."""
        if other.name == "pipeline":
            return None
        if other.axis is Axis.SPLIT:
            return "it is not known whether it can split what is split already"
        return objection(self, other)

    def refuses_sum(self, whole: Combined) -> str | None:
        """Compressed means of models."""
        return objection_to_sum(whole)
