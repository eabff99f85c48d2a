"""Gradients of single examples: the same as autograd gives one by one, and refused where there are none."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from offbeat.errors import TaskError
from offbeat.runtime.groups.group import Group
from offbeat.tasks.logistic import Logistic
from offbeat.worker.per_example_gradients import PerSample


class Alone:
    """The group of a worker that has nobody to sum with."""

    rank, size = 0, 1

    def sums(self, tensors: Any, what: str) -> Any:
        return tensors


def passes(task: Logistic, model: nn.Module) -> PerSample:
    return PerSample(task, model, cast("Group", Alone()))


@pytest.fixture(scope="module")
def made() -> tuple[Logistic, nn.Module]:
    task = Logistic(examples=120, features=8)
    model = task.model()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 8))
    return task, model


@pytest.mark.slow
def test_they_are_those_of_autograd_one_by_one(made: tuple[Logistic, nn.Module]) -> None:
    task, model = made
    squares, total = 0.0, torch.zeros(8, dtype=torch.float64)
    train: Any = task.data().train
    for i in range(len(train)):
        x, y = train[i]
        (gradient,) = torch.autograd.grad(task.loss(model, (x[None], y[None])), [model.weight])
        squares += float(gradient.double().square().sum())
        total += gradient.double()
    found = passes(task, model).plain()
    assert found["examples"] == len(train) == 96
    assert found["squares"] == pytest.approx(squares, rel=1e-5)
    assert found["joint"] == pytest.approx(float(total.square().sum()), rel=1e-4)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_ways_leave_the_model_without_hooks_and_random_ones_raise_diversity(made: tuple[Logistic, nn.Module]) -> None:
    task, model = made
    torch.manual_seed(0)
    found = passes(task, model).ways()
    assert not model._forward_pre_hooks
    diversity = {name: one["squares"] / one["joint"] for name, one in found.items()}
    assert diversity["random 10 %"] > diversity["as it is"]
    assert found["largest 10 %"]["squares"] < found["as it is"]["squares"]


def test_models_whose_examples_have_no_gradient_of_their_own_are_refused() -> None:
    task = Logistic(examples=120, features=8)
    with pytest.raises(TaskError, match="batch normalization"):
        passes(task, nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    with torch.device("meta"):
        large = nn.Linear(3000, 3000)
    with pytest.raises(TaskError, match="9,003,000 parameters"):
        passes(task, large)
