"""One way of a replica: what is split over the ways, the first step that cuts tensors, and wholeness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.gradients.optimizers import why_not
from offbeat.runtime.tensor_parallel.apply import SplitTensors, apply
from offbeat.runtime.tensor_parallel.plan import TensorPlan, plan
from offbeat.runtime.tensor_parallel.splits import Manner
from offbeat.simulate.predicted_step import Step
from offbeat.team.split_context import SplitContext
from offbeat.team.way_figures import WayFigures


class WayWork:
    """One way of a replica's stage: it plans when the model is prepared, and cuts tensors in the first step."""

    def __init__(self, context: SplitContext) -> None:
        self._context = context
        self._own: Mapping[str, str] | None = None  # What the task or the loop says about how modules are split.
        self._plan: TensorPlan | None = None
        self._split: SplitTensors | None = None
        self._figures: WayFigures | None = None

    def follow(self, own: Mapping[str, str]) -> None:
        """Split modules as they are named here, and no others."""
        if self._plan is not None:
            raise UsageError(
                "tensor_plan() came after prepare(model), which has planned already. Call it before, or not at all."
            )
        self._own = dict(own)

    def plan(self, model: nn.Module) -> None:
        """Plan how the model is split, and tell the user."""
        self._plan = plan(model, self._context.mesh.place.ways, self._own)
        if self._context.world.rank == 0:
            self._context.send({"kind": "plan", "text": self._plan.explain()})

    @property
    def regions(self) -> frozenset[str]:
        """Modules whose own code depends on the number of ways: a pipeline must not look into them."""
        assert self._plan is not None  # noqa: S101 (planned)
        return frozenset(split.name for split in self._plan.splits if split.manner is Manner.HEADS)

    def before_call(self, model: nn.Module, inputs: Any) -> bool:
        """The whole model is called: cut it if this is the first step; returns whether it was cut now."""
        if self._split is not None and self._split.is_whole:
            return False
        if torch.is_grad_enabled():
            first = self._split is None
            if first:
                self._context.check_batch(inputs)
                self.cut(model)
            if self._figures is not None:
                self._figures.called()
            else:
                self._figures = WayFigures(self._context.mesh.tensor)
            # Of a mask of dropout, each way uses its part; and the loop may have drawn on one way only.
            state = self._context.mesh.tensor.share(torch.get_rng_state(), "the sharing of random state")
            torch.set_rng_state(state)
            return first
        if self._split is not None:
            raise UsageError(
                f"the model was called without gradients, but under {self._context.strategy} all ways of a replica "
                f"compute the same batch together. Evaluate inside `with team.averaged(model):`, where every worker "
                f"has the whole model."
            )
        return False

    def cut(self, model: nn.Module) -> None:
        """Keep this way's part of the parameters, and of what optimizers know about them."""
        context = self._context
        optimizers = context.holdings.optimizers
        for optimizer in optimizers:
            reason = why_not(type(optimizer))
            if reason:
                raise StrategyError(
                    f"{type(optimizer).__name__} cannot be used with {context.strategy}, where each worker has parts "
                    f"of the parameters: {reason}. Use AdamW or SGD."
                )
        assert self._plan is not None  # noqa: S101 (planned)
        self._split = apply(self._plan, model, context.mesh.tensor, context.stopwatch)
        self._split.cut_state(optimizers)

    def agreed(self, opinion: bool) -> bool:
        """The first way's opinion, on all ways."""
        return bool(self._context.mesh.tensor.share(torch.tensor([int(opinion)]), "an agreement of the ways"))

    def whole(self, optimizers: bool) -> AbstractContextManager[None]:
        """Inside, every way has the whole of each tensor, and perhaps of the optimizers' state. All ways call this."""
        if self._figures is not None:
            self._figures.interrupted()
        known = self._context.holdings.optimizers if optimizers else ()
        return nullcontext() if self._split is None else self._split.whole(known)

    def power_sums(self, parameters: Sequence[Parameter], order: float) -> list[float]:
        """For gradients of the whole parameters, the sum of magnitudes to a power; the largest for infinity."""
        assert self._split is not None  # noqa: S101 (cut)
        return self._split.power_sums(parameters, order)

    def predicted(self, batches: int) -> Step | str:
        """What a step of so many batches sums, or why its time cannot be predicted."""
        if self._context.mesh.place.replicas > 1:
            return "sums of activations and the exchange between replicas are not played together"
        return "it made no step" if self._figures is None else self._figures.predicted(batches)

    def notes(self) -> dict[str, Any]:
        """What was split, for the result."""
        if self._plan is None:
            return {}
        splits = {split.name: str(split.manner) for split in self._plan.splits}
        return {"tensor": {"share": self._plan.share, "split": splits, "whole": dict(self._plan.whole)}}
