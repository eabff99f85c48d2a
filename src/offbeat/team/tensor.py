"""A team whose replicas share their operators over several workers: the plan, the first step that cuts, wholeness."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.gradients.optimizers import why_not
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.split.mesh import Mesh
from offbeat.runtime.state.checkpoint_manager import Holdings
from offbeat.runtime.state.random_state import capture, packed, restore, unpacked
from offbeat.runtime.tensor_parallel.apply import SplitTensors, apply
from offbeat.runtime.tensor_parallel.plan import TensorPlan, plan
from offbeat.strategies import Combined, TensorParallel
from offbeat.strategies.worker.capabilities import Starter
from offbeat.strategies.worker.exchange import Exchange
from offbeat.strategies.worker.flat_rows import Rows
from offbeat.task import Task


class TensorWork:
    """One way of a replica: it plans when the model is prepared, and cuts it in the first training step.

    Until then everything is whole, so a checkpoint is loaded as into one process.
    """

    def __init__(
        self,
        strategy: Combined,
        mesh: Mesh,
        world: Group,
        exchange: Exchange,
        stopwatch: Stopwatch,
        holdings: Holdings,
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        self._strategy, self._mesh, self._world = strategy, mesh, world
        self._exchange, self._stopwatch, self._holdings, self._send = exchange, stopwatch, holdings, send
        holdings.whole = lambda: self._whole(True)
        self._own: Mapping[str, str] | None = None  # What the task or the loop says about how modules are split.
        self._model: nn.Module | None = None
        self._plan: TensorPlan | None = None
        self._split: SplitTensors | None = None
        self._guard: RemovableHandle | None = None

    @property
    def replica(self) -> tuple[int, int]:
        """Which replica this worker has a part of, and how many there are."""
        return self._mesh.place.replica, self._mesh.place.replicas

    def follow(self, own: Mapping[str, str]) -> None:
        """Split modules as they are named here, and no others."""
        if self._plan is not None:
            raise UsageError(
                "tensor_plan() came after prepare(model), which has planned already. Call it before, or not at all."
            )
        self._own = dict(own)

    def adopt(self, model: nn.Module) -> None:
        """Start from worker 0's model, and plan how it is split."""
        if self._model is not None:
            raise UsageError(
                f"{self._strategy} splits one model, and a second one was prepared. Join them in one module, or use a "
                f"strategy without tensor."
            )
        self._model = model
        self._plan = plan(model, self._mesh.place.ways, self._own)
        if self._world.rank == 0:
            self._send({"kind": "plan", "text": self._plan.explain()})
        flat = Rows([*model.parameters(), *model.buffers()], every_kind=True)
        flat.write([self._world.share(row, "the sharing of worker 0's model") for row in flat.read()])
        self._guard = model.register_forward_pre_hook(self._before_forward)

    def draw_alike(self) -> None:
        """Give all ways of a replica the random state of its first: of a mask of dropout, each uses its part."""
        own = capture()
        row = self._mesh.tensor.share(packed(own), "the sharing of random state")
        if self._mesh.place.way:
            restore(unpacked(row, own))

    def _before_forward(self, model: nn.Module, _inputs: Any) -> None:
        if self._split is not None and self._split.is_whole:
            return
        if torch.is_grad_enabled():
            if self._split is None:
                self._cut(model)
        elif self._split is not None:
            raise UsageError(
                f"the model was called without gradients, but under {self._strategy} all ways of a replica compute "
                f"the same batch together. Evaluate inside `with team.averaged(model):`, where every worker has the "
                f"whole model."
            )

    def _cut(self, model: nn.Module) -> None:
        """Keep this way's part of the parameters, and of what optimizers know about them."""
        optimizers = self._holdings.optimizers
        for optimizer in optimizers:
            reason = why_not(type(optimizer))
            if reason:
                raise StrategyError(
                    f"{type(optimizer).__name__} cannot be used with {self._strategy}, where each worker has parts of "
                    f"the parameters: {reason}. Use AdamW or SGD."
                )
        assert self._plan is not None  # noqa: S101 (adopted)
        self._split = apply(self._plan, model, self._mesh.tensor, self._stopwatch)
        self._split.cut_state(optimizers)
        if self._mesh.place.replicas > 1:
            self._exchange.install(model)
            if isinstance(self._exchange, Starter):
                self._exchange.begin()

    def whole(self) -> Any:
        """Inside, every worker has the whole model, so that each may evaluate its own examples."""
        return self._whole(False)

    @contextmanager
    def _whole(self, optimizers: bool) -> Generator[None]:
        split = self._split
        with nullcontext() if split is None else split.whole(self._holdings.optimizers if optimizers else ()):
            yield

    def notes(self) -> dict[str, Any]:
        """What was split, for the result."""
        if self._plan is None:
            return {}
        splits = {split.name: str(split.manner) for split in self._plan.splits}
        return {"tensor": {"share": self._plan.share, "split": splits, "whole": dict(self._plan.whole)}}

    def close(self) -> None:
        """Remove the hook."""
        if self._guard is not None:
            self._guard.remove()


def check_task(task: Task, strategy: Combined) -> None:
    """Refuse ways by which the model of a task cannot be divided, without memory for its parameters."""
    for part in strategy.split:
        if isinstance(part, TensorParallel):
            try:
                with torch.device("meta"):
                    model = task.model()
            except Exception:  # Not every model can be made without memory: then its workers look at it.
                return
            plan(model, part.ways, task.tensor_plan(model))
