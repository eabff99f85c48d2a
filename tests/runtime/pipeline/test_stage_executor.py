"""Stages train what one process trains, with the executors of real runs in threads: models that are awkward to cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from threaded_stages import agree, train_alone, train_stages
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat.protocols.pipelines.orders import PipelineKind
from offbeat.runtime.pipeline.executor import PipelineShape
from offbeat.runtime.split.stages import split_model

WIDTH, CLASSES, EXAMPLES = 6, 4, 13


class Layers(nn.Module):
    """Four layers, and a forward pass that a test says."""

    def __init__(self, code: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def changed_after_it_was_used(self: Layers, x: Tensor) -> Tensor:
    x = torch.tanh(self.second(start := self.first(x)))
    x = self.third(x)
    x += start
    x.mul_(0.5)[:, 0] *= 3
    return self.head(torch.relu_(x))


def changed_before_it_crosses(self: Layers, x: Tensor) -> Tensor:
    start = self.first(x)
    x = torch.tanh(start * 2)
    start += 1
    x = torch.tanh(self.third(self.second(x)))
    return self.head(x + start)


def used_twice(self: Layers, x: Tensor) -> Tensor:
    x = torch.tanh(self.second(torch.tanh(self.first(x))))
    return self.head(torch.tanh(self.second(torch.tanh(self.third(x)))))


def a_weight_of_another_stage(self: Layers, x: Tensor) -> Tensor:
    x = torch.tanh(self.second(torch.tanh(self.first(x))))
    return self.head(torch.tanh(self.third(x)) @ self.first.weight)


def a_layer_whose_result_is_dropped(self: Layers, x: Tensor) -> Tensor:
    x = torch.tanh(self.first(x))
    self.third(x)
    return self.head(torch.tanh(self.second(x)))


def equals_one_process(code: Callable[[Layers, Tensor], Tensor], shape: PipelineShape, microbatches: int) -> bool:
    torch.manual_seed(0)
    model = Layers(code).double()
    batch = torch.randn(EXAMPLES, WIDTH, dtype=torch.float64), torch.randint(0, CLASSES, (EXAMPLES,))
    parts = shape.stages * shape.chunks
    layers = len(split_model(model, batch[:1], 1).costs)
    bounds = [layers * part // parts for part in range(parts + 1)]
    stages = train_stages(model, batch, cross_entropy, shape, bounds, microbatches)
    return agree(train_alone(model, batch, cross_entropy), stages)


CODES = (
    *(changed_after_it_was_used, changed_before_it_crosses, used_twice),
    *(a_weight_of_another_stage, a_layer_whose_result_is_dropped),
)


@pytest.mark.parametrize("kind", PipelineKind)
@pytest.mark.parametrize("code", CODES)
def test_stages_have_the_gradients_of_one_process(code: Callable[[Layers, Tensor], Tensor], kind: PipelineKind) -> None:
    assert equals_one_process(code, PipelineShape(kind, 2, 2 if kind is PipelineKind.INTERLEAVED else 1), 4)


@pytest.mark.parametrize("microbatches", [1, 3, EXAMPLES])
def test_microbatches_count_by_their_examples(microbatches: int) -> None:
    assert equals_one_process(used_twice, PipelineShape(PipelineKind.ONE_F_ONE_B, 3), microbatches)
