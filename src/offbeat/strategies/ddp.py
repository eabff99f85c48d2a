"""PyTorch's own `DistributedDataParallel` on Gloo, as it comes: the honest baseline."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.strategies._base import Axis, Strategy, Traits, require


@dataclass(frozen=True)
class DDP(Strategy):
    """PyTorch's DistributedDataParallel on Gloo, unchanged, as the baseline to beat."""

    bucket: float = 25.0
    """MiB of gradients that are reduced at once."""
    find_unused: bool = False
    """Look for parameters that took no part in the loss; costs a walk through the graph each step."""

    axis = Axis.EXCHANGE
    traits = Traits(synchronous=True, exact=True, deterministic=True)
    examples = ("ddp", "ddp(bucket=50.0)", "ddp(find_unused=True)")

    def __post_init__(self) -> None:
        """Refuse a bucket that holds nothing."""
        super().__post_init__()
        require(self.bucket > 0, self, "bucket", self.bucket, "a bucket holds more than 0 MiB")
