"""One worker's part of a replica that several share: the mesh, the start from one model, and wholeness."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.settings import Goal
from offbeat.runtime.split.mesh import Mesh, MeshPlace
from offbeat.runtime.state import random_state
from offbeat.simulate.pipelines import StagedStep
from offbeat.simulate.predicted_step import Step
from offbeat.strategies import Combined
from offbeat.strategies.splitting.layouts import order_of, shape_of
from offbeat.strategies.worker.flat_rows import Rows
from offbeat.team.placement import Placement
from offbeat.team.split_context import SplitContext
from offbeat.team.stages import StageWork
from offbeat.team.ways import WayWork


def mesh_of(strategy: Combined, group: Group, goal: Goal) -> Mesh:
    """The mesh of a strategy with a split, placed by the hosts of the workers. Collective."""
    spread = " + ".join(str(part) for part in strategy.split)
    if goal.device != "cpu":
        raise StrategyError(f"{spread} sends values between workers on CPUs, not on {goal.device}. Use --device cpu.")
    if goal.gauge is not None:
        raise StrategyError(
            f"gradient noise is measured on the gradients of whole models, and under {spread} each worker has those of "
            f"a part. Measure it with allreduce."
        )
    (stages, ways), replicas = shape_of(strategy), strategy.replicas(group.size)
    order = order_of(strategy, goal.placement, group.direct.view.hosts.tolist())
    return Mesh(MeshPlace(group.rank, replicas, stages, ways, order), group.direct)


class SplitWork:
    """One worker's part of a replica, by stages, by ways, or both.

    Until the first step everything is whole, so a checkpoint is loaded as into one process.
    """

    def __init__(self, context: SplitContext) -> None:
        self._context = context
        place = context.mesh.place
        self._ways = WayWork(context) if place.ways > 1 else None
        self._stages = StageWork(context, self._ways) if place.stages > 1 else None
        self._parts = [part for part in (self._stages, self._ways) if part is not None]
        self._placement = Placement(place, context.mesh.hosts)
        self._model: nn.Module | None = None
        self._guard: RemovableHandle | None = None
        context.holdings.whole = lambda: self._whole(True)

    @property
    def replica(self) -> tuple[int, int]:
        """Which replica this worker has a part of, and how many there are."""
        return self._context.mesh.place.replica, self._context.mesh.place.replicas

    def follow(self, own: Mapping[str, str]) -> None:
        """Share the operators of modules between ways as they are named here, and no others."""
        if self._ways is not None:
            self._ways.follow(own)

    def adopt(self, model: nn.Module) -> None:
        """Start from worker 0's model; it is split in the first step."""
        if self._model is not None:
            spread = " + ".join(str(part) for part in self._context.strategy.split)
            raise UsageError(
                f"{self._context.strategy} splits one model, and a second one was prepared. Join them in one module, "
                f"or use a strategy without {spread}."
            )
        self._model = model
        if self._context.world.rank == 0:
            self._context.send({"kind": "plan", "text": self._placement.explain()})
        if self._ways is not None:
            self._ways.plan(model)
        flat = Rows([*model.parameters(), *model.buffers()], every_kind=True)
        flat.write([self._context.world.share(row, "the sharing of worker 0's model") for row in flat.read()])
        self._guard = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, model: nn.Module, *inputs: Any) -> None:
        if self._stages is not None:
            self._stages.before_call()
        elif self._ways is not None and self._ways.before_call(model, inputs):
            self._context.exchange.begin(model)

    def draw_alike(self) -> None:
        """Give all workers of a replica the random state of one: they read the same data, which may be random.

        It is that of the lowest rank, so that worker 0 draws what it would draw alone.
        """
        mesh = self._context.mesh
        stage, way = mesh.place.lowest
        for group, root in ((mesh.pipeline, stage), (mesh.tensor, way)):
            own = random_state.capture()
            row = group.share(random_state.packed(own), "the sharing of random state", root)
            if group.rank != root:
                random_state.restore(random_state.unpacked(row, own))

    def step_of(
        self, model: nn.Module, criterion: Callable[[Any, Any], Tensor], layers: Sequence[nn.Module] | None
    ) -> Callable[[Any, Any], Tensor] | None:
        """The function for one step of this model, cut between these layers; None where its forward can be called."""
        stages = self._stages
        if stages is None:
            return None
        stages.between = layers

        def step(inputs: Any, target: Any) -> Tensor:
            if model is not self._model:
                raise UsageError("team.pipeline() has a model that was not prepared. Give it to team.prepare() first.")
            return stages.step(model, inputs, target, criterion)

        return step

    def whole(self) -> AbstractContextManager[None]:
        """Inside, every worker has the whole model, so that each may evaluate its own examples."""
        return self._whole(False)

    @contextmanager
    def _whole(self, optimizers: bool) -> Generator[None]:
        # Stages first: each way then has its part of all layers, as ways alone would have.
        self._context.exchange.refresh()
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.whole(optimizers))
            yield
        if not optimizers:  # Each worker has evaluated its own examples, and may have drawn for them.
            self.draw_alike()

    def state_dict(self) -> dict[str, Any]:
        """Where the model is cut, so that a resumed run has the same parts, and what belongs to them."""
        return {"bounds": None if self._stages is None else self._stages.bounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut there again."""
        if self._stages is not None:
            self._stages.bounds = state["bounds"]

    def predicted(self, exchange: Step | str, batches: int) -> Step | StagedStep | str:
        """A step, which may be of several batches; or why its time cannot be predicted. Collective."""
        if self._stages is not None:
            return self._stages.predicted(exchange, batches)
        return "nothing is split" if self._ways is None else self._ways.predicted(batches)

    def notes(self) -> dict[str, Any]:
        """How the model was split, for the result. Collective."""
        return {name: value for part in (self._placement, *self._parts) for name, value in part.notes().items()}

    def close(self) -> None:
        """Remove the hooks."""
        if self._guard is not None:
            self._guard.remove()
        if self._stages is not None:
            self._stages.close()
        self._context.exchange.close()
