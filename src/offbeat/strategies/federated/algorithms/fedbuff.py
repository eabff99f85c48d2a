"""FedBuff: no rounds; the server steps as soon as k updates have come, old ones weighing less.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (2022), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.strategies.federated.algorithms.base import FederatedAlgorithm


@dataclass(frozen=True)
class FedBuff(FederatedAlgorithm):
    """The server steps after every `updates` updates, whichever clients they come from.

    An update of staleness s counts 1/sqrt(1+s) as much as a fresh one.
    """

    name: ClassVar[str] = "fedbuff"
    updates: int
    """Updates in the server's buffer when it steps."""

    _ranges = (("updates", lambda updates: updates >= 1, "a step needs one update or more"),)

    @property
    def buffer(self) -> int | None:
        """As many updates."""
        return self.updates
