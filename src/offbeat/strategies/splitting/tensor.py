"""Tensor parallelism: the operators of each replica shared by several workers, which meet in sums."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.strategies._base import Axis, Splitting, Strategy, Traits


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
    examples = ("tensor(2)", "allreduce + tensor(2)", "allreduce + accumulate(2) + tensor(2)")
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
        if other.name in ("single", "accumulate"):
            return None
        if other.name == "allreduce":
            shard = getattr(other, "shard", "nothing")
            return None if shard == "nothing" else _SHARDED.format(shard=shard)
        reason = _REASONS.get(other.name, _OTHER[other.axis])
        return f"{reason}. Use allreduce with {self.name}, with or without accumulate"


_SHARDED = (
    "shard={shard} divides what every worker holds over all of them, and a way already holds only its part. Omit shard"
)
_SERVED = "servers hold and update whole parameters, and each way has the gradients of its parts only"
_REASONS = {
    "ddp": "DistributedDataParallel connects all workers, and only those of one way have the same parameters",
    "server": _SERVED,
    "coded": _SERVED,
    "downpour": _SERVED,
    "elastic": _SERVED,
    "hogwild": "its workers update the same parameters, and ways have different parts of them",
    "gossip": "it mixes whole models, and each way has parts only",
    "local": "it averages whole models, and each way has parts only",
    "pipeline": "stages are cut from a model whose layers are whole, and ways would need the parts of each stage",
}
"""Why these cannot be added to it."""
_OTHER = {
    Axis.EXCHANGE: "it is not known whether it can exchange parts of parameters",
    Axis.WHEN: "it is not known whether its rhythm suits parts of parameters",
    Axis.COMPRESSION: "compressed sums of the gradients of parts have not been tried",
    Axis.SPLIT: "it is not known whether it can split what is split already",
}
