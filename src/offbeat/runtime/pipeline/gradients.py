"""Gradients of a step in several backward passes, given to a model's parameters as if by one.

Exchanges, clipping and accumulation hook the parameters and expect one backward pass per batch. A pipeline has one per
microbatch. So while a step runs, the model's modules have stand-ins that share the parameters' memory and collect the
gradients; then one backward pass of no computation hands the sums to the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter


class StandIns:
    """Stand-ins for some parameters of a model."""

    def __init__(self, model: nn.Module, parameters: Iterable[Parameter]) -> None:
        own = {id(parameter): parameter for parameter in parameters}
        self.parameters = list(own.values())
        """The parameters that have them."""
        self._pairs = [(parameter, Parameter(parameter.detach())) for parameter in self.parameters]
        standing = {id(parameter): stand_in for parameter, stand_in in self._pairs}
        self._places = [
            (module, name, parameter, standing[id(parameter)])
            for module in model.modules()
            for name, parameter in module._parameters.items()  # pyright: ignore[reportPrivateUsage]
            if id(parameter) in standing and parameter is not None
        ]

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, the model's modules have the stand-ins; gradients are collected there."""
        for parameter, stand_in in self._pairs:
            if stand_in.data_ptr() != parameter.data_ptr():
                stand_in.data = parameter.data  # An exchange may have moved it.
            stand_in.requires_grad_(parameter.requires_grad)
            stand_in.grad = None
        for module, name, _, stand_in in self._places:
            module._parameters[name] = stand_in  # pyright: ignore[reportPrivateUsage]
        try:
            yield
        finally:
            for module, name, parameter, _ in self._places:
                module._parameters[name] = parameter  # pyright: ignore[reportPrivateUsage]

    @property
    def stand_ins(self) -> list[Parameter]:
        """The stand-ins themselves."""
        return [stand_in for _, stand_in in self._pairs]

    def gradients(self) -> list[Tensor | None]:
        """What each parameter's stand-in has collected."""
        return [stand_in.grad for _, stand_in in self._pairs]

    def set_gradient(self, number: int, gradient: Tensor) -> None:
        """Replace what one of them has collected."""
        self._pairs[number][1].grad = gradient

    def deliver(self) -> None:
        """Hand the gradients to the parameters, in one backward pass."""
        parameters: list[Parameter] = []
        gradients: list[Tensor] = []
        for parameter, stand_in in self._pairs:
            gradient, stand_in.grad = stand_in.grad, None
            if gradient is not None:
                parameters.append(parameter)
                gradients.append(gradient)
        if parameters:
            with torch.enable_grad():
                total: Tensor = _Delivery.apply(gradients, *parameters)
            total.backward()


class _Delivery(torch.autograd.Function):
    """Its gradients are those that it is given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        taken = (None, *ctx.gradients)
        ctx.gradients.clear()  # Nothing else refers to them, so they become the parameters' own without a copy.
        return taken
