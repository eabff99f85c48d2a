"""One stage of a replica: the first step, which captures and cuts the model, and every step after it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]

from offbeat.errors import UsageError
from offbeat.protocols.partition import mixed
from offbeat.protocols.pipelines.cut import LayerCost, as_cut
from offbeat.protocols.pipelines.orders import PipelineKind
from offbeat.runtime.data.batch_slicing import cut
from offbeat.runtime.events.recorder import RECORDER
from offbeat.runtime.gradients.power_sums import power_sums
from offbeat.runtime.pipeline.executor import PipelineShape, StageExecutor, examples_of
from offbeat.runtime.pipeline.foreign_gradient import ForeignGradients
from offbeat.runtime.pipeline.gradients import StandIns
from offbeat.runtime.pipeline.messages import Bundles
from offbeat.runtime.pipeline.part_costs import PartSettings, Rehearsal
from offbeat.runtime.pipeline.state import SplitState
from offbeat.runtime.pipeline.trace import StageTrace
from offbeat.runtime.split.stages import CapturedModel, SplitModel
from offbeat.runtime.tensor_parallel.logits import VocabularyLogits
from offbeat.simulate.pipelines import StagedStep
from offbeat.simulate.predicted_step import Step
from offbeat.strategies import Pipeline
from offbeat.team.split_context import SplitContext
from offbeat.team.stage_costs import StageCosts
from offbeat.team.stage_figures import StageFigures
from offbeat.team.ways import WayWork

_Parts = tuple[StageExecutor, StandIns]


class StageWork:
    """One stage of a replica: it cuts the model in the first step, and runs its stage in every step."""

    def __init__(self, context: SplitContext, ways: WayWork | None) -> None:
        self._context, self._ways, self._mesh = context, ways, context.mesh
        self._pipeline = next(part for part in context.strategy.split if isinstance(part, Pipeline))
        self.between: Sequence[nn.Module] | None = None
        """Modules between which the model may be cut, where somebody has said so."""
        self.bounds: Sequence[int] | None = None
        """Where the model is, or before a resume was, cut."""
        self._capturing = False
        self._state: SplitState | None = None
        self._executor: StageExecutor | None = None
        self._stand_ins: StandIns | None = None
        self._foreign: ForeignGradients | None = None
        self._drawn: Tensor | None = None
        self._steps = 0
        self._batch, self._least = 0, 1  # Examples in the first batch, and at least in a microbatch.
        self._figures: StageFigures | None = None

    def before_call(self) -> None:
        """Refuse calls of a model of which this worker has only a part."""
        if self._capturing or (not torch.is_grad_enabled() if self._state is None else self._state.is_whole):
            return
        raise UsageError(
            f"the model was called, but under {self._context.strategy} each worker has only a stage of it. Train with "
            f"`step = team.pipeline(model, criterion)` and `loss = step(inputs, target)` in place of forward and "
            f"backward, and evaluate inside `with team.averaged(model):`."
        )

    def step(self, model: nn.Module, inputs: Any, target: Any, criterion: Callable[[Any, Any], Tensor]) -> Tensor:
        """Forward and backward of a batch; returns the loss, on every stage."""
        with self._own_draws():
            return self._step(model, (inputs, target), criterion)

    @contextmanager
    def _own_draws(self) -> Generator[None]:
        """Inside, torch draws this stage's own numbers; outside, all stages draw alike, for they read the same data."""
        common = torch.get_rng_state()
        if self._drawn is None:
            torch.manual_seed(mixed(torch.initial_seed(), self._mesh.place.stage))
        else:
            torch.set_rng_state(self._drawn)
        try:
            yield
        finally:
            self._drawn = torch.get_rng_state()
            torch.set_rng_state(common)

    def _step(self, model: nn.Module, batch: tuple[Any, Any], criterion: Callable[[Any, Any], Tensor]) -> Tensor:
        examples = examples_of(batch)
        count = self._microbatches(model, examples)
        if self._executor is None:
            self._context.check_batch(batch)
            self._cut(model, cut(batch, 0, count)[0], criterion, count)
        executor, stand_ins = cast("_Parts", (self._executor, self._stand_ins))
        if self._figures is not None:
            self._figures.at_step()
        for part in executor.split.parts:
            part.training = model.training
        with stand_ins.in_place():
            loss = executor.step(batch, criterion, count)
        stand_ins.deliver()
        if self._foreign is not None:
            self._foreign.give()
        self._steps += 1
        return loss

    def _microbatches(self, model: nn.Module, examples: int) -> int:
        if self._steps == 0:
            self._batch = examples
            # Statistics of one example alone do not exist.
            self._least = 2 if any(isinstance(module, BatchNorm) for module in model.modules()) else 1
        count = self._pipeline.microbatches_of(examples, self._least)
        if examples < self._batch:  # The last batch of an epoch; it may have fewer examples than microbatches.
            return self._pipeline.fewer_microbatches(count, examples, self._least) if self._least > 1 else count
        if count > examples and self._pipeline.microbatches != "auto":
            raise UsageError(
                f"a batch of {examples} examples cannot be cut into microbatches={count}. Ask for fewer microbatches "
                f"or larger batches; each of {self._mesh.place.replicas} replicas gets its share of a batch."
            )
        return count

    # -- the first step ------------------------------------------------------------------------------------------------

    def _cut(
        self, model: nn.Module, microbatch: tuple[Any, Any], criterion: Callable[[Any, Any], Tensor], count: int
    ) -> None:
        """Cut the model where measurements say, keep this worker's part, and measure it."""
        inputs, target = microbatch
        pipeline, mesh, context = self._pipeline, self._mesh, self._context
        split, evenness = self._split(model, inputs)
        stages = [split.parts[stage :: pipeline.stages] for stage in range(pipeline.stages)]
        optimizers, sums = context.holdings.optimizers, power_sums if self._ways is None else self._ways.power_sums
        self._state = SplitState(model, stages, mesh.pipeline, optimizers, sums)
        bundles = Bundles(mesh.pipeline, context.stopwatch, lambda stage: mesh.place.named(mesh.place.pipeline[stage]))
        shape = PipelineShape(pipeline.schedule, pipeline.stages, pipeline.chunks)
        self._executor = StageExecutor(split, shape, mesh.place.stage, bundles)
        if (recorder := RECORDER.get()) is not None:
            self._executor.trace = StageTrace(recorder, mesh.place.pipeline)
        rehearsal = Rehearsal.of(split, model, inputs, target)  # While all parts of the model are here.
        self._state.shed()
        users = {parameter: users for _, users, parameter in self._state.shared()}
        context.exchange.begin(nn.ModuleList(stages[mesh.place.stage]), users)
        self._stand_ins = StandIns(model, self._state.own)
        self._executor.tied = self._stand_ins.tied(users)
        self._foreign = ForeignGradients(self._state, optimizers)
        settings = PartSettings(criterion, pipeline.schedule is PipelineKind.ZERO_BUBBLE)
        with self._stand_ins.in_place():
            costs = StageCosts.measured(pipeline, mesh, context.world, self._executor, rehearsal, settings)
        sides = context.world, context.stopwatch, self._state, self._executor
        self._figures = StageFigures(pipeline, mesh.place, *sides, costs, count, evenness)

    def _split(self, model: nn.Module, inputs: Any) -> tuple[SplitModel, float]:
        """The model in parts, the same on all workers, and how even they are.

        The whole model is captured. Then ways cut its tensors, and those of one stage measure what layers cost them.
        """
        ways, parts = self._ways, self._pipeline.stages * self._pipeline.chunks
        self._capturing = True
        try:
            kept = frozenset[str]() if ways is None else ways.regions
            captured = CapturedModel(model, (inputs,), kept=kept, layers=self.between)
            captured.check(parts)
            if ways is not None:
                ways.cut(model)
            costs = None
            if 0 in self._mesh.place.tensor:
                costs = captured.measured(bool if ways is None else ways.agreed)
                self.bounds = self.bounds or captured.best_cut(costs, parts)
            evenness = self._agree_bounds(parts, costs)
            split = captured.cut_at(self.bounds or (), costs)
        finally:
            self._capturing = False
        if ways is not None:
            for part in split.parts[:-1]:
                part.register_forward_hook(_gather_logits)
        return split, evenness

    def _agree_bounds(self, parts: int, costs: Sequence[LayerCost] | None) -> float:
        """Cut everywhere as worker 0 does; returns how even that is."""
        world = self._context.world
        bounds, figures = torch.zeros(parts + 1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
        if costs is not None and self.bounds is not None:
            bounds, figures = torch.tensor(self.bounds), figures + as_cut(costs, self.bounds).evenness
        with self._context.stopwatch.spent_on("communicate"):
            world.share(bounds, "where the model is cut")
            world.share(figures, "where the model is cut")
        self.bounds = bounds.tolist()
        return float(figures)

    # -- one logical model ---------------------------------------------------------------------------------------------

    def whole(self, optimizers: bool) -> AbstractContextManager[None]:
        """Inside, this worker has all stages, and perhaps the optimizers' whole state. All stages call this."""
        return nullcontext() if self._state is None else self._state.whole(optimizers)

    def close(self) -> None:
        """Remove the hooks."""
        if self._foreign is not None:
            self._foreign.close()

    def predicted(self, exchange: Step | str, batches: int) -> StagedStep | str:
        """A step, which may be of several batches; or why its time cannot be predicted. Collective."""
        return "it made no step" if self._figures is None else self._figures.predicted(exchange, batches)

    def notes(self) -> dict[str, Any]:
        """What each stage has and how long it computed, for the result. Collective."""
        return {} if self._figures is None else self._figures.notes()


def _gather_logits(_part: nn.Module, _taken: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Before the last part, whole logits are sent on; the loss of the last one needs only this way's."""
    return tuple(value.gathered() if isinstance(value, VocabularyLogits) else value for value in given)
