"""Gradients of several batches are summed before they are exchanged and applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.strategies._base import Traits, require
from offbeat.strategies._worker import Exchange, Pace, Timing, closure_of


@dataclass(frozen=True)
class Accumulate(Timing):
    """Sum the gradients of several batches, then exchange and apply them once.

    An update then stands for that many batches; optimizer steps in between change nothing. The last batch of an epoch
    always updates, where it is known to be the last (it is not for streams).
    """

    steps: int
    """Batches per exchange and update."""

    traits = Traits(synchronous=True, exact=True, deterministic=True)
    aliases: ClassVar = {"gradient_accumulation": "accumulate"}
    examples = ("accumulate(4)", "ddp + accumulate(4)")

    def __post_init__(self) -> None:
        """Refuse to wait for no batch at all."""
        super().__post_init__()
        require(self.steps >= 1, self, "steps", self.steps, "at least 1 batch is needed for an update")

    def pace(self, exchange: Exchange) -> Pace:
        """The worker's side: gradients are kept aside until enough are there."""
        return _Accumulating(exchange, self.steps)

    def batches_per_update(self) -> int:
        """As many as are accumulated."""
        return self.steps


class _Accumulating(Pace):
    """Keeps a sum of gradients, weighted by examples, next to each parameter.

    In a batch that does not update, `optimizer.step()` finds no gradients: they were taken into the sum just before
    and are put back just after, so that `zero_grad` and code that looks at gradients behave as usual. In the batch
    that does, the sum joins the new gradients inside backward, before the exchange sees them.
    """

    def __init__(self, exchange: Exchange, steps: int) -> None:
        self._exchange, self._steps = exchange, steps
        self._parameters: list[Parameter] = []
        self._numbers: dict[int, int] = {}
        self._sums: dict[int, Tensor] = {}
        self._batches = 0
        self._examples = 0
        self._held_examples, self._held_total = 0, 0
        self._updating = True
        self._queued = False
        self._hidden: list[tuple[Parameter, Tensor]] = []

    def adopt(self, model: nn.Module) -> None:
        """Hooks that add the sum to the new gradients."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                number = self._numbers.setdefault(id(parameter), len(self._parameters))
                self._parameters.append(parameter)
                parameter.register_post_accumulate_grad_hook(partial(self._join, number))

    def watch(self, optimizer: Optimizer) -> None:
        """Hooks that keep gradients from a step that does not update."""

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if closure_of(args, kwargs) is not None:
                raise StrategyError("accumulate cannot be used with optimizer.step(closure). Use an exchange alone.")
            if not self._updating:
                self._take(p for group in optimizer.param_groups for p in group["params"])

        def after(*_: Any) -> None:
            for parameter, gradient in self._hidden:
                parameter.grad = gradient
            self._hidden.clear()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Count the batch; the one that completes the sum is exchanged with the weight of all."""
        if self._updating:
            self._batches = self._held_examples = self._held_total = 0
            self._sums.clear()
        else:
            self._held_examples += self._examples
        self._examples = examples
        self._batches += 1
        self._updating = last or self._batches >= self._steps
        self._exchange.suspend(not self._updating)
        known = None if total is None or self._held_total < 0 else self._held_total + total
        self._held_total = -1 if known is None else known
        if self._updating:
            self._exchange.weigh(self._held_examples + examples, known)

    @property
    def updating(self) -> bool:
        """Whether this batch completes the sum."""
        return self._updating

    def _take(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            number = self._numbers.get(id(parameter))
            if gradient is None or number is None:
                continue
            weighted = gradient.detach() * self._examples
            self._sums[number] = self._sums[number] + weighted if number in self._sums else weighted
            self._hidden.append((parameter, gradient))
            parameter.grad = None

    def _join(self, number: int, parameter: Tensor) -> None:
        if not self._updating or self._batches == 1:
            return
        if not self._queued and self._sums:
            self._queued = True
            # Queued before the exchange's own, so that what backward did not reach is in place when that one looks.
            Variable._execution_engine.queue_callback(self._join_unreached)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
        kept = self._sums.pop(number, None)
        gradient = parameter.grad
        examples = self._held_examples + self._examples
        if gradient is None or not examples:
            return
        with torch.no_grad():
            gradient.mul_(self._examples / examples)
            if kept is not None:
                gradient.add_(kept, alpha=self._exchange.weight_in_backward / examples)

    def _join_unreached(self) -> None:
        self._queued = False
        examples = max(self._held_examples + self._examples, 1)
        for number, kept in self._sums.items():
            parameter = self._parameters[number]
            if parameter.grad is None:
                parameter.grad = kept * (self._exchange.weight_in_backward / examples)
        self._sums.clear()

    def state_dict(self) -> dict[str, Any]:
        """A sum may be half full at a checkpoint."""
        return {
            "sums": dict(self._sums),
            "batches": self._batches,
            "examples": self._examples,
            "held": [self._held_examples, self._held_total],
            "updating": self._updating,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on filling it."""
        self._sums = dict(state["sums"])
        self._batches, self._examples = state["batches"], state["examples"]
        self._held_examples, self._held_total = state["held"]
        self._updating = state["updating"]
