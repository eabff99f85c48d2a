"""Backward in two, first for inputs and then for weights, gives the gradients of backward at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from offbeat.runtime.pipeline.backward import backward, input_gradients

Part = Callable[["Weights", Sequence[Tensor]], list[Tensor]]


class Weights(nn.Module):
    """What the parts below take their weights from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.loose = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)


def chain(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    return [of.third(torch.tanh(of.second(of.first(x[0]) * of.frozen)))]


def views(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    return [part.transpose(0, 1) for part in of.second(of.first(x[0])).chunk(2, dim=1)]


def an_output_of_no_input(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    words = of.embedding(torch.arange(5))
    return [of.first(x[0]).relu(), of.second(words), of.loose * 2]


def an_output_of_no_input_that_shares_weights(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    return [of.first(x[0]), of.first(of.embedding(torch.arange(5))), linear(x[1], of.embedding.weight)]


def weights_used_again_with_others_between(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    y = x[0]
    for layer in (of.first, of.second, of.first, of.third, of.second, of.first):
        y = torch.tanh(layer(y))
    return [y]


def one_weight_with_two_biases(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    shared = of.second.weight * of.loose
    return [linear(x[0], shared, of.first.bias) + linear(x[1], shared, of.third.bias), linear(x[1], of.first.weight)]


def weights_of_weights(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    return [of.norm(x[0]) * of.norm.weight.sum() + of.first.weight.sum()]


def attention(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    return [of.attention(torch.stack([x[0], x[1]]))]


def in_place(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    y = of.first(x[0])
    y[:, :2] += of.loose[:2]
    y.relu_()
    return [y]


def an_unused_input(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    return [of.first(x[1]), of.second.weight]


def recomputed(of: Weights, x: Sequence[Tensor]) -> list[Tensor]:
    return [of.third(checkpoint(lambda y: of.second(torch.tanh(of.first(y))), x[0], use_reentrant=False))]


PARTS: list[Part] = [
    *(chain, views, an_output_of_no_input, an_output_of_no_input_that_shares_weights),
    *(weights_used_again_with_others_between, one_weight_with_two_biases, weights_of_weights, attention, in_place),
    *(an_unused_input, recomputed),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_gradients_in_two_are_those_at_once(part: Part) -> None:
    torch.manual_seed(1)
    of = Weights().double()
    other, inputs = copy.deepcopy(of), [torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    others = [x.detach().clone().requires_grad_() for x in inputs]
    draws = torch.Generator().manual_seed(2)
    for _ in range(2):  # Microbatches: gradients are added.
        outputs = part(of, inputs)
        gradients = [torch.randn(y.shape, generator=draws, dtype=y.dtype) for y in outputs]
        rest = input_gradients(outputs, gradients, inputs)
        before = [None if p.grad is None else p.grad.clone() for p in of.parameters()]
        backward(part(other, others), gradients)
        for mine, theirs in zip(inputs, others, strict=True):
            _assert_alike(mine.grad, theirs.grad)
        for parameter, value in zip(of.parameters(), before, strict=True):
            _assert_alike(parameter.grad, value)
        del outputs
        rest()
    for (name, mine), theirs in zip(of.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        _assert_alike(mine.grad, theirs.grad)


def test_what_weights_do_not_need_is_freed_after_the_first_half() -> None:
    of = Weights()
    x = torch.randn(3, 4, requires_grad=True)
    freed: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.watched = _Watched(freed)  # type: ignore[attr-defined]
            return x * 1

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:  # noqa: ARG004
            return gradients[0]

    y = Watched.apply(of.first(x))
    rest = input_gradients([y], [torch.ones_like(y)], [x])
    del y
    assert freed == ["freed"]
    rest()
    assert of.first.weight.grad is not None


class _Watched:
    def __init__(self, freed: list[str]) -> None:
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append("freed")


def _assert_alike(mine: Tensor | None, theirs: Tensor | None) -> None:
    if theirs is None:
        assert mine is None or not mine.any()
    else:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
