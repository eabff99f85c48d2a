"""Refusals of splits that a task's model or batch cannot have, before a process starts."""

from __future__ import annotations

import torch
from torch import nn

from offbeat.errors import StrategyError
from offbeat.runtime.tensor_parallel.plan import plan
from offbeat.strategies import Combined, Pipeline, TensorParallel
from offbeat.task import Task


def check_task(task: Task, strategy: Combined, workers: int) -> None:
    """Refuse ways and stages by which a task's model or batches cannot be divided, as far as that is known by now."""
    pipelines = [part for part in strategy.split if isinstance(part, Pipeline)]
    for pipeline in pipelines:
        _check_microbatches(task, pipeline, strategy.replicas(workers))
    try:
        with torch.device("meta"):
            model = task.model()
    except Exception:  # Not every model can be made without memory: then its workers look at it.
        return
    for pipeline in pipelines:
        _check_stages(task, pipeline, model)
    for part in strategy.split:
        if isinstance(part, TensorParallel):
            plan(model, part.ways, task.tensor_plan(model))


def _check_microbatches(task: Task, pipeline: Pipeline, replicas: int) -> None:
    count, examples = pipeline.microbatches, -(-task.global_batch // replicas)
    if count != "auto" and count > examples:
        raise StrategyError(
            f"{pipeline} cannot cut the batches of {type(task).__name__}: each of {replicas} replicas gets {examples} "
            f"of global_batch={task.global_batch} examples, fewer than {count} microbatches. Use at most {examples} "
            f"microbatches, or a larger global_batch."
        )


def _check_stages(task: Task, pipeline: Pipeline, model: nn.Module) -> None:
    layers, parts = task.stages(model), pipeline.stages * pipeline.chunks
    if layers is not None and len(layers) < parts:
        raise StrategyError(
            f"{pipeline} cannot cut {type(task).__name__}: its stages(model) names {len(layers)} modules, too few for "
            f"{parts} parts (stages x chunks), which need at least one each. Use fewer stages, or name smaller modules."
        )
