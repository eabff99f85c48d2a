"""A pipeline's stages as threads of one process: the executors of real runs, with messages through queues."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.runtime.pipeline.executor import PipelineShape, StageExecutor
from offbeat.runtime.pipeline.gradients import StandIns
from offbeat.runtime.pipeline.messages import Bundles
from offbeat.runtime.pipeline.state import SplitState
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.split.stages import split_model

Boxes = dict[tuple[int, int, int], "Queue[Tensor]"]
"""What is on its way, by source, target and tag."""
Trained = tuple[float, dict[str, Tensor]]
"""A loss, and the gradients of parameters by name."""


class Mail:
    """One stage's messages, as a process group carries them."""

    marks = False

    def __init__(self, boxes: Boxes, stage: int, deadline: float) -> None:
        self._boxes, self._stage, self._deadline = boxes, stage, deadline

    def send(self, tensor: Tensor, peer: int, tag: int) -> Delivery:
        self._box(self._stage, peer, tag).put(tensor.clone())
        return Delivery(tensor, None, 0.0)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Delivery:
        return Delivery(tensor, self._box(peer, self._stage, tag), self._deadline)

    def _box(self, source: int, target: int, tag: int) -> Queue[Tensor]:
        return self._boxes.setdefault((source, target, tag), Queue())


class Delivery:
    """A message on its way."""

    def __init__(self, tensor: Tensor, box: Queue[Tensor] | None, deadline: float) -> None:
        self._tensor, self._box, self._deadline = tensor, box, deadline

    def wait(self) -> None:
        if self._box is None:
            return
        try:
            self._tensor.copy_(self._box.get(timeout=self._deadline))
        except Empty:
            raise RuntimeError(f"nothing came for {self._deadline:g} s.") from None


def train_stages(
    model: nn.Module,
    batch: tuple[Any, Any],
    criterion: Callable[[Any, Any], Tensor],
    shape: PipelineShape,
    bounds: Sequence[int],
    microbatches: int,
    deadline: float = 10.0,
) -> list[Trained]:
    """What each stage has after forward and backward of a batch, on a copy of the model."""
    boxes: Boxes = {}
    prepared: list[Callable[[], Trained]] = []
    for stage in range(shape.stages):
        own = copy.deepcopy(model)
        split = split_model(own, (batch[0],), len(bounds) - 1, bounds=bounds)
        group: Any = SimpleNamespace(
            process_group=SimpleNamespace(messages=Mail(boxes, stage, deadline)),
            rank=stage,
            size=shape.stages,
            sent=SimpleNamespace(add=lambda _: None),
        )
        state = SplitState(own, [split.parts[number :: shape.stages] for number in range(shape.stages)], group, [])
        executor = StageExecutor(split, shape, stage, Bundles(group, Stopwatch(bubbles=True), "stage {}".format))
        stand_ins = StandIns(own, state.own)
        executor.tied = stand_ins.tied({parameter: users for _, users, parameter in state.shared()})
        prepared.append(partial(_step, own, executor, stand_ins, batch, criterion, microbatches))
    with ThreadPoolExecutor(shape.stages) as threads:
        return [running.result() for running in [threads.submit(each) for each in prepared]]


def _step(
    model: nn.Module,
    executor: StageExecutor,
    stand_ins: StandIns,
    batch: tuple[Any, Any],
    criterion: Callable[[Any, Any], Tensor],
    microbatches: int,
) -> Trained:
    with stand_ins.in_place():
        loss = executor.step(batch, criterion, microbatches)
    stand_ins.deliver()
    return float(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train_alone(model: nn.Module, batch: tuple[Any, Any], criterion: Callable[[Any, Any], Tensor]) -> Trained:
    """The same of the whole model in one piece."""
    own = copy.deepcopy(model)
    loss = criterion(own(batch[0]), batch[1])
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


def agree(alone: Trained, stages: Sequence[Trained]) -> bool:
    """Whether every stage has the loss and its part of the gradients, and all have been computed by some stage."""
    loss, gradients = alone
    if {name for _, own in stages for name in own} != set(gradients):
        return False
    same = (torch.allclose(own[name], gradients[name], rtol=0, atol=1e-12) for _, own in stages for name in own)
    return all(same) and all(abs(each - loss) < 1e-12 for each, _ in stages)
