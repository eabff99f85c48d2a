"""A pipeline as a value: which schedule, how many stages and microbatches, what crosses between them, what it takes.

By default each part hands its output to the next one. Any other graph of parts is described by its edges: a skip
connection is an edge over several parts, and a value that several later parts need crosses once to each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

from offbeat.errors import UsageError
from offbeat.protocols.pipelines.orders import Action, Order, PipelineKind, Work, check_numbers, orders
from offbeat.protocols.schedule import Layout, View


class PartSeconds(NamedTuple):
    """What a part of the model takes for a microbatch; the defaults are the usual proportions."""

    forward: float = 1.0
    backward: float = 2.0  # Both gradients.
    weights: float | None = None  # Of backward: for the gradients of weights; None: half of it.

    def of(self, work: Work) -> float:
        """Seconds of one computation."""
        weights = self.backward / 2 if self.weights is None else self.weights
        match work:
            case Work.FORWARD:
                return self.forward
            case Work.BACKWARD:
                return self.backward
            case Work.INPUT_GRADIENT:
                return self.backward - weights
            case Work.WEIGHT_GRADIENT:
                return weights


class PartEdge(NamedTuple):
    """One part's output is another's input, on one stage or across two."""

    source: int
    target: int  # A later part; of several on one stage the first, as the value crosses once.
    nbytes: int = 1  # Of one microbatch.
    gradient_nbytes: int | None = None  # Of what comes back; None: as many. 0: nothing comes back.

    @property
    def back(self) -> int:
        """Bytes of the gradient that comes back."""
        return self.nbytes if self.gradient_nbytes is None else self.gradient_nbytes


class Crossing(NamedTuple):
    """A value that crosses from one part to another: activations to a later one, or their gradients back."""

    producer: int
    consumer: int
    microbatch: int

    @property
    def gradient(self) -> bool:
        """Whether it goes back."""
        return self.consumer < self.producer

    @property
    def brief(self) -> str:
        """In few words, for tables."""
        return (
            f"{'gradients' if self.gradient else 'activations'} {self.microbatch}, {self.producer} to {self.consumer}"
        )

    def __str__(self) -> str:
        """In words, for errors and pictures."""
        kind = "gradients" if self.gradient else "activations"
        return f"{kind} of microbatch {self.microbatch}, part {self.producer} to {self.consumer}"


@dataclass(frozen=True)
class PipelinePlan:
    """All that decides who computes and sends what and when."""

    kind: PipelineKind
    stages: int
    microbatches: int
    chunks: int = 1
    """Parts of the model on each stage."""
    edges: tuple[PartEdge, ...] | None = None
    """What parts hand to others; None: each to the next."""
    seconds: tuple[PartSeconds, ...] = ()
    """What each part takes; empty: forward 1, backward 2, divided by the number of chunks."""
    order: tuple[Order, ...] = field(default=(), repr=False)
    """What each stage computes, in order; empty: as the kind of schedule has it."""

    def __post_init__(self) -> None:
        """Refuse numbers that do not belong together."""
        check_numbers(self.kind, self.stages, self.microbatches, self.chunks)
        if self.seconds and len(self.seconds) != self.parts:
            raise UsageError(
                f"{len(self.seconds)} costs were given for {self.parts} parts ({self.stages} stages of {self.chunks}); "
                f"give one for each part."
            )
        for each in self.seconds:
            if any(not 0 <= each.of(work) < inf for work in Work):
                raise UsageError(f"a part cannot take {each}: its seconds must be numbers, 0 or more.")
        if self.order and len(self.order) != self.stages:
            raise UsageError(f"{len(self.order)} orders were given for {self.stages} stages; give one for each.")
        self._check_edges()

    def _check_edges(self) -> None:
        known: set[tuple[int, int]] = set()
        for edge in self.edges or ():
            if not 0 <= edge.source < edge.target < self.parts:
                raise UsageError(
                    f"{edge} does not go from one of the {self.parts} parts to a later one, so no order of stages can "
                    f"compute it."
                )
            if edge.nbytes < 1 or edge.back < 0:
                raise UsageError(f"{edge} carries no bytes: omit it.")
            key = edge.source, self.stage_of(edge.target)
            if key in known:
                raise UsageError(
                    f"the output of part {edge.source} crosses to stage {key[1]} twice: give one edge for each stage, "
                    f"to the first part that needs it."
                )
            known.add(key)

    @property
    def parts(self) -> int:
        """Number of parts of the model."""
        return self.stages * self.chunks

    def stage_of(self, part: int) -> int:
        """The stage that a part is on."""
        return part % self.stages

    def part_of(self, stage: int, action: Action) -> int:
        """The part that an action of a stage computes."""
        return action.chunk * self.stages + stage

    def takes(self, stage: int, action: Action) -> float:
        """Seconds of an action."""
        part = self.part_of(stage, action)
        if self.seconds:
            return self.seconds[part].of(action.work)
        return PartSeconds().of(action.work) / self.chunks

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """What each stage computes, in order."""
        return self.order or orders(self.kind, self.stages, self.microbatches, self.chunks)

    @cached_property
    def graph(self) -> tuple[PartEdge, ...]:
        """All edges, those inside a stage too."""
        if self.edges is None:
            return tuple(PartEdge(part, part + 1) for part in range(self.parts - 1))
        return self.edges

    @cached_property
    def outputs(self) -> tuple[tuple[PartEdge, ...], ...]:
        """For each part the edges that leave it."""
        return tuple(tuple(edge for edge in self.graph if edge.source == part) for part in range(self.parts))

    @cached_property
    def inputs(self) -> tuple[tuple[PartEdge, ...], ...]:
        """For each part the edges that reach it."""
        return tuple(tuple(edge for edge in self.graph if edge.target == part) for part in range(self.parts))

    def needs(self, stage: int, action: Action) -> tuple[Crossing, ...]:
        """What an action needs of other parts, on whichever stage."""
        part, number = self.part_of(stage, action), action.microbatch
        if action.work is Work.FORWARD:
            return tuple(Crossing(edge.source, part, number) for edge in self.inputs[part])
        if action.work is Work.WEIGHT_GRADIENT:
            return ()
        return tuple(Crossing(edge.target, part, number) for edge in self.outputs[part] if edge.back)

    def gives(self, stage: int, action: Action) -> tuple[Crossing, ...]:
        """What an action computes for other parts, on whichever stage."""
        part, number = self.part_of(stage, action), action.microbatch
        if action.work is Work.FORWARD:
            return tuple(Crossing(part, edge.target, number) for edge in self.outputs[part])
        if action.work is Work.WEIGHT_GRADIENT:
            return ()
        return tuple(Crossing(part, edge.source, number) for edge in self.inputs[part] if edge.back)

    def crosses(self, value: Crossing) -> bool:
        """Whether a value goes to another stage."""
        return self.stage_of(value.producer) != self.stage_of(value.consumer)

    @cached_property
    def _slots(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each edge and direction: where its values begin in the layout's buffer, and the bytes of each."""
        slots: dict[tuple[int, int], tuple[int, int]] = {}
        begin = 0
        for edge in self.graph:
            for ends, nbytes in (((edge.source, edge.target), edge.nbytes), ((edge.target, edge.source), edge.back)):
                slots[ends] = begin, nbytes
                begin += nbytes * self.microbatches
        slots[-1, -1] = begin, 0
        return slots

    def extent(self, value: Crossing) -> tuple[int, int]:
        """The range of a value in the layout's buffer, in which every value has a place of its own."""
        begin, nbytes = self._slots[value.producer, value.consumer]
        start = begin + nbytes * value.microbatch
        return start, start + nbytes

    @cached_property
    def layout(self) -> Layout:
        """A buffer in bytes, in which every value has a place of its own."""
        return Layout(max(1, self._slots[-1, -1][0]), 1)

    def view(self, hosts: Sequence[int] | None = None) -> View:
        """The stages, all on one host unless a host is given for each."""
        return View.of(self.stages, hosts)
