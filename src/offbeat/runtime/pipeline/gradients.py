"""Gradients of a step in several backward passes, given to a model's parameters as if by one.

Exchanges, clipping and accumulation hook the parameters and expect one backward pass per batch. A pipeline has one per
microbatch. So while a step runs, the model's modules have stand-ins that share the parameters' memory and collect the
gradients; then one backward pass of no computation hands the sums to the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from offbeat.protocols.pipelines.plan import TiedWeights


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several stages use."""

    stages: tuple[int, ...]
    """Those that use it."""
    parameter: Parameter
    stand_in: Parameter | None
    """What collects its gradient, on a stage that uses it."""

    @property
    def weights(self) -> TiedWeights:
        """As the plan of a pipeline has it."""
        return TiedWeights(self.stages, max(1, self.parameter.nbytes))

    @property
    def own(self) -> Tensor:
        """The gradient on this stage: zeros if there is none."""
        gradient = None if self.stand_in is None else self.stand_in.grad
        return torch.zeros_like(self.parameter) if gradient is None else gradient

    def add(self, gradients: Mapping[int, Tensor], stage: int) -> None:
        """Add the gradients of other stages, in the order of the stages, so that all have the same sum."""
        terms = {stage: self.own, **gradients}
        first, *rest = (terms[user] for user in sorted(terms))
        total = first.clone()
        for term in rest:
            total += term
        if self.stand_in is not None:
            self.stand_in.grad = total


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

    def tied(self, users: Mapping[Parameter, Sequence[int]]) -> list[TiedParameter]:
        """The parameters that several stages use, and their stand-ins."""
        stand_ins = {id(parameter): stand_in for parameter, stand_in in self._pairs}
        return [TiedParameter(tuple(stages), p, stand_ins.get(id(p))) for p, stages in users.items()]

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
