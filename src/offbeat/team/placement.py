"""Which worker has which part of a replica, on which host: told at the start of a run, and in its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offbeat.protocols.placement import Crossings, crossings
from offbeat.runtime.split.mesh import MeshPlace

_LINES = 16
"""Stages that are listed at most."""


@dataclass(frozen=True)
class Placement:
    """The workers at the places of a mesh."""

    place: MeshPlace
    hosts: tuple[int, ...]
    """The host of each worker."""

    def explain(self) -> str:
        """Who is where, and what goes between hosts."""
        place, across = self.place, self._crossings()
        names = [("replica", place.replicas), ("stage", place.stages), ("way", place.ways)]
        shape = " x ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in names if count > 1)
        count = len(set(self.hosts))
        if count == 1:
            return f"placement: {shape}, on one host"
        lines = [f"placement: {shape}, on {count} hosts"]
        if across.ways:
            lines.append(
                f"  SLOW: the ways of {across.ways} of {place.replicas * place.stages} stages are on several hosts, so "
                f"two sums of activations for each split layer and microbatch go between them. Give each host a "
                f"multiple of {place.ways} workers."
            )
        if across.stages:
            pairs = place.replicas * (place.stages - 1) * place.ways
            lines.append(f"  activations go between hosts from {across.stages} of {pairs} workers to the next stage")
        rows = [
            f"  replica {replica}, stage {stage}: {_workers(workers)} on {self._host_names(workers)}"
            for replica, stages in enumerate(self._workers())
            for stage, workers in enumerate(stages)
        ]
        more = [f"  ... and {len(rows) - _LINES} more"] if len(rows) > _LINES else []
        return "\n".join([*lines, *rows[:_LINES], *more])

    def notes(self) -> dict[str, Any]:
        """The same for the result: workers by replica, stage and way; the host of each worker."""
        across = self._crossings()
        return {
            "placement": {
                "workers": self._workers(),
                "hosts": list(self.hosts),
                "ways_across_hosts": across.ways,
                "stages_across_hosts": across.stages,
            }
        }

    def _workers(self) -> list[list[list[int]]]:
        place = self.place
        return [
            [[place.rank_of(replica, stage, way) for way in range(place.ways)] for stage in range(place.stages)]
            for replica in range(place.replicas)
        ]

    def _crossings(self) -> Crossings:
        order = tuple(rank for replica in self._workers() for stage in replica for rank in stage)
        return crossings(order, self.hosts, self.place.stages, self.place.ways)

    def _host_names(self, workers: list[int]) -> str:
        hosts = sorted({self.hosts[worker] for worker in workers})
        return f"host{'s' if len(hosts) > 1 else ''} {', '.join(map(str, hosts))}"


def _workers(workers: list[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
