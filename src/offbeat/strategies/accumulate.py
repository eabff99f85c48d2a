"""Gradient accumulation: gradients of several batches are summed before they are exchanged and applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook

from offbeat.errors import RunError
from offbeat.protocols.compression import RowFormat
from offbeat.protocols.schedule import View
from offbeat.simulate.predicted_step import Step
from offbeat.strategies._base import Traits
from offbeat.strategies.worker.capabilities import Microbatched
from offbeat.strategies.worker.exchange import Exchange, Exchanging, Microbatches, Pace, Timing, refuse_closure
from offbeat.strategies.worker.flat_rows import parameters_of


@dataclass(frozen=True)
class Accumulate(Timing):
    """Sum the gradients of several batches, then exchange and apply them once.

    An update covers that many batches; optimizer steps in between change nothing. The last batch of an epoch always
    updates, where it is known to be the last (it is not for streams).
    """

    steps: int
    """Batches per exchange and update."""

    promises = Traits(synchronous=True, exact=True, deterministic=True)
    aliases: ClassVar = {"gradient_accumulation": "accumulate"}
    examples = ("accumulate(4)", "ddp + accumulate(4)")
    _ranges = (("steps", lambda n: n >= 1, "at least 1 batch is needed for an update"),)

    def pace(self, exchange: Exchange) -> Pace:
        """The worker's side: gradients are accumulated, or sent one by one if the exchange takes microbatches."""
        if isinstance(exchange, Microbatched) and exchange.takes_microbatches:
            return Microbatches(exchange, exchange, self.steps)
        return AccumulateWorker(exchange, self.steps)

    def planned(self, exchange: Exchanging, view: View, nbytes: int, forms: Sequence[RowFormat] = ()) -> Step | str:
        """What the exchange sends, after the last batch of each update."""
        step = exchange.planned(view, nbytes, forms)
        return step if isinstance(step, str) else structs.replace(step, period=self.steps, beside=False)

    def batches_per_update(self) -> int:
        """The accumulated batches."""
        return self.steps


class AccumulateWorker(Pace):
    """Keeps a sum of gradients, weighted by examples, for each parameter.

    In a batch that does not update, `optimizer.step()` finds no gradients, and they are restored just after it, so that
    `zero_grad` and code that inspects gradients behave as usual. The sum takes what backward left, before clipping:
    clipping is for the gradient that an update uses. In the batch that updates, the sum is added to the new gradients
    inside backward, before the exchange sees them.
    """

    acts_in_steps = True

    def __init__(self, exchange: Exchange, steps: int) -> None:
        super().__init__(exchange)
        self._steps = steps
        self._parameters: list[Parameter] = []
        self._models: list[int] = []
        self._numbers: dict[int, int] = {}
        self._sums: dict[int, Tensor] = {}
        self._fresh: dict[int, Tensor] = {}
        self._joined: set[int] = set()
        self._reached: set[int] = set()
        self._batches = 0
        self._examples = 0
        self._held_examples, self._held_total = 0, 0
        self._updating = True
        self._queued = False
        self._hidden: list[tuple[Parameter, Tensor]] = []

    def adopt(self, model: nn.Module) -> None:
        """Hook the model to weigh new gradients and add the sum to them."""
        place = self._models[-1] + 1 if self._models else 0
        for parameter in model.parameters():
            if id(parameter) in self._numbers or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            number = self._numbers[id(parameter)] = len(self._parameters)
            self._parameters.append(parameter)
            self._models.append(place)
            trainable = parameter.requires_grad
            parameter.requires_grad_(True)  # Torch accepts no hooks on frozen parameters, but keeps existing ones.
            # Marked, so that torch does not warn of it when the user's loop saves the model.
            weighed = unserializable_hook(partial(self._weighed, number))
            self.handles.append(parameter.register_hook(weighed))
            self.handles.append(parameter.register_post_accumulate_grad_hook(partial(self._passed, number)))
            parameter.requires_grad_(trainable)

    def watch(self, optimizer: Optimizer) -> None:
        """Hide gradients from steps that do not update."""

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            refuse_closure("accumulate", args, kwargs, "an exchange alone")
            for parameter in parameters_of(optimizer):
                number = self._numbers.get(id(parameter))
                if number is None:
                    continue
                if self._updating:
                    self._sums.pop(number, None)
                    continue
                fresh = self._fresh.pop(number, None)
                if parameter.grad is not None:
                    if fresh is not None:
                        self._sums[number] = self._sums[number] + fresh if number in self._sums else fresh
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

        def after(*_: Any) -> None:
            for parameter, gradient in self._hidden:
                parameter.grad = gradient
            self._hidden.clear()

        self._hook_steps(optimizer, before, after)

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Count the batch; the last batch of an update is exchanged with the weight of all of them."""
        if self._updating:
            self._batches = self._held_examples = self._held_total = 0
            self._sums.clear()
        else:
            self._held_examples += self._examples
        self._fresh.clear()
        self._joined.clear()
        self._examples = examples
        self._batches += 1
        self._updating = last or self._batches >= self._steps
        self.exchange.suspend(not self._updating)
        known = None if total is None or self._held_total < 0 else self._held_total + total
        self._held_total = -1 if known is None else known
        if self._updating:
            self.exchange.weigh(self._held_examples + examples, known)

    @property
    def updating(self) -> bool:
        """Whether this batch completes the update."""
        return self._updating

    def _weighed(self, number: int, gradient: Tensor) -> Tensor | None:
        """Weigh a new gradient by its share of all examples of the update."""
        if not self._updating or self._batches == 1:
            return None
        if number in self._joined and _is_zero(self._parameters[number].grad):
            self._joined.discard(number)  # The sum added in an earlier pass was not used, as in a GAN.
        examples = self._held_examples + self._examples
        return gradient * (self._examples / examples) if examples else None

    def _passed(self, number: int, parameter: Tensor) -> None:
        """Backward has finished this parameter's gradient."""
        gradient = parameter.grad
        if gradient is None or (self._batches == 1 and self._updating):
            return
        if not self._updating:
            self._fresh[number] = gradient.detach() * self._examples
            return
        self._reached.add(self._models[number])
        if not self._queued:
            self._queued = True
            # Queued before the exchange's callback, so that gradients backward did not reach are in place for it.
            Variable._execution_engine.queue_callback(self._join_unreached)  # pyright: ignore[reportPrivateUsage]
        if number not in self._joined:
            self._join(number)

    def _join(self, number: int) -> None:
        kept, parameter = self._sums.get(number), self._parameters[number]
        if kept is None:
            return
        self._joined.add(number)
        weight = self.exchange.weight_in_backward / max(self._held_examples + self._examples, 1)
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = kept * weight
            else:
                parameter.grad.add_(kept, alpha=weight)

    def _join_unreached(self) -> None:
        """Add the sums of parameters that had gradients in earlier batches, and none in this backward pass."""
        self._queued = False
        reached, self._reached = self._reached, set()
        for number in list(self._sums):
            late = number not in self._joined or self._parameters[number].grad is None
            if late and self._models[number] in reached:
                if not self.exchange.joins_late:
                    raise RunError(
                        "a parameter had a gradient in an earlier batch of an accumulated step and none in the last, "
                        "which this exchange cannot sum any more. Use allreduce, which can."
                    )
                self._join(number)

    def state_dict(self) -> dict[str, Any]:
        """A checkpoint may fall within an update."""
        return {
            "sums": {} if self._updating else dict(self._sums),
            "batches": self._batches,
            "examples": self._examples,
            "held": [self._held_examples, self._held_total],
            "updating": self._updating,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue within the update."""
        self._sums = dict(state["sums"])
        self._batches, self._examples = state["batches"], state["examples"]
        self._held_examples, self._held_total = state["held"]
        self._updating = state["updating"]


def _is_zero(gradient: Tensor | None) -> bool:
    if gradient is None:
        return True
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return not bool(values.any())
