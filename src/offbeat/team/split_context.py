"""What a worker's part of a replica works with: the mesh, the exchange between replicas, and what was prepared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
