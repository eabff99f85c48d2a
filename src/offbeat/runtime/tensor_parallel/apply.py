"""Splitting a model in place, by a plan; and making it whole again for a while."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import UsageError
from offbeat.runtime.gradients.power_sums import power_sums
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.tensor_parallel.attention import keep_from_shortcuts, split_attention
from offbeat.runtime.tensor_parallel.cuts import Cut
from offbeat.runtime.tensor_parallel.functions import Entrance
from offbeat.runtime.tensor_parallel.gradients import watch_norms
from offbeat.runtime.tensor_parallel.layers import (
    cut_of,
    cut_parameters,
    enter_heads,
    is_linear,
    mark_cut,
    split_by_column,
    split_by_row,
    split_dropout,
    split_embedding,
    split_output,
    sum_gradient,
)
from offbeat.runtime.tensor_parallel.plan import TensorPlan
from offbeat.runtime.tensor_parallel.splits import Manner, Split, cuts_of
from offbeat.runtime.tensor_parallel.ways import TensorWays

_ABSENT = object()


def apply(plan: TensorPlan, model: nn.Module, group: DirectGroup, stopwatch: Stopwatch | None = None) -> SplitTensors:
    """Split a model in place; all ways call this with equal models and equal random states.

    Parameters stay the same objects, with this way's part as their data, so an optimizer that has them keeps working.
    """
    if group.size != plan.ways:
        raise UsageError(
            f"a plan for {plan.ways} ways cannot be applied by {group.size} workers. Plan for {group.size} ways."
        )
    return SplitTensors(plan if group.size > 1 else None, model, TensorWays(group, stopwatch))


class SplitTensors:
    """A model that is split over ways."""

    def __init__(self, plan: TensorPlan | None, model: nn.Module, ways: TensorWays) -> None:
        self._ways, self._depth = ways, 0
        self._parts: list[Tensor] = []  # The memory of this way's parts while the model is whole: others may see it.
        before = {module: dict(vars(module)) for module in model.modules()}
        if plan is not None:
            _split_all(plan, model, ways)
        self._changes = [change for module, own in before.items() for change in _changes(module, own)]
        self._cuts: list[tuple[Parameter, Cut]] = [
            (parameter, cut) for parameter in model.parameters() if (cut := cut_of(parameter)) is not None
        ]
        watch_norms([parameter for parameter, _ in self._cuts], lambda: self._depth == 0, ways)

    @property
    def is_whole(self) -> bool:
        """Whether the model is whole at the moment."""
        return self._depth > 0

    def cut_state(self, optimizers: Iterable[Optimizer]) -> None:
        """Keep this way's part of what optimizers know about split parameters."""
        for state, name, cut in self._state(optimizers, whole=True):
            state[name] = self._ways.part(state[name], cut)

    @contextmanager
    def whole(self, optimizers: Sequence[Optimizer] = ()) -> Generator[None]:
        """Inside, every way has the whole model, and the whole state of these optimizers. All ways call this."""
        if self._depth and optimizers:
            raise UsageError("a split model is whole already, without its optimizers. Do this outside of that `with`.")
        gradients = [parameter.grad for parameter, _ in self._cuts]
        if not self._depth:
            self._make_whole(optimizers)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._cut_again(optimizers, gradients)

    def power_sums(self, parameters: Sequence[Parameter], order: float) -> list[float]:
        """For the whole gradient of each parameter, the sum of its magnitudes to a power. All ways call this."""
        row = torch.tensor(power_sums(parameters, order), dtype=torch.float64)
        is_cut = torch.tensor([cut_of(parameter) is not None for parameter in parameters], dtype=torch.bool)
        shared = row.masked_fill(~is_cut, 0)
        if order == float("inf"):
            self._ways.largest(shared, "a norm of gradients")
        else:
            self._ways.sum(shared, "a norm of gradients")
        return torch.where(is_cut, shared, row).tolist()

    def _make_whole(self, optimizers: Iterable[Optimizer]) -> None:
        for state, name, cut in self._state(optimizers, whole=False):
            state[name] = self._ways.whole(state[name], cut, "the gathering of optimizer state")
        self._parts = [parameter.data for parameter, _ in self._cuts]
        for parameter, cut in self._cuts:
            parameter.grad = None
            parameter.data = self._ways.whole(parameter.data, cut, "the gathering of the model")
            mark_cut(parameter, None)
        for module, name, before, _ in self._changes:
            _set(module, name, before)

    def _cut_again(self, optimizers: Iterable[Optimizer], gradients: Iterable[Tensor | None]) -> None:
        self.cut_state(optimizers)
        for (parameter, cut), part, gradient in zip(self._cuts, self._parts, gradients, strict=True):
            parameter.data = part.copy_(self._ways.part(parameter.data, cut))
            parameter.grad = gradient
            mark_cut(parameter, cut)
        for module, name, _, after in self._changes:
            _set(module, name, after)

    def _state(self, optimizers: Iterable[Optimizer], whole: bool) -> list[tuple[dict[str, Any], str, Cut]]:
        """Optimizer state that has the shape of a split parameter, whole or split."""
        members = [(optimizer.state.get(p), p, cut) for optimizer in optimizers for p, cut in self._cuts]
        result: list[tuple[dict[str, Any], str, Cut]] = []
        for state, parameter, cut in members:
            shape = list(parameter.shape)
            shape[cut.dim] = cut.size if whole else cut.length(self._ways.rank, self._ways.size)
            for name, value in (state or {}).items():
                if isinstance(value, Tensor) and list(value.shape) == shape:
                    result.append((state, name, cut))  # pyright: ignore[reportArgumentType]
        return result


def _changes(module: nn.Module, before: dict[str, Any]) -> list[tuple[nn.Module, str, Any, Any]]:
    """Attributes that splitting has changed, with both values."""
    after = vars(module)
    return [
        (module, name, before.get(name, _ABSENT), value)
        for name, value in after.items()
        if before.get(name, _ABSENT) is not value and not isinstance(before.get(name), dict)
    ]


def _set(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value


def _split_all(plan: TensorPlan, model: nn.Module, ways: TensorWays) -> None:
    work = [(split, model.get_submodule(split.name)) for split in plan.splits]
    # Tied parameters belong to several modules: all sizes are read before anything is cut.
    for (_, module), cuts in zip(work, [cuts_of(*each) for each in work], strict=True):
        cut_parameters(module, cuts, ways)
    entrances: dict[str, Entrance] = {}
    for split, module in work:
        _split(module, split, ways, entrances.setdefault(split.enters or split.name, Entrance(ways)))
    keep_from_shortcuts(model)


def _split(module: Any, split: Split, ways: TensorWays, entrance: Entrance) -> None:
    if isinstance(module, nn.MultiheadAttention):
        split_attention(module, ways)
    elif isinstance(module, nn.Embedding):
        split_embedding(module, ways)
    elif isinstance(module, nn.Dropout):
        split_dropout(module, ways)
    elif not is_linear(module):
        enter_heads(module, split.size, split.attributes, ways)
        _share_norms(module, ways)
    elif split.manner is Manner.VOCABULARY:
        split_output(module, ways, entrance, split.size)
    elif split.manner is Manner.ROW:
        split_by_row(module, ways)
    else:
        split_by_column(module, entrance)


def _share_norms(module: nn.Module, ways: TensorWays) -> None:
    """Parameters that all heads share: every way has the gradient of its own heads only."""
    for name, child in module.named_children():
        if name in ("q_norm", "k_norm"):
            for parameter in child.parameters():
                sum_gradient(parameter, ways)
