"""Runs one stage of a pipeline: what its program says, on its parts of the model, over messages to the other stages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from offbeat.errors import UsageError
from offbeat.protocols.pipelines.orders import Action, PipelineKind, Work
from offbeat.protocols.pipelines.plan import Crossing, PartEdge, PipelinePlan
from offbeat.protocols.pipelines.rounds import ComputeStep, PipelineStep, ReceiveStep, SendStep, program, rounds
from offbeat.runtime.data.batch_slicing import cut, examples_in
from offbeat.runtime.gradients.first_loss import not_a_mean
from offbeat.runtime.pipeline.backward import backward, input_gradients
from offbeat.runtime.pipeline.messages import Bundles, Form, IncomingBundle, ReturningGradients, form_of
from offbeat.runtime.split.stages import SplitModel, Value

LOSS_TAG = 0
"""Tag of the message with a step's loss; those of bundles follow."""


@dataclass(frozen=True)
class PipelineShape:
    """A pipeline's numbers."""

    kind: PipelineKind
    stages: int
    chunks: int = 1


class Routes:
    """Which values cross from which part to which stage, as bundles: each goes to a stage once."""

    def __init__(self, split: SplitModel, stages: int) -> None:
        self.stages = stages
        wanted: defaultdict[tuple[int, int], dict[Value, int]] = defaultdict(dict)
        for number, part in enumerate(split.parts):
            for value in part.takes:
                if value.producer >= 0:
                    wanted[value.producer, number % stages].setdefault(value, number)
        self.edges: list[PartEdge] = []
        """The bundles as edges from a part to the first part that needs them on a stage."""
        self.values: dict[tuple[int, int], list[Value]] = {}
        """The values of each bundle, by its edge."""
        for (producer, _), uses in wanted.items():
            edge = producer, min(uses.values())
            values = sorted(uses, key=lambda value: value.index)
            self.values[edge] = values
            # The bytes do not matter here, but whether anything goes back does.
            self.edges.append(PartEdge(*edge, 1, int(any(value.differentiable for value in values))))
        self._numbers = {edge: number for number, edge in enumerate(self.values)}

    def edge(self, crossing: Crossing) -> tuple[int, int]:
        """The edge of a crossing, whichever way it goes."""
        return min(crossing.producer, crossing.consumer), max(crossing.producer, crossing.consumer)

    def tag(self, crossing: Crossing) -> int:
        """A number for a bundle of a microbatch, different from all others of a step."""
        place = self._numbers[self.edge(crossing)] * 2 + crossing.gradient
        return LOSS_TAG + 1 + crossing.microbatch * 2 * len(self._numbers) + place

    def back(self, edge: tuple[int, int]) -> list[Value]:
        """The values of a bundle whose gradients come back."""
        return [value for value in self.values[edge] if value.differentiable]


@dataclass
class _Held:
    """What a part keeps of a microbatch from forward to backward."""

    outputs: dict[Value, Tensor]
    loss: Tensor | None


class StageExecutor:
    """One stage's computations and messages in every step."""

    def __init__(self, split: SplitModel, shape: PipelineShape, stage: int, bundles: Bundles) -> None:
        self._split, self._shape, self._stage, self._bundles = split, shape, stage, bundles
        self._routes = Routes(split, shape.stages)
        self._last = len(split.parts) - 1
        self.seconds: defaultdict[Work, float] = defaultdict(float)
        """Seconds spent computing, by kind of work."""
        self.weights: Sequence[Parameter] = ()
        """What collects the gradients of weights."""
        self.checked = False
        """Whether a loss has been seen to be a mean over examples."""
        self._program = lru_cache(16)(self._program_of)

    def _program_of(self, microbatches: int) -> tuple[PipelineStep, ...]:
        shape = self._shape
        plan = PipelinePlan(shape.kind, shape.stages, microbatches, shape.chunks, tuple(self._routes.edges))
        return program(rounds(plan), self._stage)

    def step(self, batch: tuple[Any, Any], criterion: Callable[[Any, Any], Tensor], microbatches: int) -> Tensor:
        """Forward and backward of a batch; returns the mean of the criterion over its examples, on every stage."""
        run = _Step(self, batch, criterion, microbatches)
        for step in self._program(microbatches):
            if isinstance(step, ComputeStep):
                run.compute(step.action, step.uses)
            elif isinstance(step, SendStep):
                run.send(step.value, step.target)
            else:
                run.post(step)
        loss = run.shared_loss()
        self._bundles.end_step()
        return loss

    # -- what a step needs of it --------------------------------------------------------------------------------------

    @property
    def split(self) -> SplitModel:
        """The model in parts."""
        return self._split

    @property
    def routes(self) -> Routes:
        """What crosses between parts."""
        return self._routes

    @property
    def bundles(self) -> Bundles:
        """The messages."""
        return self._bundles

    def part_of(self, action: Action) -> int:
        """The part that an action of this stage computes."""
        return action.chunk * self._shape.stages + self._stage

    def is_last(self, part: int) -> bool:
        """Whether a part is the last one, which has the loss."""
        return part == self._last

    @property
    def loss_stage(self) -> int:
        """The stage that computes the loss."""
        return self._last % self._shape.stages

    @property
    def others(self) -> list[int]:
        """The other stages."""
        return [stage for stage in range(self._shape.stages) if stage != self._stage]

    @property
    def stage(self) -> int:
        """The stage of this worker."""
        return self._stage


class _Step:
    """One stage's part in one step."""

    def __init__(
        self,
        executor: StageExecutor,
        batch: tuple[Any, Any],
        criterion: Callable[[Any, Any], Tensor],
        microbatches: int,
    ) -> None:
        self._executor, self._criterion = executor, criterion
        slices = [cut(batch, number, microbatches) for number in range(microbatches)]
        total = slices[0][2]
        self._inputs = [executor.split.inputs(inputs) for (inputs, _), _, _ in slices]
        self._targets = [target for (_, target), _, _ in slices]
        self._weights = [count / total for _, count, _ in slices]
        self._examples = [count for _, count, _ in slices]
        self._values: dict[tuple[int, Value], Tensor] = {}  # Of other parts, by microbatch; leaves for backward.
        self._held: dict[tuple[int, int], _Held] = {}  # By part and microbatch.
        self._incoming: dict[Crossing, IncomingBundle] = {}
        self._returning: dict[Crossing, ReturningGradients] = {}
        self._deferred: list[ReceiveStep] = []
        self._late: dict[tuple[int, int], Callable[[], None]] = {}  # Gradients of weights that are not computed yet.
        self._loss = torch.zeros((), dtype=torch.float64)

    # -- messages -----------------------------------------------------------------------------------------------------

    def post(self, step: ReceiveStep) -> None:
        """Post a receive; that of gradients once it is known what they are for."""
        crossing, routes, bundles = step.value, self._executor.routes, self._executor.bundles
        edge = routes.edge(crossing)
        if not crossing.gradient:
            count, key = len(routes.values[edge]), self._key(crossing)
            self._incoming[crossing] = bundles.post(count, step.source, routes.tag(crossing), str(crossing), key)
            return
        held = self._held.get((edge[0], crossing.microbatch))
        if held is None:
            self._deferred.append(step)
            return
        forms: list[Form] = [form_of(held.outputs[value]) for value in routes.back(edge)]
        self._returning[crossing] = bundles.post_back(forms, step.source, routes.tag(crossing), str(crossing))

    def send(self, crossing: Crossing, target: int) -> None:
        """Start to send activations or gradients that were computed."""
        routes, bundles = self._executor.routes, self._executor.bundles
        edge, number = routes.edge(crossing), crossing.microbatch
        if crossing.gradient:
            leaves = [self._values.pop((number, value)) for value in routes.back(edge)]
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            bundles.send_back(gradients, target, routes.tag(crossing))
            return
        outputs = self._held[edge[0], number].outputs
        tensors = [outputs[value] for value in routes.values[edge]]
        bundles.send(tensors, target, routes.tag(crossing), self._key(crossing))

    def _key(self, crossing: Crossing) -> Hashable:
        """What the shapes of a bundle depend on, usually: the part, and the shapes of the model's inputs."""
        shapes = tuple(tuple(tensor.shape) for tensor in self._inputs[crossing.microbatch])
        return self._executor.routes.edge(crossing), shapes

    # -- computing ----------------------------------------------------------------------------------------------------

    def compute(self, action: Action, uses: Sequence[Crossing]) -> None:
        """One computation, when what it uses has come."""
        for crossing in uses:
            if not crossing.gradient:
                values = self._executor.routes.values[self._executor.routes.edge(crossing)]
                tensors = self._incoming.pop(crossing).wait()
                for value, tensor in zip(values, tensors, strict=True):
                    self._values[crossing.microbatch, value] = tensor.requires_grad_(value.differentiable)
        gradients = {crossing: self._returning.pop(crossing).wait() for crossing in uses if crossing.gradient}
        began = time.perf_counter()
        part = self._executor.part_of(action)
        match action.work:
            case Work.FORWARD:
                self._forward(part, action.microbatch)
            case Work.BACKWARD:
                backward(*self._roots(part, action.microbatch, gradients))
            case Work.INPUT_GRADIENT:
                roots = self._roots(part, action.microbatch, gradients)
                later = input_gradients(*roots, self._leaves(part, action.microbatch), self._executor.weights)
                self._late[part, action.microbatch] = later
            case Work.WEIGHT_GRADIENT:
                self._late.pop((part, action.microbatch))()
        self._executor.seconds[action.work] += time.perf_counter() - began
        if action.work is Work.FORWARD and self._deferred:
            deferred, self._deferred = self._deferred, []
            for step in deferred:
                self.post(step)

    def _forward(self, part: int, number: int) -> None:
        executor = self._executor
        stage_part = executor.split.parts[part]
        taken = [
            self._inputs[number][value.index] if value.producer < 0 else self._taken(number, value)
            for value in stage_part.takes
        ]
        with torch.enable_grad():
            given = stage_part(*taken)
            outputs = dict(zip(stage_part.gives, given, strict=True))
            loss = self._loss_of(executor.split.restore(given), number) if executor.is_last(part) else None
        for value, tensor in outputs.items():
            if loss is None and tensor.requires_grad and not value.differentiable:
                raise UsageError(
                    f"a value that crosses from part {part} to another now needs a gradient, and did not when the "
                    f"model was cut: parameters before it were unfrozen. Unfreeze them before the first step."
                )
        self._held[part, number] = _Held({} if loss is not None else outputs, loss)

    def _taken(self, number: int, value: Value) -> Tensor:
        """A value of another part, which has come or was computed on this stage."""
        key = number, value
        if key not in self._values:
            output = self._held[value.producer, number].outputs[value]
            self._values[key] = output.detach().requires_grad_(value.differentiable)
        return self._values[key]

    def _loss_of(self, output: Any, number: int) -> Tensor:
        loss = self._criterion(output, self._targets[number])
        if not (isinstance(loss, Tensor) and loss.numel() == 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                "the criterion does not return a tensor of one number. Return a mean over the examples of a microbatch."
            )
        if not self._executor.checked:
            self._executor.checked = True
            if reason := not_a_mean(loss, self._examples[number]):
                raise UsageError(
                    f"the criterion is not a mean over the examples of a batch: {reason}. As it is, microbatches would "
                    f"not add up to the whole batch."
                )
        weight = self._weights[number]
        self._loss += loss.detach().to(torch.float64).reshape(()) * weight
        return loss * weight

    def _roots(
        self, part: int, number: int, came: dict[Crossing, list[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The tensors from which backward of a part begins, and their gradients."""
        held = self._held.pop((part, number))
        if held.loss is not None:
            return ([held.loss], [None]) if held.loss.requires_grad else ([], [])
        routes = self._executor.routes
        totals: dict[Value, Tensor] = {}
        for crossing, gradients in came.items():
            for value, gradient in zip(routes.back(routes.edge(crossing)), gradients, strict=True):
                totals[value] = totals[value] + gradient if value in totals else gradient
        for value in held.outputs:
            local = self._values.pop((number, value), None)
            if local is not None and local.grad is not None:
                totals[value] = totals[value] + local.grad if value in totals else local.grad
        roots = [(held.outputs[value], total) for value, total in totals.items() if held.outputs[value].requires_grad]
        return [output for output, _ in roots], [total for _, total in roots]

    def _leaves(self, part: int, number: int) -> list[Tensor]:
        """The values that a part took, to which gradients flow back."""
        takes = self._executor.split.parts[part].takes
        return [self._values[number, value] for value in takes if value.producer >= 0 and value.differentiable]

    # -- the loss -----------------------------------------------------------------------------------------------------

    def shared_loss(self) -> Tensor:
        """The loss of the whole batch, which the last stage tells the others."""
        executor, bundles = self._executor, self._executor.bundles
        if executor.stage == executor.loss_stage:
            for stage in executor.others:
                bundles.send_back([self._loss], stage, LOSS_TAG)
            return self._loss.clone()
        return bundles.post_back([(torch.float64, ())], executor.loss_stage, LOSS_TAG, "the loss").wait()[0]


def examples_of(batch: Any) -> int:
    """Number of examples in a batch; refuses one whose tensors differ in it."""
    count = examples_in(batch)
    if not count:
        raise UsageError(
            "a pipeline cuts batches into microbatches by the first dimension of their tensors, and those of this "
            "batch differ in it, or are empty. Give step(inputs, target) tensors with one row for each example."
        )
    return count
