"""Every worker sums its gradients with all others, each step, bucket by bucket."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.strategies._base import Axis, Strategy, Traits, require


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Every worker averages its gradients with all others; the default exchange."""

    bucket: float = 25.0
    """MiB of gradients that are reduced at once."""

    axis = Axis.EXCHANGE
    traits = Traits(synchronous=True, exact=True, deterministic=True)
    examples = ("allreduce", "allreduce(bucket=50.0)", "allreduce + accumulate(4)")

    def __post_init__(self) -> None:
        """Refuse a bucket that holds nothing."""
        super().__post_init__()
        require(self.bucket > 0, self, "bucket", self.bucket, "a bucket holds more than 0 MiB")
