"""A loss that is not a mean over examples is noticed in its first backward pass; all others raise no alarm."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.runtime.gradients.first_loss import FirstLoss

WEIGHT = torch.tensor([1.0, 2.0, 3.0])
TARGET = torch.tensor([0, 1, 2, 1, 0])
WIDE = nn.Linear(2, 5)
"""As many rows as a batch has examples."""
Loss = Callable[[nn.Module, Tensor], Tensor]

ODD: dict[str, tuple[Loss, str]] = {
    "class weights": (lambda m, x: functional.cross_entropy(m(x), TARGET, weight=WEIGHT), "class weights"),
    "module with weights": (lambda m, x: nn.CrossEntropyLoss(WEIGHT)(m(x), TARGET), "class weights"),
    "likelihood": (lambda m, x: functional.nll_loss(m(x).log_softmax(1), TARGET, weight=WEIGHT), "class weights"),
    "smoothed": (lambda m, x: functional.cross_entropy(m(x), TARGET, WEIGHT, label_smoothing=0.1), "class weights"),
    "accumulated": (lambda m, x: functional.cross_entropy(m(x), TARGET, WEIGHT) / 4, "class weights"),
    "sum": (lambda m, x: functional.cross_entropy(m(x), TARGET, reduction="sum"), "it is a sum"),
    "sum of squares": (lambda m, x: functional.mse_loss(m(x), x[:, :3], reduction="sum"), "it is a sum"),
    "sum and penalty": (
        lambda m, x: functional.mse_loss(m(x), x[:, :3], reduction="sum") + sum(p.pow(2).sum() for p in m.parameters()),
        "it is a sum",
    ),
    "sum by hand": (lambda m, x: (m(x) - x[:, :3]).square().sum(), "a sum over examples"),
    "sum of each example's": (lambda m, x: (m(x) - x[:, :3]).square().mean(1).sum(), "a sum over examples"),
    "sum by dimensions": (lambda m, x: -(x[:, :3] * m(x).log_softmax(1)).sum(-1).sum(dim=(-1,)), "a sum over examples"),
    "sum of columns": (lambda m, x: (m(x) - x[:, :3]).abs().sum(0).sum(), "a sum over examples"),
    "sum without reduction": (
        lambda m, x: functional.cross_entropy(m(x), TARGET, reduction="none").sum() + 1e-3 * WIDE.weight.square().sum(),
        "a sum over examples",
    ),
    "padding": (lambda m, x: functional.cross_entropy(m(x), TARGET, ignore_index=1), "ignore_index=1"),
    "padded pictures": (
        lambda m, x: functional.cross_entropy(m(x).view(5, 3, 1, 1), TARGET.view(5, 1, 1), ignore_index=255),
        "ignore_index=255",
    ),
}
MEANS: dict[str, Loss] = {
    "cross entropy": lambda m, x: functional.cross_entropy(m(x), TARGET),
    "smoothed": lambda m, x: functional.cross_entropy(m(x), TARGET, label_smoothing=0.1),
    "squares": lambda m, x: functional.mse_loss(m(x), x[:, :3]),
    "by hand": lambda m, x: (m(x) - x[:, :3]).pow(2).sum(1).mean(),
    "divided sum": lambda m, x: functional.cross_entropy(m(x), TARGET, reduction="sum") / len(x),
    "scaled sum": lambda m, x: functional.cross_entropy(m(x), TARGET, reduction="sum") * (1 / 5),
    "weighed by hand": lambda m, x: (WEIGHT[TARGET] * functional.cross_entropy(m(x), TARGET, reduction="none")).mean(),
    "divergence": lambda m, x: functional.kl_div(m(x).log_softmax(1), x[:, :3].softmax(1), reduction="batchmean"),
    "penalty": lambda m, x: functional.cross_entropy(m(x), TARGET) + 0.1 * sum(p.pow(2).sum() for p in m.parameters()),
    "sum divided later": lambda m, x: (m(x) - x[:, :3]).square().sum() / x.numel(),
    "mean of columns": lambda m, x: (m(x) - x[:, :3]).square().sum(0).mean() / 5,
    "tasks": lambda m, x: torch.stack([m(x)[:, task].square().mean() for task in (0, 1, 2, 0, 1)]).sum(),
    "sums inside": lambda m, x: functional.mse_loss(m(x.sum(0, keepdim=True)).sum(0), x[0, :3]),
    "penalty of rows": lambda m, x: m(x).square().mean() + WIDE.weight.norm(dim=1).sum() + WIDE.bias.abs().sum(),
    "logits": lambda m, x: functional.binary_cross_entropy_with_logits(m(x), x[:, :3].sigmoid(), pos_weight=WEIGHT),
}


def backward(loss: Loss) -> None:
    model, first = nn.Linear(4, 3), FirstLoss(2, lambda: len(TARGET))
    first.watch(model)
    for _ in range(2):
        loss(model, torch.randn(5, 4)).backward()
    first.close()


@pytest.mark.parametrize("name", ODD)
def test_a_loss_that_is_not_a_mean_over_examples_is_said_once(name: str) -> None:
    loss, words = ODD[name]
    with pytest.warns(UserWarning, match=rf"not a mean over the examples.*{words}.*2 workers") as said:
        backward(loss)
    assert [one.filename for one in said] == [__file__], "it shows the line of the user's loop"


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_examples_raises_no_alarm(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(MEANS[name])
