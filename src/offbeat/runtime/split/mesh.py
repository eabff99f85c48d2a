"""Where a worker stands when replicas of the model are spread over several workers: its replica, stage and way."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.protocols.placement import Order
from offbeat.runtime.groups.group import DirectGroup, part_of


@dataclass(frozen=True)
class MeshPlace:
    """One worker's coordinates. Places are counted by replica, stage and way, so that ways are neighbours."""

    rank: int
    """Among all workers."""
    replicas: int
    stages: int = 1
    ways: int = 1
    order: Order = ()
    """The worker at each place; empty: in the order of their ranks."""

    @property
    def replica(self) -> int:
        """Which replica of the model it is part of."""
        return self._number(self.rank) // (self.stages * self.ways)

    @property
    def stage(self) -> int:
        """Which stage of that replica it has."""
        return self._number(self.rank) // self.ways % self.stages

    @property
    def way(self) -> int:
        """Which share of that stage's tensors it has."""
        return self._number(self.rank) % self.ways

    def _number(self, rank: int) -> int:
        """The number of a worker's place."""
        return self.order.index(rank) if self.order else rank

    @property
    def lowest(self) -> tuple[int, int]:
        """Stage and way of the worker of this replica with the lowest rank."""
        places = [(stage, way) for stage in range(self.stages) for way in range(self.ways)]
        return min(places, key=lambda place: self.rank_of(self.replica, *place))

    def rank_of(self, replica: int, stage: int, way: int) -> int:
        """The rank of the worker at these coordinates."""
        number = (replica * self.stages + stage) * self.ways + way
        return self.order[number] if self.order else number

    @property
    def same_part(self) -> tuple[int, ...]:
        """Ranks of the workers with the same part of the model, one in each replica."""
        return tuple(self.rank_of(replica, self.stage, self.way) for replica in range(self.replicas))

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """For each part of the model, the ranks of the workers that have it, one in each replica."""
        places = [(stage, way) for stage in range(self.stages) for way in range(self.ways)]
        return tuple(tuple(self.rank_of(replica, *place) for replica in range(self.replicas)) for place in places)

    @property
    def pipeline(self) -> tuple[int, ...]:
        """Ranks of the workers with the other stages of this replica, by stage."""
        return tuple(self.rank_of(self.replica, stage, self.way) for stage in range(self.stages))

    @property
    def tensor(self) -> tuple[int, ...]:
        """Ranks of the workers that share the tensors of this stage, by way."""
        return tuple(self.rank_of(self.replica, self.stage, way) for way in range(self.ways))

    def named(self, rank: int) -> str:
        """A worker in words."""
        stage = self._number(rank) // self.ways % self.stages
        return f"worker {rank} (stage {stage})" if self.stages > 1 else f"worker {rank}"


class Mesh:
    """The groups of a worker: those with its part of the model, which exchange gradients, and its pipeline."""

    def __init__(self, place: MeshPlace, world: DirectGroup) -> None:
        self.place = place
        self.hosts = tuple(int(host) for host in world.view.hosts)
        """The host of each worker."""
        self.replicas = part_of(world, place.same_part, f"stage {place.stage} way {place.way}")
        """The workers that have the same part of the model, one in each replica."""
        self.pipeline = part_of(world, place.pipeline, f"replica {place.replica} way {place.way}")
        """The workers that have the stages of this replica; its ranks are stages."""
        self.tensor = part_of(world, place.tensor, f"replica {place.replica} stage {place.stage}")
        """The workers that share this stage's tensors; its ranks are ways."""
