"""Where a worker stands when replicas of the model are spread over several workers: its replica, stage and way."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import UsageError
from offbeat.runtime.groups.group import DirectGroup, Group, part_of


@dataclass(frozen=True)
class MeshPlace:
    """One worker's coordinates; rank = (replica * stages + stage) * ways + way, so that ways are neighbours."""

    rank: int
    """Among all workers."""
    replicas: int
    stages: int = 1
    ways: int = 1

    @property
    def replica(self) -> int:
        """Which replica of the model it is part of."""
        return self.rank // (self.stages * self.ways)

    @property
    def stage(self) -> int:
        """Which stage of that replica it has."""
        return self.rank // self.ways % self.stages

    @property
    def way(self) -> int:
        """Which share of that stage's tensors it has."""
        return self.rank % self.ways

    def rank_of(self, replica: int, stage: int, way: int) -> int:
        """The rank of the worker at these coordinates."""
        return (replica * self.stages + stage) * self.ways + way

    @property
    def same_part(self) -> tuple[int, ...]:
        """Ranks of the workers with the same part of the model, one in each replica."""
        return tuple(self.rank_of(replica, self.stage, self.way) for replica in range(self.replicas))

    @property
    def pipeline(self) -> tuple[int, ...]:
        """Ranks of the workers with the other stages of this replica, by stage."""
        return tuple(self.rank_of(self.replica, stage, self.way) for stage in range(self.stages))

    def named(self, rank: int) -> str:
        """A worker in words."""
        stage = rank // self.ways % self.stages
        return f"worker {rank} (stage {stage})" if self.stages > 1 else f"worker {rank}"


class Mesh:
    """The groups of a worker: those with its part of the model, which exchange gradients, and its pipeline."""

    def __init__(self, place: MeshPlace, world: Group) -> None:
        if not isinstance(world, DirectGroup):
            raise UsageError("workers that hold parts of a model must be connected directly, not through servers")
        self.place = place
        self.replicas = part_of(world, place.same_part, f"stage {place.stage} way {place.way}")
        """The workers that have the same part of the model, one in each replica."""
        self.pipeline = part_of(world, place.pipeline, f"replica {place.replica} way {place.way}")
        """The workers that have the stages of this replica; its ranks are stages."""
