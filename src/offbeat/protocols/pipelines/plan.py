"""A pipeline as a value: which schedule, how many stages and microbatches, what crosses between them, what it takes.

By default each part hands its output to the next one. Any other graph of parts is described by its edges: a skip
connection is an edge over several parts, and a value that several later parts need crosses once to each stage. At the
end of a step every stage has the loss, and the stages that use one parameter have the sum of its gradients.
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


class TiedWeights(NamedTuple):
    """A parameter that several stages use, each of which needs the sum of its gradients."""

    stages: tuple[int, ...]
    nbytes: int = 1


@dataclass(frozen=True, slots=True)  # Unlike a named tuple, it equals no other kind of message.
class TiedGradient:
    """One stage's gradient of tied weights, brought to another stage that uses them."""

    number: int  # Of the tied weights in the plan.
    source: int
    target: int

    @property
    def brief(self) -> str:
        """In few words, for tables."""
        return f"gradient of tied weights {self.number}"

    def __str__(self) -> str:
        """In words, for errors and pictures."""
        return f"gradient of tied weights {self.number} of stage {self.source}"


@dataclass(frozen=True, slots=True)  # Unlike a named tuple, it equals no other kind of message.
class LossMessage:
    """The loss of the batch, which the stage that has computed it tells another."""

    target: int

    @property
    def brief(self) -> str:
        """In few words, for tables."""
        return "loss"

    def __str__(self) -> str:
        """In words, for errors and pictures."""
        return "loss"


Message = Crossing | TiedGradient | LossMessage
LOSS_BYTES = 8


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
    tied: tuple[TiedWeights, ...] = ()
    """Parameters that several stages use."""
    tells_loss: bool = False
    """Whether the stage that computes the loss tells it to the others."""

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
        _check_edges(self)

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

    def needs_at_end(self, stage: int) -> tuple[Message, ...]:
        """What a stage has of others when a step ends, besides what it computed from."""
        tied = (
            TiedGradient(number, source, stage)
            for number, weights in enumerate(self.tied)
            if stage in weights.stages
            for source in weights.stages
            if source != stage
        )
        told = self.tells_loss and stage != self.loss_stage
        return (*((LossMessage(stage),) if told else ()), *tied)

    @property
    def loss_stage(self) -> int:
        """The stage that computes the loss."""
        return self.stage_of(self.parts - 1)

    @cached_property
    def last_loss(self) -> Action:
        """The forward after which the loss of the whole batch is known."""
        forward = (action for action in self.orders[self.loss_stage] if action.work is Work.FORWARD)
        return [action for action in forward if action.chunk == self.chunks - 1][-1]

    def crosses(self, value: Crossing) -> bool:
        """Whether a value goes to another stage."""
        return self.stage_of(value.producer) != self.stage_of(value.consumer)

    def ends(self, message: Message) -> tuple[int, int]:
        """The stage that sends a message, and the one that receives it."""
        match message:
            case Crossing(producer, consumer, _):
                return self.stage_of(producer), self.stage_of(consumer)
            case TiedGradient(source=source, target=target):
                return source, target
            case LossMessage(target=target):
                return self.loss_stage, target

    @cached_property
    def _slots(self) -> dict[object, tuple[int, int]]:
        """Where values begin in the layout's buffer, and the bytes of each: by edge and direction, or by message."""
        slots: dict[object, tuple[int, int]] = {}
        begin = 0
        for edge in self.graph:
            for ends, nbytes in (((edge.source, edge.target), edge.nbytes), ((edge.target, edge.source), edge.back)):
                slots[ends] = begin, nbytes
                begin += nbytes * self.microbatches
        for stage in range(self.stages):
            for message in self.needs_at_end(stage):
                nbytes = self.tied[message.number].nbytes if isinstance(message, TiedGradient) else LOSS_BYTES
                slots[message] = begin, nbytes
                begin += nbytes
        slots[None] = begin, 0
        return slots

    def extent(self, value: Message) -> tuple[int, int]:
        """The range of a message in the layout's buffer, in which every one has a place of its own."""
        if isinstance(value, Crossing):
            begin, nbytes = self._slots[value.producer, value.consumer]
            begin += nbytes * value.microbatch
        else:
            begin, nbytes = self._slots[value]
        return begin, begin + nbytes

    @cached_property
    def layout(self) -> Layout:
        """A buffer in bytes, in which every value has a place of its own."""
        return Layout(max(1, self._slots[None][0]), 1)

    def view(self, hosts: Sequence[int] | None = None) -> View:
        """The stages, all on one host unless a host is given for each."""
        return View.of(self.stages, hosts)


def _check_edges(plan: PipelinePlan) -> None:
    known: set[tuple[int, int]] = set()
    for edge in plan.edges or ():
        if not 0 <= edge.source < edge.target < plan.parts:
            raise UsageError(
                f"{edge} does not go from one of the {plan.parts} parts to a later one, so no order of stages can "
                f"compute it."
            )
        if edge.nbytes < 1 or edge.back < 0:
            raise UsageError(f"{edge} carries no bytes: omit it.")
        key = edge.source, plan.stage_of(edge.target)
        if key in known:
            raise UsageError(
                f"the output of part {edge.source} crosses to stage {key[1]} twice: give one edge for each stage, "
                f"to the first part that needs it."
            )
        known.add(key)
    for weights in plan.tied:
        stages = set(weights.stages)
        if len(stages) < 2 or len(stages) < len(weights.stages) or not stages <= set(range(plan.stages)):
            raise UsageError(f"{weights} are not used by several of {plan.stages} stages: give two or more, once each.")
