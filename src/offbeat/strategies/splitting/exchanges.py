"""Which exchanges, rhythms and compressors replicas that are spread over several workers can have."""

from __future__ import annotations

from offbeat.limits import SERVERS
from offbeat.strategies._base import Axis, Combined, Splitting, Strategy

_EXCHANGES = ("single", "allreduce", "gossip", "server")
_TIMINGS = ("accumulate", "local")


def objection(split: Splitting, other: Strategy) -> str | None:
    """Why another strategy cannot be added to a split, or None."""
    if other.name in _EXCHANGES or other.name in _TIMINGS:
        if getattr(other, "asynchronous", False):
            return (
                f"pairs of {other.name} meet at any time, and the workers of a replica would then mix parts of "
                f"different models. Omit asynchronous"
            )
        if getattr(getattr(other, "rule", None), "closes", False):
            return (
                f"{other} ends steps without slow workers, so that a replica could count in one part of the model and "
                f"be late in another. Use bsp, ssp or asp"
            )
        if (shard := getattr(other, "shard", "nothing")) != "nothing":
            return _sharded(split, shard)
        return None
    if other.axis is Axis.COMPRESSION:
        return None
    reason = _REASONS.get(other.name, _OTHER[other.axis])
    return f"{reason}. Use allreduce, local, gossip or server with {split.name}"


def _sharded(split: Splitting, shard: str) -> str | None:
    if split.name == "tensor":
        return (
            f"shard={shard} cuts parameters by ranges of their numbers, and ways by rows or columns: a checkpoint "
            f"could not put both together. Omit shard, or use a pipeline"
        )
    if shard == "parameters":
        return (
            "with shard=parameters a worker has a parameter only while one operation uses it, and a stage uses its "
            "parameters for many microbatches in turn. Use shard=gradients"
        )
    return None


def objection_to_sum(whole: Combined) -> str | None:
    """Why the parts of a sum with a split cannot all go together, or None."""
    exchange = whole.exchange
    servers = getattr(exchange, "shards", 0) * (1 + getattr(exchange, "replicas", 0)) * whole.replica_size
    if servers > SERVERS:
        return (
            f"each of {whole.replica_size} parts of the model has servers of its own, so there would be {servers:,} "
            f"processes of servers, and at most {SERVERS} are started. Ask for fewer shards"
        )
    apart = whole.when is not None and whole.when.name == "local"
    if not whole.compressions or not (apart or getattr(exchange, "mixes", False)):
        return None
    compressor, mean = whole.compressions[0], whole.when if apart else exchange
    return (
        f"{compressor} compresses whatever of the model a worker has as one row, so parameters that several workers of "
        f"a replica have (tied weights, normalization) would become different ones at each mean of {mean}. Use "
        f"{compressor} with allreduce, or omit it"
    )


_OWN = "its workers keep parameters of their own beside the servers', which a resumed run could not put together"
_REASONS = {
    "ddp": "DistributedDataParallel connects all workers, and only those with the same part have the same gradients",
    "coded": "any of its workers may be missing in a step, and those of a split replica compute it together",
    "downpour": _OWN,
    "elastic": _OWN,
    "hogwild": "its workers update the same parameters, and those of a split replica have different ones",
}
"""Why these cannot be added to a split."""
_OTHER = {
    Axis.EXCHANGE: "it is not known whether it can exchange parts of a model",
    Axis.WHEN: "it is not known whether its rhythm suits parts of a model",
}
