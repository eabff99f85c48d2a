"""A team whose replicas are spread over several workers: the mesh, the first step that cuts the model, every step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.data.batch_slicing import cut
from offbeat.runtime.groups.group import Group
from offbeat.runtime.pipeline.executor import PipelineShape, StageExecutor, examples_of
from offbeat.runtime.pipeline.foreign_gradient import ForeignGradients
from offbeat.runtime.pipeline.gradients import StandIns
from offbeat.runtime.pipeline.messages import Bundles
from offbeat.runtime.pipeline.state import SplitState, total_of
from offbeat.runtime.run.settings import Goal
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.split.mesh import Mesh, MeshPlace
from offbeat.runtime.split.stages import split_model
from offbeat.runtime.state.checkpoint_manager import Holdings
from offbeat.strategies import Combined, Pipeline
from offbeat.strategies.worker.capabilities import Starter
from offbeat.strategies.worker.exchange import Exchange
from offbeat.strategies.worker.flat_rows import Rows

_Parts = tuple[StageExecutor, StandIns, nn.Module]
_TIED_TAG = 1 << 20
"""Tags of gradients of parameters that several stages use; above those of bundles."""


def mesh_of(strategy: Combined, group: Group, goal: Goal) -> Mesh:
    """The mesh of a strategy with a split. Collective."""
    spread = " + ".join(str(part) for part in strategy.split)
    if goal.device != "cpu":
        raise StrategyError(f"{spread} sends values between workers on CPUs, not on {goal.device}. Use --device cpu.")
    if goal.gauge is not None:
        raise StrategyError(
            f"gradient noise is measured on the gradients of whole models, and under {spread} each worker has those of "
            f"a part. Measure it with allreduce."
        )
    stages = next((part.stages for part in strategy.split if isinstance(part, Pipeline)), 1)
    replicas = strategy.replicas(group.size)
    return Mesh(MeshPlace(group.rank, replicas, stages, strategy.replica_size // stages), group)


class SplitWork:
    """One worker's part of a replica: it cuts the model in the first step, and runs its stage in every step."""

    def __init__(
        self,
        strategy: Combined,
        mesh: Mesh,
        world: Group,
        exchange: Exchange,
        stopwatch: Stopwatch,
        holdings: Holdings,
    ) -> None:
        self._strategy = strategy
        self._pipeline = next(part for part in strategy.split if isinstance(part, Pipeline))
        self._mesh, self._world, self._exchange, self._stopwatch = mesh, world, exchange, stopwatch
        self._holdings = holdings
        holdings.whole = self._whole_for_checkpoint
        self._model: nn.Module | None = None
        self._guard: RemovableHandle | None = None
        self._state: SplitState | None = None
        self._executor: StageExecutor | None = None
        self._stand_ins: StandIns | None = None
        self._foreign: ForeignGradients | None = None
        self._between: Sequence[nn.Module] | None = None
        self._steps = 0
        self._evenness = 0.0
        self._layers: tuple[tuple[str, str], ...] = ()

    @property
    def replica(self) -> tuple[int, int]:
        """Which replica this worker has a part of, and how many there are."""
        return self._mesh.place.replica, self._mesh.place.replicas

    def adopt(self, model: nn.Module) -> None:
        """Start from worker 0's model; it is cut in the first step."""
        if self._model is not None:
            raise UsageError(
                f"{self._strategy} cuts one model into stages, and a second one was prepared. Join them in one module, "
                f"or use a strategy without {self._pipeline}."
            )
        self._model = model
        flat = Rows([*model.parameters(), *model.buffers()], every_kind=True)
        flat.write([self._world.share(row, "the sharing of worker 0's model") for row in flat.read()])
        self._watch()

    def _watch(self) -> None:
        """Refuse calls of a model of which this worker has only a part."""
        assert self._model is not None  # noqa: S101 (adopted)

        def refuse(*_: Any) -> None:
            if self._state is not None and self._state.is_whole:
                return
            if self._state is None and not torch.is_grad_enabled():
                return
            raise UsageError(
                f"the model was called, but under {self._strategy} each worker has only a stage of it. Train with "
                f"`step = team.pipeline(model, criterion)` and `loss = step(inputs, target)` in place of forward and "
                f"backward, and evaluate inside `with team.averaged(model):`."
            )

        self._guard = self._model.register_forward_pre_hook(refuse)

    def _unwatch(self) -> None:
        if self._guard is not None:
            self._guard.remove()

    def step_of(
        self, model: nn.Module, criterion: Callable[[Any, Any], Tensor], layers: Sequence[nn.Module] | None
    ) -> Callable[[Any, Any], Tensor]:
        """The function for one step of this model, which may be cut between these layers."""
        self._between = layers

        def step(inputs: Any, target: Any) -> Tensor:
            if model is not self._model:
                raise UsageError("team.pipeline() has a model that was not prepared. Give it to team.prepare() first.")
            return self._step(inputs, target, criterion)

        return step

    def _step(self, inputs: Any, target: Any, criterion: Callable[[Any, Any], Tensor]) -> Tensor:
        batch = inputs, target
        examples = examples_of(batch)
        count = self._microbatches(examples)
        if self._executor is None:
            self._cut(cut(batch, 0, count)[0][0])
        executor, stand_ins, model = cast("_Parts", (self._executor, self._stand_ins, self._model))
        for part in executor.split.parts:
            part.training = model.training
        with stand_ins.in_place():
            loss = executor.step(batch, criterion, count)
            self._sum_tied(executor, stand_ins)
        stand_ins.deliver()
        if self._foreign is not None:
            self._foreign.give()
        self._steps += 1
        return loss

    def _microbatches(self, examples: int) -> int:
        count = self._pipeline.microbatches_of(examples)
        if count > examples and self._pipeline.microbatches != "auto" and self._steps == 0:
            raise UsageError(
                f"a batch of {examples} examples cannot be cut into microbatches={count}. Ask for fewer microbatches "
                f"or larger batches; each of {self._mesh.place.replicas} replicas gets its share of a batch."
            )
        return count

    # -- the first step ------------------------------------------------------------------------------------------------

    def _cut(self, inputs: Any) -> None:
        """Cut the model where worker 0's measurements say, and keep this worker's part."""
        model, pipeline, mesh = self._model, self._pipeline, self._mesh
        assert model is not None  # noqa: S101 (adopted)
        self._unwatch()
        parts = pipeline.stages * pipeline.chunks
        bounds = torch.zeros(parts + 1, dtype=torch.int64)
        figures = torch.zeros(1, dtype=torch.float64)
        split = None
        if self._world.rank == 0:
            split = split_model(model, (inputs,), parts, layers=self._between)
            bounds, figures = torch.tensor(split.bounds), torch.tensor([split.cut.evenness], dtype=torch.float64)
        with self._stopwatch.spent_on("communicate"):
            self._world.share(bounds, "where the model is cut")
            self._evenness = float(self._world.share(figures, "where the model is cut"))
        if split is None:
            split = split_model(model, (inputs,), parts, bounds=bounds.tolist(), layers=self._between)
        self._watch()
        stages = [split.parts[stage :: pipeline.stages] for stage in range(pipeline.stages)]
        self._layers = tuple((split.costs[layers[0]].name, split.costs[layers[-1]].name) for layers in split.cut.ranges)
        mine = nn.ModuleList(stages[mesh.place.stage])
        self._state = SplitState(model, stages, mesh.pipeline, self._holdings.optimizers)
        bundles = Bundles(mesh.pipeline, self._stopwatch, lambda stage: mesh.place.named(mesh.place.pipeline[stage]))
        shape = PipelineShape(pipeline.schedule, pipeline.stages, pipeline.chunks)
        self._executor = StageExecutor(split, shape, mesh.place.stage, bundles)
        if mesh.place.replicas > 1:
            self._exchange.install(mine)
            if isinstance(self._exchange, Starter):
                self._exchange.begin()
        self._state.shed()
        self._stand_ins = StandIns(model, self._state.own)
        self._executor.weights = self._stand_ins.stand_ins
        self._foreign = ForeignGradients(self._state, self._holdings.optimizers)

    def _sum_tied(self, executor: StageExecutor, stand_ins: StandIns) -> None:
        """Sum the gradients of parameters that several stages use, on all of these, in the order of the stages."""
        state, stage, bundles = self._state, executor.stage, executor.bundles
        assert state is not None  # noqa: S101 (cut)
        mine = {id(parameter): number for number, parameter in enumerate(stand_ins.parameters)}
        gradients = stand_ins.gradients()
        waiting: list[tuple[int, Tensor, dict[int, Any]]] = []
        for number, users, parameter in state.shared():
            if stage not in users or not parameter.requires_grad:
                continue
            own = total_of(gradients[mine[id(parameter)]], parameter)
            others = [user for user in users if user != stage]
            for other in others:
                bundles.send_back([own], other, _TIED_TAG + number)
            form = (own.dtype, tuple(own.shape))
            what = "the gradient of a tied parameter"
            came = {other: bundles.post_back([form], other, _TIED_TAG + number, what) for other in others}
            waiting.append((mine[id(parameter)], own, came))
        for place, own, came in waiting:
            terms = {stage: own} | {other: returning.wait()[0] for other, returning in came.items()}
            first, *rest = (terms[user] for user in sorted(terms))
            total = first.clone()
            for term in rest:
                total += term
            stand_ins.set_gradient(place, total)

    # -- one logical model ---------------------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Generator[None]:
        """Inside, this worker has the whole model."""
        with ExitStack() as stack:
            if self._state is not None:
                stack.enter_context(self._state.whole())
            yield

    @contextmanager
    def _whole_for_checkpoint(self) -> Generator[None]:
        with ExitStack() as stack:
            if self._state is not None:
                stack.enter_context(self._state.whole(optimizers=True))
            yield

    def close(self) -> None:
        """Remove the hooks."""
        self._unwatch()
        if self._foreign is not None:
            self._foreign.close()

    def notes(self) -> dict[str, Any]:
        """What each stage has and how long it computed, for the result. Collective."""
        if self._state is None or self._executor is None:
            return {}
        memory = self._state.memory()
        bubble, seconds = self._stopwatch.seconds["bubble"], sum(self._executor.seconds.values())
        row = [float(seconds), bubble, *map(float, memory.values())]
        rows = self._world.gather(row, "the figures of the stages").tolist()
        place, pipeline = self._mesh.place, self._pipeline
        stages: list[dict[str, Any]] = []
        for stage in range(pipeline.stages):
            same = [rows[place.rank_of(replica, stage, 0)] for replica in range(place.replicas)]
            mean = [sum(column) / len(same) for column in zip(*same, strict=True)]
            layers = [list(self._layers[part]) for part in range(stage, len(self._layers), pipeline.stages)]
            stages.append(
                {
                    "layers": layers,
                    "compute_seconds": mean[0],
                    "bubble_seconds": mean[1],
                    "bytes": dict(zip(memory, map(int, mean[2:]), strict=True)),
                }
            )
        slowest = max(range(len(stages)), key=lambda stage: stages[stage]["compute_seconds"])
        return {"split": {"stages": stages, "slowest_stage": slowest, "evenness": self._evenness}}
