"""Splitting a model in place, by a plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.tensor_parallel.attention import keep_from_shortcuts, split_attention
from offbeat.runtime.tensor_parallel.functions import Entrance
from offbeat.runtime.tensor_parallel.layers import (
    cut_parameters,
    enter_heads,
    is_linear,
    split_by_column,
    split_by_row,
    split_dropout,
    split_embedding,
    split_output,
    sum_gradient,
)
from offbeat.runtime.tensor_parallel.plan import TensorPlan
from offbeat.runtime.tensor_parallel.splits import Manner, Split, cuts_of
from offbeat.runtime.tensor_parallel.ways import Ways


def apply(plan: TensorPlan, model: nn.Module, group: DirectGroup, stopwatch: Stopwatch | None = None) -> None:
    """Split a model in place; all ways call this with equal models.

    Parameters stay the same objects, with this way's part as their data, so an optimizer that has them keeps working.
    Optimizer state must not exist yet.
    """
    if group.size != plan.ways:
        raise UsageError(
            f"a plan for {plan.ways} ways cannot be applied by {group.size} workers. Plan for {group.size}."
        )
    if group.size == 1:
        return
    ways = Ways(group, stopwatch)
    work = [(split, model.get_submodule(split.name)) for split in plan.splits]
    # Tied parameters belong to several modules: all sizes are read before anything is cut.
    for (_, module), cuts in zip(work, [cuts_of(*each) for each in work], strict=True):
        cut_parameters(module, cuts, ways)
    entrances: dict[str, Entrance] = {}
    for split, module in work:
        _split(module, split, ways, entrances.setdefault(split.enters or split.name, Entrance(ways)))
    keep_from_shortcuts(model)


def _split(module: Any, split: Split, ways: Ways, entrance: Entrance) -> None:
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
    elif split.manner is Manner.COLUMN:
        split_by_column(module, entrance)
    else:
        raise StrategyError(f"{split.name} cannot be split by {split.manner}")


def _share_norms(module: nn.Module, ways: Ways) -> None:
    """Parameters that all heads share: every way has the gradient of its own heads only."""
    for name, child in module.named_children():
        if name in ("q_norm", "k_norm"):
            for parameter in child.parameters():
                sum_gradient(parameter, ways)
