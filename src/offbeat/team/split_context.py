"""What a worker's part of a replica works with: the mesh, the exchange between replicas, and what was prepared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offbeat.errors import DataError
from offbeat.runtime.data.fingerprint import fingerprint
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.split.mesh import Mesh
from offbeat.runtime.state.checkpoint_manager import Holdings
from offbeat.strategies import Combined
from offbeat.team.part_exchange import PartExchange


@dataclass(frozen=True)
class SplitContext:
    """What the parts of a split have in common on one worker."""

    strategy: Combined
    mesh: Mesh
    world: Group
    """All workers of the run."""
    exchange: PartExchange
    """Between the workers that have the same part of the model, one in each replica."""
    stopwatch: Stopwatch
    holdings: Holdings
    send: Callable[[dict[str, Any]], None]
    """Tells the launcher something."""

    def check_batch(self, batch: Any) -> None:
        """Refuse a batch that is not that of the other workers of this replica. Collective."""
        place = self.mesh.place
        own = float(int(fingerprint(batch), 16) >> 12)  # 52 bits, which a float64 holds exactly.
        sides = ((place.pipeline, self.mesh.pipeline), (place.tensor, self.mesh.tensor))
        with self.stopwatch.spent_on("communicate"):
            rows = [group.gather([own], "the check that a replica has one batch") for _, group in sides]
        for (ranks, _), row in zip(sides, rows, strict=True):
            other = next((rank for rank, value in zip(ranks, row[:, 0].tolist(), strict=True) if value != own), None)
            if other is not None:
                raise DataError(
                    f"workers {min(place.rank, other)} and {max(place.rank, other)} have different batches, but under "
                    f"{self.strategy} they are parts of one replica, which compute one batch together. Give the "
                    f"training loader to team.prepare(...), which gives all workers of a replica the same batches, and "
                    f"do not divide the data by team.rank, or by a DistributedSampler."
                )
