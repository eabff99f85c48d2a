"""Runs one stage of a pipeline: what its program says, on its parts of the model, over messages to the other stages.

The program is compiled once for each number of microbatches, into a flat list of calls whose parts, values and tags
are resolved: between two computations there is little to do but to send and to post receives.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import UsageError
from offbeat.protocols.pipelines.checker import check_pipeline
from offbeat.protocols.pipelines.orders import PipelineKind, Work
from offbeat.protocols.pipelines.plan import Crossing, LossMessage, PipelinePlan, TiedGradient, TiedWeights
from offbeat.protocols.pipelines.rounds import (
    ComputeStep,
    EndStep,
    PipelineStep,
    ReceiveStep,
    SendStep,
    program,
    rounds,
)
from offbeat.runtime.data.batch_slicing import cut, examples_in
from offbeat.runtime.gradients.first_loss import not_a_mean
from offbeat.runtime.pipeline.backward import backward, input_gradients
from offbeat.runtime.pipeline.gradients import TiedParameter
from offbeat.runtime.pipeline.messages import Bundles, IncomingBundle, ReturningGradients, form_of
from offbeat.runtime.pipeline.routes import LOSS_TAG, TIED_TAG, Parcel, Routes
from offbeat.runtime.pipeline.trace import StageTrace
from offbeat.runtime.split.stages import SplitModel, Value


@dataclass(frozen=True)
class PipelineShape:
    """A pipeline's numbers."""

    kind: PipelineKind
    stages: int
    chunks: int = 1


_Call = tuple[Callable[..., None], tuple[Any, ...]]
"""A method of `_Step` and its arguments."""


class StageExecutor:
    """One stage's computations and messages in every step."""

    def __init__(self, split: SplitModel, shape: PipelineShape, stage: int, bundles: Bundles) -> None:
        self.split, self.stage, self.bundles = split, stage, bundles
        self._shape = shape
        self.routes = Routes(split, shape.stages)
        """What crosses between parts."""
        self.tied: Sequence[TiedParameter] = ()
        """The parameters that several stages use."""
        self.loss_part = len(split.parts) - 1
        """The part that computes the loss."""
        self.seconds: defaultdict[tuple[int, Work], float] = defaultdict(float)
        """Seconds spent computing, by part and kind of work."""
        self.microbatches = 0
        """Microbatches computed."""
        self.trace: StageTrace | None = None
        """Records events, if the run is watched."""
        self.checked = False
        """Whether a loss has been seen to be a mean over examples."""
        self._calls = lru_cache(16)(self._compiled)

    def step(self, batch: tuple[Any, Any], criterion: Callable[[Any, Any], Tensor], microbatches: int) -> Tensor:
        """Forward and backward of a batch; returns the mean of the criterion over its examples, on every stage."""
        trained = [tied for tied in self.tied if tied.parameter.requires_grad]
        run = _Step(self, batch, criterion, microbatches, trained)
        for call, arguments in self._calls(microbatches, tuple(tied.weights for tied in trained)):
            call(run, *arguments)
        self.bundles.end_step()
        self.microbatches += microbatches
        return run.loss.clone()

    def _program(self, microbatches: int, tied: tuple[TiedWeights, ...]) -> tuple[PipelineStep, ...]:
        shape, edges = self._shape, tuple(self.routes.edges)
        plan = PipelinePlan(shape.kind, shape.stages, microbatches, shape.chunks, edges, tied=tied, tells_loss=True)
        played = rounds(plan)
        check_pipeline(plan, played)  # Proved for this model's own connections, before anything of it runs.
        return program(played, self.stage)

    def _compiled(self, microbatches: int, tied: tuple[TiedWeights, ...]) -> list[_Call]:
        """The program as calls.

        A receive of gradients is posted when it is known what they are for: after that forward, and what it sends.
        """
        calls: list[_Call] = []
        computed: set[tuple[int, int]] = set()  # Part and microbatch.
        deferred: list[tuple[Parcel, int]] = []
        for step in self._program(microbatches, tied):
            if isinstance(step, ComputeStep | ReceiveStep):
                calls += [(_Step.post_back, each) for each in deferred if each[0].held in computed]
                deferred = [each for each in deferred if each[0].held not in computed]
            match step:
                case ComputeStep():
                    calls.append(self._computation(step, computed))
                case SendStep(Crossing() as value, target):
                    call = _Step.send_back if value.gradient else _Step.send
                    calls.append((call, (self.routes.parcel(value), target)))
                case ReceiveStep(Crossing() as value, source):
                    arguments = self.routes.parcel(value), source
                    if value.gradient:
                        deferred.append(arguments)
                    else:
                        calls.append((_Step.post, arguments))
                case SendStep(value, target):
                    calls.append((_Step.send_at_end, (value, target)))
                case ReceiveStep(value, source):
                    calls.append((_Step.post_at_end, (value, source)))
                case EndStep():
                    calls.append((_Step.end, ()))
        return calls

    def _computation(self, step: ComputeStep, computed: set[tuple[int, int]]) -> _Call:
        work, number, chunk = step.action
        part = chunk * self._shape.stages + self.stage
        computed.add((part, number))
        return _Step.compute, (work, part, number, [self.routes.parcel(crossing) for crossing in step.uses])


@dataclass(slots=True)
class _Held:
    """What a part keeps of a microbatch from forward to backward."""

    outputs: dict[Value, Tensor]
    loss: Tensor | None


class _Step:
    """One stage's part in one step."""

    def __init__(
        self,
        executor: StageExecutor,
        batch: tuple[Any, Any],
        criterion: Callable[[Any, Any], Tensor],
        microbatches: int,
        tied: Sequence[TiedParameter],
    ) -> None:
        self._executor, self._bundles, self._criterion = executor, executor.bundles, criterion
        self._trace = executor.trace
        slices = [cut(batch, number, microbatches) for number in range(microbatches)]
        total = slices[0][2]
        self._inputs = [executor.split.inputs(inputs) for (inputs, _), _, _ in slices]
        self._shapes = [tuple(tensor.shape for tensor in inputs) for inputs in self._inputs]
        self._targets = [target for (_, target), _, _ in slices]
        self._weights = [count / total for _, count, _ in slices]
        self._examples = [count for _, count, _ in slices]
        # Values of other parts, by microbatch: leaves for backward.
        self._values: list[dict[Value, Tensor]] = [{} for _ in slices]
        self._held: dict[tuple[int, int], _Held] = {}  # By part and microbatch.
        self._incoming: dict[int, IncomingBundle | ReturningGradients] = {}  # By tag.
        self._late: dict[tuple[int, int], Callable[[], None]] = {}  # Gradients of weights that are not computed yet.
        self._tied = tied
        self._at_end: dict[TiedGradient | LossMessage, ReturningGradients] = {}
        self.loss = torch.zeros((), dtype=torch.float64)
        """The loss of the whole batch, when the step has ended."""

    # -- messages -----------------------------------------------------------------------------------------------------

    def post(self, parcel: Parcel, source: int) -> None:
        """Post the receive of activations."""
        key = self._key(parcel)
        self._incoming[parcel.tag] = self._bundles.post(len(parcel.values), source, parcel.tag, parcel.crossing, key)

    def post_back(self, parcel: Parcel, source: int) -> None:
        """Post the receive of gradients."""
        outputs = self._held[parcel.held].outputs
        forms = [form_of(outputs[value]) for value in parcel.values]
        self._incoming[parcel.tag] = self._bundles.post_back(forms, source, parcel.tag, parcel.crossing)

    def send(self, parcel: Parcel, target: int) -> None:
        """Start to send activations."""
        outputs = self._held[parcel.held].outputs
        if self._trace is not None:
            self._trace.sent(parcel)
        self._bundles.send([outputs[value] for value in parcel.values], target, parcel.tag, self._key(parcel))

    def send_back(self, parcel: Parcel, target: int) -> None:
        """Start to send gradients."""
        values = self._values[parcel.crossing.microbatch]
        leaves = [values.pop(value) for value in parcel.values]
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        if self._trace is not None:
            self._trace.sent(parcel)
        self._bundles.send_back(gradients, target, parcel.tag)

    def _key(self, parcel: Parcel) -> Hashable:
        """What the shapes of a bundle depend on, usually: the part, and the shapes of the model's inputs."""
        return parcel.edge, self._shapes[parcel.crossing.microbatch]

    # -- computing ----------------------------------------------------------------------------------------------------

    def compute(self, work: Work, part: int, number: int, uses: Sequence[Parcel]) -> None:
        """One computation, when what it uses has come."""
        gradients: list[tuple[Value, Tensor]] = []
        for parcel in uses:
            tensors = self._incoming.pop(parcel.tag).wait()
            if self._trace is not None:
                self._trace.received(parcel)
            if parcel.crossing.gradient:
                gradients += zip(parcel.values, tensors, strict=True)
                continue
            for value, tensor in zip(parcel.values, tensors, strict=True):
                self._values[number][value] = tensor.requires_grad_(value.differentiable)
        began = time.perf_counter()
        match work:
            case Work.FORWARD:
                self._forward(part, number)
            case Work.BACKWARD:
                backward(*self._roots(part, number, gradients))
            case Work.INPUT_GRADIENT:
                roots = self._roots(part, number, gradients)
                self._late[part, number] = input_gradients(*roots, self._leaves(part, number))
            case Work.WEIGHT_GRADIENT:
                self._late.pop((part, number))()
        self._executor.seconds[part, work] += (seconds := time.perf_counter() - began)
        if self._trace is not None:
            self._trace.computed(work, part, number, seconds)

    def _forward(self, part: int, number: int) -> None:
        executor = self._executor
        stage_part = executor.split.parts[part]
        taken = [
            self._inputs[number][value.index] if value.producer < 0 else self._taken(number, value)
            for value in stage_part.takes
        ]
        with torch.enable_grad():
            given = stage_part(*taken)
            if part == executor.loss_part:
                loss = self._loss_of(executor.split.restore(given), number)
                self._held[part, number] = _Held({}, loss)
                return
        for value, tensor in zip(stage_part.gives, given, strict=True):
            if tensor.requires_grad and not value.differentiable:
                raise UsageError(
                    f"a value that crosses from part {part} to another now needs a gradient, and did not when the "
                    f"model was cut: parameters before it were unfrozen. Unfreeze them before the first step."
                )
        self._held[part, number] = _Held(dict(zip(stage_part.gives, given, strict=True)), None)

    def _taken(self, number: int, value: Value) -> Tensor:
        """A value of another part, which has come or was computed on this stage."""
        values = self._values[number]
        if value not in values:
            output = self._held[value.producer, number].outputs[value]
            values[value] = output.detach().requires_grad_(value.differentiable)
        return values[value]

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
        self.loss += loss.detach().to(torch.float64).reshape(()) * weight
        return loss * weight

    def _roots(
        self, part: int, number: int, gradients: Sequence[tuple[Value, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The tensors from which backward of a part begins, and their gradients."""
        held = self._held.pop((part, number))
        if held.loss is not None:
            return ([held.loss], [None]) if held.loss.requires_grad else ([], [])
        totals: dict[Value, Tensor] = {}
        for value, gradient in gradients:
            totals[value] = totals[value] + gradient if value in totals else gradient
        for value in held.outputs:
            local = self._values[number].pop(value, None)
            if local is not None and local.grad is not None:
                totals[value] = totals[value] + local.grad if value in totals else local.grad
        roots = [(held.outputs[value], total) for value, total in totals.items() if held.outputs[value].requires_grad]
        return [output for output, _ in roots], [total for _, total in roots]

    def _leaves(self, part: int, number: int) -> list[Tensor]:
        """The values of other parts to which gradients flow back."""
        takes = self._executor.split.parts[part].takes
        return [self._values[number][value] for value in takes if value.producer >= 0 and value.differentiable]

    # -- the end of the step ------------------------------------------------------------------------------------------

    def send_at_end(self, message: TiedGradient | LossMessage, target: int) -> None:
        """Start to send the loss, or a gradient of tied weights."""
        if isinstance(message, LossMessage):
            self._bundles.send_back([self.loss], target, LOSS_TAG)
        else:
            self._bundles.send_back([self._tied[message.number].own], target, TIED_TAG + message.number)

    def post_at_end(self, message: TiedGradient | LossMessage, source: int) -> None:
        """Post the receive of what comes when a stage has computed everything."""
        if isinstance(message, LossMessage):
            form, tag = form_of(self.loss), LOSS_TAG
        else:
            form, tag = form_of(self._tied[message.number].parameter), TIED_TAG + message.number
        self._at_end[message] = self._bundles.post_back([form], source, tag, message)

    def end(self) -> None:
        """Take the loss from the stage that has it, and sum the gradients of tied weights."""
        came: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)  # By tied weights and stage.
        for message, coming in self._at_end.items():
            (tensor,) = coming.wait()
            if isinstance(message, LossMessage):
                self.loss = tensor
            else:
                came[message.number][message.source] = tensor
        for number, gradients in came.items():
            self._tied[number].add(gradients, self._executor.stage)


def examples_of(batch: Any) -> int:
    """Number of examples in a batch; refuses one whose tensors differ in it."""
    count = examples_in(batch)
    if not count:
        raise UsageError(
            "a pipeline cuts batches into microbatches by the first dimension of their tensors, and those of this "
            "batch differ in it, or are empty. Give step(inputs, target) tensors with one row for each example."
        )
    return count
