"""What crosses between the parts of a model in a pipeline: which values, from where to where, under which tag."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from offbeat.protocols.pipelines.plan import Crossing, PartEdge
from offbeat.runtime.split.stages import SplitModel, Value

LOSS_TAG = 0
"""Tag of the message with a step's loss; those of parcels follow."""
TIED_TAG = 1 << 20
"""Tags of gradients of tied weights; above those of parcels."""


@dataclass(frozen=True)
class Parcel:
    """What crosses along an edge for one microbatch: activations, or gradients back."""

    crossing: Crossing
    edge: tuple[int, int]
    """The part that computes the values, and the first one that needs them on another stage."""
    values: tuple[Value, ...]
    """The values; of gradients, those that have one."""
    tag: int
    """Different from the tags of all other parcels of a step."""

    @property
    def held(self) -> tuple[int, int]:
        """The part that computes the values, and the microbatch."""
        return self.edge[0], self.crossing.microbatch


class Routes:
    """Which values cross from which part to which stage, as bundles: each goes to a stage once."""

    def __init__(self, split: SplitModel, stages: int) -> None:
        wanted: defaultdict[tuple[int, int], dict[Value, int]] = defaultdict(dict)
        for number, part in enumerate(split.parts):
            for value in part.takes:
                if value.producer >= 0:
                    wanted[value.producer, number % stages].setdefault(value, number)
        self.edges: list[PartEdge] = []
        """The bundles as edges from a part to the first part that needs them on a stage."""
        self.values: dict[tuple[int, int], tuple[Value, ...]] = {}
        """The values of each bundle, by the ends of its edge."""
        for (producer, _), uses in wanted.items():
            edge = producer, min(uses.values())
            self.values[edge] = tuple(sorted(uses, key=lambda value: value.index))
            # The bytes do not matter here, but whether anything goes back does.
            self.edges.append(PartEdge(*edge, 1, int(any(value.differentiable for value in uses))))
        self._numbers = {edge: number for number, edge in enumerate(self.values)}

    def parcel(self, crossing: Crossing) -> Parcel:
        """What crosses there, whichever way it goes."""
        edge = min(crossing.producer, crossing.consumer), max(crossing.producer, crossing.consumer)
        values = self.values[edge]
        if crossing.gradient:
            values = tuple(value for value in values if value.differentiable)
        place = (crossing.microbatch * len(self._numbers) + self._numbers[edge]) * 2 + crossing.gradient
        return Parcel(crossing, edge, values, LOSS_TAG + 1 + place)
